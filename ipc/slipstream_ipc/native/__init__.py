"""C libraries that are compiled on this machine for its processor, and kept in the user's cache."""
