"""`slipstream bench tp`: what it costs to compute one model in several processes."""
