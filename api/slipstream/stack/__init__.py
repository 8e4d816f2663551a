"""A stack of processes: settings, supervisor, and what it tells."""
