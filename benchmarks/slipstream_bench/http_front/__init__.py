"""`slipstream bench front`: what a streamed event costs the HTTP front's process."""
