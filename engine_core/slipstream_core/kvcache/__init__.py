"""Blocks of the KV cache: allocation, sharing, and lookup by content."""
