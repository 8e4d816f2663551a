"""How much the processes of a stack say that is started inside, unless the environment says it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from slipstream.stack.stack import LOG_LEVEL_VARIABLE


@contextlib.contextmanager
def log_level(level: str) -> Iterator[None]:
    """For stacks started inside; afterwards the environment is as it was."""
    if LOG_LEVEL_VARIABLE in os.environ:
        yield
        return
    os.environ[LOG_LEVEL_VARIABLE] = level
    try:
        yield
    finally:
        del os.environ[LOG_LEVEL_VARIABLE]
