"""Adapters (LoRA): low-rank changes of a model's linear layers, each request's its own."""
