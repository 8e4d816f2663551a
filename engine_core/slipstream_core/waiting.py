"""Who waits to be computed, in the order in which they are to run.

Owns: that order: by priority, then by arrival. Does not know: why somebody waits, who may run.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from slipstream_core.columns import RequestColumns


class WaitingQueue:
    """Rows of requests that hold no slot."""

    def __init__(self, requests: RequestColumns) -> None:
        self._requests = requests
        self._keys: list[tuple[int, int, int]] = []  # (-priority, -arrival, row): next is last

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def rows(self) -> list[int]:
        """All that wait, in no particular order."""
        return [row for _, _, row in self._keys]

    def add(self, row: int) -> None:
        """Let a request wait at its place."""
        insort(self._keys, self._key(row))

    def remove(self, row: int) -> None:
        """A request that waits does so no longer."""
        del self._keys[bisect_left(self._keys, self._key(row))]

    def peek(self, nth: int) -> int | None:
        """Who is next after `nth` others, None where nobody is."""
        return self._keys[-1 - nth][2] if nth < len(self._keys) else None

    def _key(self, row: int) -> tuple[int, int, int]:
        return -int(self._requests.priority[row]), -int(self._requests.arrival[row]), row
