"""The state that a client keeps of each stream: received positions, unread deltas, its end."""
