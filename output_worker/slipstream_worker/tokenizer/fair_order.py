"""A fair order of waiting prompts: shorter first, without starvation.

An item is overtaken only until FAIRNESS times its own size has been served since it was added.
"""

from __future__ import annotations

import heapq

FAIRNESS = 8


class FairOrder:
    """Items by key, at most one of which has its turn. Pure."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (due, in characters served; key)
        self._sizes: dict[int, int] = {}  # of items that wait or have their turn
        self._num_served = 0  # characters
        self.current: int | None = None  # the item that has its turn

    def add(self, key: int, size: int) -> None:
        """Add a waiting item."""
        self._sizes[key] = size
        heapq.heappush(self._heap, (self._num_served + FAIRNESS * size, key))

    def discard(self, key: int) -> None:
        """An item is answered, or will not be. Unknown keys are ignored."""
        size = self._sizes.pop(key, 0)
        if key == self.current:
            self.current = None
            self._num_served += size

    def next(self) -> int | None:
        """Give the next item its turn; None if one has it already, or none waits."""
        if self.current is not None:
            return None
        while self._heap:
            _, key = heapq.heappop(self._heap)
            if key in self._sizes:
                self.current = key
                return key
        return None
