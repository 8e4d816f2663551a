"""`slipstream bench gc`: what the shape of a step's token ids costs the garbage collector."""
