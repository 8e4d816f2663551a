"""Compute kernels, by kind of device, and the codes of weights that they read."""
