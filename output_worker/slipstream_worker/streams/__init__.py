"""A stream's state from its registration until it is forgotten, by row."""
