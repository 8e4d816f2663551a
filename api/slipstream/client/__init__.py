"""Clients: blocking and asyncio, streams and groups of streams."""
