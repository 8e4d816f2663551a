"""Programs that several experiments share."""
