"""Measurements of Slipstream by itself, as `slipstream bench` runs them."""
