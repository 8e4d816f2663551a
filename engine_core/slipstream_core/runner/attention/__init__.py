"""Attention over the paged cache: one interface to the models, one module per kind of device."""
