"""`slipstream bench step`: the cost of a decode step, part by part."""
