"""Serves GGUF files: each is unfolded once into a model's folder, which all processes read."""
