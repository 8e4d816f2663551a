"""What clients read and ask: ports, deltas, latency, queries."""
