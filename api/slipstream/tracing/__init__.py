"""Timelines: what the processes recorded (`slipstream_ipc.telemetry.trace`), put together and
drawn."""
