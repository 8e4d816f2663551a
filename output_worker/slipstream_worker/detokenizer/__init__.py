"""Tokens to text: compiled token tables, their compilers, and the detokenisers that use them."""
