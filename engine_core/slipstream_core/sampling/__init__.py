"""Sampling: from logits to tokens and log-probabilities, for a whole batch."""
