"""`slipstream bench output-path`: what it costs to bring sampled ids to their reader as deltas."""
