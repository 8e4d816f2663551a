"""Tensor parallel: how the ranks of a core learn what a step computes."""
