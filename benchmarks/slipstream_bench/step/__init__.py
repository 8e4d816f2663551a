"""`slipstream bench step`: what a decode step costs, part by part."""
