"""The waiting requests in the order in which they run, and how much waits per tenant and in all.

- The order is by priority, then by turn, then by arrival. Tenants of equal priority take turns,
  however many requests each of them has: a new request queues behind its own tenant's requests, not
  behind those of others.
- Which of a tenant's requests has its next turn is decided by their own priorities, then by
  arrival. So these change nothing for other tenants, whatever they are. For a single tenant without
  them the order is that of arrival.
- A tenant's turn starts where its last one ends, or now, whichever is later, and ends the cost of
  the request that has it later (start-time fair queueing: Goyal, Vin and Cheng, 1996). Each request
  that begins advances `now` by its cost over the number of waiting tenants (as in weighted fair
  queueing: Demers, Keshav and Shenker, 1989). So a tenant with nothing waiting lets each of the
  others go first about once, and a stream of new tenants does not keep a tenant from its next turn.
- A request has its turn for good when it begins: a preempted one waits in its old position.
- A request that is removed before it begins costs its tenant nothing.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream_core.scheduler.request_table import RequestTable

_OUTPUTS_COUNTED = 256  # outputs counted in a request's cost; their real number is unknown
_FEW_TENANTS = 1024
_UNITS = 1024  # units of a turn per token: costs are divided among tenants


@dataclass(slots=True)
class _Line:
    """The requests of a tenant that wait and have not begun, at one priority. start: of its next
    turn.
    """

    start: int
    keys: list[tuple[int, int, int]] = field(default_factory=list)  # see `_own_key`; next is last


@dataclass(slots=True)
class _Level:
    """The turns of one priority."""

    now: int  # start of the turn of a tenant without requests
    ends: dict[bytes, int] = field(default_factory=dict)  # end of each tenant's last turn
    lines: dict[bytes, _Line] = field(default_factory=dict)  # by tenant
    # a heap with the first of each line: turn, arrival, row, tenant; others are outdated
    heads: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    # those that have begun before: -turn, -arrival, row; next is last
    again: list[tuple[int, int, int]] = field(default_factory=list)
    waiting: Counter[bytes] = field(default_factory=Counter)  # requests by tenant
    num_kept: int = _FEW_TENANTS  # size of `ends` at which those not after `now` are dropped


class WaitingQueue:
    """Rows of requests that hold no slot."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        self._levels: dict[int, _Level] = {}  # by priority, while a request with it waits
        self._priorities: list[int] = []  # of the levels, in order
        self._latest = 0  # the latest turn that began
        self._tokens: dict[int, int] = {}  # by row
        self._costs: dict[int, int] = {}  # by row, of requests that have yet to begin
        self._nums: Counter[bytes] = Counter()  # requests by tenant
        self._num_tokens: Counter[bytes] = Counter()
        self.num_tokens = 0  # tokens that all waiting requests have to compute
        # the first rows, as far as they were looked at, and the others; empty after a change
        self._order: tuple[list[int], Iterator[int]] | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    def of_tenant(self, tenant: bytes) -> tuple[int, int]:
        """The number of a tenant's requests that wait, and of the tokens that they have to
        compute.
        """
        return self._nums[tenant], self._num_tokens[tenant]

    def join(self, row: int) -> None:
        """Queue a new request."""
        requests, tenant = self._requests, self._requests.tenants[row]
        level = self._put_in(row)
        known, limit = int(requests.known[row]), int(requests.limit[row])
        self._costs[row] = _UNITS * (known + min(limit - known, _OUTPUTS_COUNTED))
        line = level.lines.get(tenant)
        if line is None:
            line = level.lines[tenant] = _Line(max(level.now, level.ends.get(tenant, 0)))
        insort(line.keys, self._own_key(row))
        if line.keys[-1][-1] == row:
            self._push_head(level, tenant)

    def add(self, row: int) -> None:
        """Queue a request that has begun before, in its old position."""
        insort(self._put_in(row).again, self._key(row))

    def begin(self, row: int) -> None:
        """Take out a request that begins to run, the first in order or one that was passed over."""
        level, tenant = self._level(row), self._requests.tenants[row]
        cost = self._costs.get(row)
        if cost is not None:  # else it was preempted and began before
            line = level.lines[tenant]
            turn = line.start
            self._requests.turn[row] = turn
            line.start = level.ends[tenant] = turn + cost
            # else newcomers without end keep a tenant from its next turn (decision 015)
            level.now = max(level.now, turn) + -(-cost // len(level.waiting))
            self._latest = max(self._latest, turn)
            if len(level.ends) > level.num_kept:
                level.ends = {each: end for each, end in level.ends.items() if end > level.now}
                level.num_kept = max(_FEW_TENANTS, 2 * len(level.ends))
        self._take_out(row)
        if cost is not None and tenant in level.lines:
            self._push_head(level, tenant)

    def remove(self, row: int) -> None:
        """Take out a waiting request that is removed."""
        level, tenant = self._level(row), self._requests.tenants[row]
        line = level.lines.get(tenant)
        is_head = line is not None and line.keys[-1][-1] == row
        self._take_out(row)
        if is_head and tenant in level.lines:
            self._push_head(level, tenant)

    def peek(self, nth: int) -> int | None:
        """The row behind the first `nth`, or None."""
        if not nth:
            return self._first()
        if self._order is None:
            self._order = [], self._in_order()
        found, rest = self._order
        while len(found) <= nth and (row := next(rest, None)) is not None:
            found.append(row)
        return found[nth] if nth < len(found) else None

    def _first(self) -> int | None:
        if not self._priorities:
            return None
        level = self._levels[self._priorities[0]]
        heads = level.heads
        while heads and not self._is_head(level, heads[0]):
            heapq.heappop(heads)
        if not level.again:
            return heads[0][2]
        turn, arrival, row = level.again[-1]
        return row if not heads or (-turn, -arrival) < heads[0][:2] else heads[0][2]

    def _in_order(self) -> Iterator[int]:
        for priority in self._priorities:
            level = self._levels[priority]
            # turn, arrival, row, and the line with the place of the row in it
            first = [
                (line.start, -line.keys[-1][1], line.keys[-1][2], len(line.keys) - 1, line.keys)
                for line in level.lines.values()
            ]
            first += [(-turn, -arrival, row, 0, []) for turn, arrival, row in level.again]
            heapq.heapify(first)
            while first:
                turn, _, row, at, keys = first[0]
                yield row
                if not at:
                    heapq.heappop(first)
                    continue
                _, arrival, behind = keys[at - 1]
                new = turn + self._costs[row], -arrival, behind, at - 1, keys
                heapq.heapreplace(first, new)

    def _put_in(self, row: int) -> _Level:
        """Count a request in; returns its level."""
        self._order = None
        priority, tenant = int(self._requests.priority[row]), self._requests.tenants[row]
        level = self._levels.get(priority)
        if level is None:
            # not before a turn that has begun, so that running requests keep their order
            level = self._levels[priority] = _Level(self._latest)
            insort(self._priorities, priority)
        num_tokens = int(self._requests.known[row])
        level.waiting[tenant] += 1
        self._tokens[row] = num_tokens
        self._nums[tenant] += 1
        self._num_tokens[tenant] += num_tokens
        self.num_tokens += num_tokens
        return level

    def _take_out(self, row: int) -> None:
        self._order = None
        requests, level, tenant = self._requests, self._level(row), self._requests.tenants[row]
        if self._costs.pop(row, None) is None:
            del level.again[bisect_left(level.again, self._key(row))]
        else:
            keys = level.lines[tenant].keys
            del keys[bisect_left(keys, self._own_key(row))]
            if not keys:
                del level.lines[tenant]
        num_tokens = self._tokens.pop(row)
        level.waiting[tenant] -= 1
        if not level.waiting[tenant]:
            del level.waiting[tenant]
            if not level.waiting:
                priority = int(requests.priority[row])
                del self._levels[priority]
                self._priorities.remove(priority)
        self._nums[tenant] -= 1
        self._num_tokens[tenant] -= num_tokens
        self.num_tokens -= num_tokens
        if not self._nums[tenant]:
            del self._nums[tenant], self._num_tokens[tenant]

    def _level(self, row: int) -> _Level:
        return self._levels[int(self._requests.priority[row])]

    def _push_head(self, level: _Level, tenant: bytes) -> None:
        line = level.lines[tenant]
        _, arrival, row = line.keys[-1]
        heapq.heappush(level.heads, (line.start, -arrival, row, tenant))

    def _is_head(self, level: _Level, head: tuple[int, int, int, bytes]) -> bool:
        turn, _, row, tenant = head
        line = level.lines.get(tenant)
        return line is not None and line.start == turn and line.keys[-1][2] == row

    def _own_key(self, row: int) -> tuple[int, int, int]:
        """The place among its tenant's requests."""
        requests = self._requests
        return -int(requests.own_priority[row]), -int(requests.arrival[row]), row

    def _key(self, row: int) -> tuple[int, int, int]:
        requests = self._requests
        return -int(requests.turn[row]), -int(requests.arrival[row]), row
