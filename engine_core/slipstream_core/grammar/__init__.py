"""Structured outputs: compiling grammars, following them, masks of the allowed tokens."""
