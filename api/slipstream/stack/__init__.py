"""A stack of processes: its settings, its supervisor, and the events the supervisor reports."""
