"""A model in slices: each rank of a core holds one, and they compute each step together."""
