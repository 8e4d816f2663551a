"""The commands that run servers, and those that look after running ones."""
