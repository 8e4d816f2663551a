"""A stream's state in the worker, from its registration until it is forgotten."""
