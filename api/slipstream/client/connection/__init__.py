"""A client's connection to its server, a stack or a fleet, driven by a thread or an event loop."""
