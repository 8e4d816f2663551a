"""Whose turn it is to be tokenised, among those that wait.

Owns: their order. Does not know: what they are.

Rules:
- The shorter goes first, but none waits for ever: one is overtaken only until FAIRNESS times its
  own length has been served since it came.
"""

from __future__ import annotations

import heapq

FAIRNESS = 8


class FairOrder:
    """Whose turn it is, by key. Pure."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # when it is due, in characters served; key
        self._sizes: dict[int, int] = {}  # of those that wait or have their turn
        self._num_served = 0  # characters
        self.current: int | None = None  # who has its turn

    def add(self, key: int, size: int) -> None:
        """It waits."""
        self._sizes[key] = size
        heapq.heappush(self._heap, (self._num_served + FAIRNESS * size, key))

    def discard(self, key: int) -> None:
        """It is answered, or will not be any more; or it was none."""
        size = self._sizes.pop(key, 0)
        if key == self.current:
            self.current = None
            self._num_served += size

    def next(self) -> int | None:
        """Who has its turn now and had not before; None: nobody, or it is somebody's still."""
        if self.current is not None:
            return None
        while self._heap:
            _, key = heapq.heappop(self._heap)
            if key in self._sizes:
                self.current = key
                return key
        return None
