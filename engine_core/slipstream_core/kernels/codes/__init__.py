"""Weights that keep the codes which a checkpoint has for them."""
