"""Kernels in C for CPUs, compiled where they run; without a compiler torch's operators do."""
