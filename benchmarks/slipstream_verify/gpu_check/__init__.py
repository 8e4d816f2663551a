"""`scripts/gpu-check`: whether this machine's card computes correctly, and how fast.

    python -m slipstream_verify.gpu_check [PART...] [--sections NAME...] [--dry-run] [--out DIR]

Its parts, each within five minutes, are `first` (a little of the next two), `exactness` (tests,
kernels by themselves, and tokens against transformers' own), `decode` (a stack against the card's
bandwidth and matrix rate, and the overlap), `census` (the kernels of a step), `tiles` (a sweep of
the attention kernels' settings), `steady` (a closed loop with prompts that arrive), `prefill`
(against the card's matrix rate, then the peer and the benchmarks on the real device) and
`sanitizer` (small launches under compute-sanitizer).
Every section of a part runs in its own process (`section_process`), so that a card in an
unrecoverable state, or a crash, costs one section and not the rest; the rows it had found are kept.
"""
