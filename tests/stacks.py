"""Stacks of real processes, for tests in which no process is lost."""

from __future__ import annotations

from typing import Any

from slipstream import Stack
from slipstream.settings import SHORT_LIVED


def spareless_stack(model: str | None = None, **settings: Any) -> Stack:
    """A stack that starts no process that waits for another's death: half of them."""
    return Stack(model, **{**SHORT_LIVED, **settings})
