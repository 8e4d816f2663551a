"""Timelines: what the processes recorded (`slipstream_ipc.trace`), put together and drawn."""
