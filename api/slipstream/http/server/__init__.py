"""Bytes and connections: aiohttp's HTTP/1.1 server, with bounds of our own around it."""
