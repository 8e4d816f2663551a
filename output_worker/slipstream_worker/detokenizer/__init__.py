"""Tokens to text: compiled tables, their compiler, and the detokenisers over them."""
