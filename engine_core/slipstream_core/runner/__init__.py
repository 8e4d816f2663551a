"""Runs a model's steps for the core: on a CPU, on a card, over ranks, or simulated."""
