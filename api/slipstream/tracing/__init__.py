"""Timelines of a stack: merging what its processes recorded (`slipstream_ipc.telemetry.trace`),
and drawing it.
"""
