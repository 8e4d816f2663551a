"""A fair order of waiting prompts: tenants in turns, of each the shorter first, without starvation.

- The next turn is the tenant's for which the fewest characters have been served, so one waits for
  one item of another, however many that has. A tenant that comes back gains nothing by its absence.
- Among a tenant's items, one is overtaken only until FAIRNESS times its own size has been served
  since it was added.
"""

from __future__ import annotations

import heapq

FAIRNESS = 8
_FEW_TENANTS = 64


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

    def __len__(self) -> int:
        return len(self._sizes)

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


class TenantOrder:
    """Items by key, at most one of which has its turn; tenants take turns. Pure."""

    def __init__(self) -> None:
        self._lines: dict[bytes, FairOrder] = {}  # by tenant, of those with items
        self._served: dict[bytes, int] = {}  # characters, by tenant; see `_start`
        self._tenants: dict[int, bytes] = {}  # by key
        self._sizes: dict[int, int] = {}
        self._now = 0  # served for the tenant that had the last turn, before it
        self.current: int | None = None  # the item that has its turn

    def add(self, key: int, size: int, tenant: bytes = b"") -> None:
        """Add a waiting item."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = FairOrder()
            self._served[tenant] = max(self._now, self._served.get(tenant, 0))
            if len(self._served) > 2 * len(self._lines) + _FEW_TENANTS:
                self._served = {
                    each: num
                    for each, num in self._served.items()
                    if num > self._now or each in self._lines
                }
        line.add(key, size)
        self._tenants[key], self._sizes[key] = tenant, size

    def discard(self, key: int) -> None:
        """An item is answered, or will not be. Unknown keys are ignored."""
        tenant = self._tenants.pop(key, None)
        if tenant is None:
            return
        size = self._sizes.pop(key)
        line = self._lines[tenant]
        if key == self.current:
            self.current = None
            self._served[tenant] += size
        line.discard(key)
        if not len(line):
            del self._lines[tenant]
        if not self._lines:  # none was kept waiting, so none has a claim
            self._now = max(self._now, self._served[tenant])

    def next(self) -> int | None:
        """Give the next item its turn; None if one has it already, or none waits."""
        if self.current is not None or not self._lines:
            return None
        tenant = min(self._lines, key=self._served.__getitem__)
        self._now = max(self._now, self._served[tenant])
        self.current = self._lines[tenant].next()
        return self.current
