"""Stacks of real processes without spares, for tests that do not need any."""

from __future__ import annotations

from typing import Any

from slipstream import Stack
from slipstream.stack.settings import SHORT_LIVED


def spareless_stack(model: str | None = None, **settings: Any) -> Stack:
    """A stack that starts no spares, hence half as many processes.

    A process that dies is still replaced, by one that is started then.
    """
    return Stack(model, **{**SHORT_LIVED, **settings})
