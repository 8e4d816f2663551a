"""Attention over the paged cache: one interface for models, one module per kind of device."""
