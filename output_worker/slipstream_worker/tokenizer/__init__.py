"""Chat templates and tokenising, in a process of their own."""
