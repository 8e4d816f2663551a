"""`slipstream bench overlap`: output processing in the engine's own loop, or beside it."""
