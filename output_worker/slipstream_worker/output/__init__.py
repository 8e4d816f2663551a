"""One stream's text: what is released, and where it stops."""
