"""Loading a model, and refusing one that cannot be served."""
