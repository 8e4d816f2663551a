"""`scripts/gpu-check`: whether this machine's card computes what it should, and how fast.

    python -m slipstream.bench.gpu_check [--device cuda|cpu] [--quick] [--out DIR]

Every part runs in a process of its own (`part`), so that a card in an unrecoverable state, or a
crash, costs one part and not the rest; what a part found until then is kept.
"""
