"""Compute kernels, by kind of device."""
