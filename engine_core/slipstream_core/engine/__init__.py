"""The loop of a core, and what it is assembled from."""
