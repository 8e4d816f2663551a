"""`slipstream bench output-path`: the cost of bringing sampled ids to their reader as deltas."""
