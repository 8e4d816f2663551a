"""Histories of tokens, text and log-probabilities, and the cursors of their receivers."""
