"""The output worker: accepts clients' requests, and turns the core's tokens into their text."""
