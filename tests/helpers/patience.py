"""The deadline of every wait in a test.

There is one bound for all, long enough for a busy machine: a wait ends as soon as its condition
holds, and takes this long only if something is broken. Tests do not check speed. Loops that step
until a condition holds use `Patience`.
"""

from __future__ import annotations

import time

PATIENCE_S = 120.0


class Patience:
    """A deadline for a loop that steps until a condition holds: each turn calls `check`."""

    def __init__(self, seconds: float = PATIENCE_S) -> None:
        self._end_s = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._end_s - time.monotonic())

    def check(self, told: object = "it did not come to pass") -> None:
        """Raises AssertionError, with `told`, after the deadline."""
        assert time.monotonic() < self._end_s, told
