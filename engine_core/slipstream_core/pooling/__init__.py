"""Embeddings: a loop without a scheduler, a cache or streams. Each answer is a vector."""
