"""What a stack or a fleet will be: its processes and their configs, from its settings."""
