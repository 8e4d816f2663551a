"""Blocks of an answer: its events as items that begin, grow and end, as /v1/responses has them."""
