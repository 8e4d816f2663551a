"""A context manager for the log level of stacks started within it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from slipstream_ipc.telemetry.logs import LOG_LEVEL_VARIABLE


@contextlib.contextmanager
def log_level(level: str) -> Iterator[None]:
    """Set $SLIPSTREAM_LOG_LEVEL unless it is set already, and restore it afterwards."""
    if LOG_LEVEL_VARIABLE in os.environ:
        yield
        return
    os.environ[LOG_LEVEL_VARIABLE] = level
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL_VARIABLE]
