"""Benchmarks of Slipstream, run by `slipstream bench`."""
