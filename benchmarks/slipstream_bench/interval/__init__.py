"""`slipstream bench interval`: what a stream interval of n tokens gains, and what "auto" does."""
