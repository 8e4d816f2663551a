"""The deadline of every wait in a test.

There is one bound for all, long enough for a busy machine: a wait ends as soon as its condition
holds, and takes this long only if something is broken. Tests do not check speed. Loops that step
until a condition holds, or look at what other processes do, use `Patience`.
"""

from __future__ import annotations

import time

PATIENCE_S = 120.0
_PAUSE_S = 0.002


class Patience:
    """A deadline for a loop until a condition holds: each turn calls `check` where the loop itself
    does what it waits for, or blocks, and `wait` where others do.
    """

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def check(self, told: object = "it did not come to pass") -> None:
        """Raises AssertionError, with `told`, after the deadline."""
        assert time.monotonic() < self._end_s, told

    def wait(self, told: object = "it did not come to pass") -> None:
        """As `check`, and leave the processor to what is awaited for a moment."""
        self.check(told)
        time.sleep(_PAUSE_S)
