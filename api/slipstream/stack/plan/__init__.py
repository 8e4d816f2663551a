"""Planning of a stack or a fleet: its processes and their configs, from its settings."""
