"""The HTTP/1.1 server: aiohttp's, with limits and deadlines added."""
