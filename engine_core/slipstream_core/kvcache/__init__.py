"""Blocks of the KV cache: free, held, and found again by their content."""
