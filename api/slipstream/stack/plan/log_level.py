"""The log level of stacks: its check, and a context manager that sets it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from slipstream.errors import wrong_option
from slipstream_ipc.telemetry.logs import LOG_LEVEL_VARIABLE, LOG_LEVELS


def check_log_level() -> None:
    """Raises: BadRequestError where $SLIPSTREAM_LOG_LEVEL is set and no level."""
    given = os.environ.get(LOG_LEVEL_VARIABLE, "")
    if given and given.lower() not in LOG_LEVELS:
        raise wrong_option(f"${LOG_LEVEL_VARIABLE}", given, ", ".join(LOG_LEVELS))


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
