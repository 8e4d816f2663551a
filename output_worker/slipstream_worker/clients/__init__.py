"""The worker's side of its clients: ports, readers, deltas, queries, latency."""
