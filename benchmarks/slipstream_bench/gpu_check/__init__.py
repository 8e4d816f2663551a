"""`scripts/gpu-check`: whether this machine's card computes correctly, and how fast.

    python -m slipstream_bench.gpu_check [PART...] [--sections NAME...] [--dry-run] [--out DIR]

Three parts, each within five minutes: `exactness` (tests, and tokens against transformers' own),
`decode` (against the bare replay of the step's graph and the card's bandwidth, and the overlap),
`prefill` (against the card's matrix rate, then the peer and the benchmarks on the real device).
Every section of a part runs in its own process (`section_process`), so that a card in an
unrecoverable state, or a crash, costs one section and not the rest; the rows it had found are kept.
"""
