"""A model's forward as a flat list of operators: traced, fused, packed, run in one call."""
