"""The blocking and the asyncio client, and the streams they return."""
