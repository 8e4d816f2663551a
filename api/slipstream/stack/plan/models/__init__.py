"""The model that a stack serves: where it comes from, and what is read of it before it starts."""
