"""`slipstream bench interval`: what a stream interval of n tokens is worth, and "auto"."""
