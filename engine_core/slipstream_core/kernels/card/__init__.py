"""Kernels in Triton for cards, and how they are launched."""
