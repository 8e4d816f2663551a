"""A stream's released text, and where it stops."""
