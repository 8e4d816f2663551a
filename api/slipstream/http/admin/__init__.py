"""What tells about the server: metrics, the live page and its numbers."""
