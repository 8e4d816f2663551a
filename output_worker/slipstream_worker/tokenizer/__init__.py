"""Chat templates and tokenising, in a separate process."""
