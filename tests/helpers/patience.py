"""How long tests wait for what must come to pass.

One bound for all, so generous that a busy machine does not reach it: a wait ends when what it
waits for is there, and it lasts this long only where something is broken. No test says how fast
anything is. What is waited for by taking turns is waited for with `Patience`.
"""

from __future__ import annotations

import time

PATIENCE_S = 120.0


class Patience:
    """Ends a loop that takes turns until something holds: each turn calls `check`."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """None is left at 0."""
        return max(0.0, self._end_s - time.monotonic())

    def check(self, told: object = "it did not come to pass") -> None:
        """Raises: AssertionError, when too long has been waited."""
        assert time.monotonic() < self._end_s, told
