"""Loads a model, or refuses one that cannot be served."""
