"""A client's connection to its worker, driven by a thread or an event loop."""
