"""What a client keeps of each stream: positions, deltas not read yet, its end."""
