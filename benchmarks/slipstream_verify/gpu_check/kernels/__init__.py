"""Triton's kernels by themselves: compiled in parallel, with or without a card, and timed."""
