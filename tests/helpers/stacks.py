"""Stacks of real processes, for tests that no spare has a part in."""

from __future__ import annotations

from typing import Any

from slipstream import Stack
from slipstream.stack.settings import SHORT_LIVED


def spareless_stack(model: str | None = None, **settings: Any) -> Stack:
    """A stack that starts no process that waits for another's death: half of them.

    Who dies is replaced all the same, by a process that is started then.
    """
    return Stack(model, **{**SHORT_LIVED, **settings})
