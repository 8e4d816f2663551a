"""A fair order of waiting prompts: tenants in turns, without starvation.

- The next turn is the tenant's for which the fewest characters have been served, so one waits for
  what has its turn already, however many items another tenant has. A tenant that comes back gains
  nothing by its absence.
- Among a tenant's items the shorter go first, or those that came first. A shorter one overtakes
  another only until FAIRNESS times the other's size has been served since that was added.
"""

from __future__ import annotations

import heapq

FAIRNESS = 8
_FEW_TENANTS = 64


class FairOrder:
    """Waiting items by key, the shorter first. Pure."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int]] = []  # (due, in characters served; key)
        self._sizes: dict[int, int] = {}  # of the items that wait
        self._num_served = 0  # characters

    def add(self, key: int, size: int) -> None:
        """Add an item."""
        self._sizes[key] = size
        heapq.heappush(self._heap, (self._num_served + FAIRNESS * size, key))

    def __len__(self) -> int:
        return len(self._sizes)

    def discard(self, key: int) -> None:
        """An item no longer waits. Unknown keys are ignored."""
        self._sizes.pop(key, None)

    def next(self) -> int | None:
        """Take the next item, which counts as served; None if none waits."""
        while self._heap:
            _, key = heapq.heappop(self._heap)
            size = self._sizes.pop(key, None)
            if size is not None:
                self._num_served += size
                return key
        return None


class TenantOrder:
    """Items by key, a few of which have their turn; tenants take turns. Pure."""

    def __init__(self, max_size: int = 1, *, by_arrival: bool = False) -> None:
        """max_size: of the items that have their turn together, at which further ones wait.

        by_arrival: a tenant's items keep their order, else the shorter go first.
        """
        self._max_size = max_size
        self._by_arrival = by_arrival
        self._lines: dict[bytes, FairOrder] = {}  # by tenant, of those with waiting items
        # (served, number of its line, tenant), some of them outdated
        self._heap: list[tuple[int, int, bytes]] = []
        self._num_lines = 0
        self._served: dict[bytes, int] = {}  # characters, by tenant
        self._most_served = 0
        self._forget_at = _FEW_TENANTS  # tenants in `_served`
        self._waiting: dict[int, tuple[bytes, int]] = {}  # by key: tenant, size
        self._now = 0  # served for the tenant that had the last turn, before it
        self._size = 0  # of `turns`
        self.turns: dict[int, int] = {}  # sizes of the items that have their turn, oldest first

    def add(self, key: int, size: int, tenant: bytes = b"") -> None:
        """Add a waiting item."""
        line = self._lines.get(tenant)
        if line is None:
            line = self._lines[tenant] = FairOrder()
            self._served[tenant] = max(self._now, self._served.get(tenant, 0))
            self._num_lines += 1
            heapq.heappush(self._heap, (self._served[tenant], self._num_lines, tenant))
            if len(self._served) > self._forget_at:
                self._forget_tenants()
        line.add(key, 0 if self._by_arrival else size)
        self._waiting[key] = tenant, size

    def discard(self, key: int) -> None:
        """An item is answered, or will not be. Unknown keys are ignored."""
        if key in self.turns:
            self._size -= self.turns.pop(key)
            if not self.turns and not self._lines:  # none was kept waiting, so none has a claim
                self._now = self._most_served
        elif key in self._waiting:
            tenant, _ = self._waiting.pop(key)
            self._lines[tenant].discard(key)
            if not len(self._lines[tenant]):
                del self._lines[tenant]

    @property
    def size(self) -> int:
        """Total size of the items that have their turn."""
        return self._size

    def next(self) -> int | None:
        """Give the next item its turn; None if enough have theirs, or none waits."""
        if self._size >= self._max_size:
            return None
        while self._heap:
            served, number, tenant = heapq.heappop(self._heap)
            line = self._lines.get(tenant)
            if line is None or served != self._served[tenant]:
                continue
            key = line.next()
            assert key is not None
            _, size = self._waiting.pop(key)
            self.turns[key] = size
            self._size += size
            self._now = max(self._now, served)
            self._served[tenant] = served + size
            self._most_served = max(self._most_served, served + size)
            if len(line):
                heapq.heappush(self._heap, (served + size, number, tenant))
            else:
                del self._lines[tenant]
            return key
        return None

    def _forget_tenants(self) -> None:
        """Forget those that would begin anew at what they have."""
        now, lines = self._now, self._lines
        self._served = {
            each: num for each, num in self._served.items() if num > now or each in lines
        }
        self._forget_at = 2 * len(self._served) + _FEW_TENANTS
