"""The waiting requests in the order in which they run, and how much waits per tenant and in all.

- The order is by priority, then by turn, then by arrival. Tenants of equal priority take turns,
  however many requests each of them has: a new request queues behind its own tenant's requests, not
  behind those of others. For a single tenant this is the order of arrival.
- A request's turn starts where its tenant's last one ends, or now, whichever is later, and ends its
  cost later (start-time fair queueing: Goyal, Vin and Cheng, 1996). Each request that begins
  advances `now` by its cost over the number of waiting tenants (as in weighted fair queueing:
  Demers, Keshav and Shenker, 1989). So a tenant with nothing waiting lets each of the others go
  first about once, and a stream of new tenants does not keep a tenant from its next turn.
- A turn is assigned once. A preempted request waits in its old position.
- A request removed while it waits costs its tenant nothing: at once where it came last, else when
  none of the tenant's requests waits any more, as a turn is assigned once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from slipstream_core.scheduler.request_table import RequestTable

_OUTPUTS_COUNTED = 256  # outputs counted in a request's cost; their real number is unknown
_FEW_TENANTS = 1024
_UNITS = 1024  # units of a turn per token: costs are divided among tenants


@dataclass(slots=True)
class _Level:
    """The turns of one priority."""

    now: int  # start of the turn of a tenant without requests
    ends: dict[bytes, int] = field(default_factory=dict)  # end of each tenant's last turn
    waiting: Counter[bytes] = field(default_factory=Counter)  # requests by tenant
    removed: Counter[bytes] = field(default_factory=Counter)  # cost by tenant, not returned yet
    num_kept: int = _FEW_TENANTS  # size of `ends` at which those not after `now` are dropped


class WaitingQueue:
    """Rows of requests that hold no slot."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        # (-priority, -turn, -arrival, row): next is last
        self._keys: list[tuple[int, int, int, int]] = []
        self._levels: dict[int, _Level] = {}  # by priority, while a request with it waits
        self._latest = 0  # the latest turn that began
        self._tokens: dict[int, int] = {}  # by row
        self._costs: dict[int, int] = {}  # by row, of requests that have yet to begin
        self._nums: Counter[bytes] = Counter()  # requests by tenant
        self._num_tokens: Counter[bytes] = Counter()
        self.num_tokens = 0  # tokens that all waiting requests have to compute

    def __len__(self) -> int:
        return len(self._keys)

    def of_tenant(self, tenant: bytes) -> tuple[int, int]:
        """How many of a tenant's requests wait, and how many tokens they have to compute."""
        return self._nums[tenant], self._num_tokens[tenant]

    def join(self, row: int) -> None:
        """Assign a new request its turn, and queue it."""
        requests, tenant = self._requests, self._requests.tenants[row]
        level = self._level(row)
        known, limit = int(requests.known[row]), int(requests.limit[row])
        turn = max(level.now, level.ends.get(tenant, 0))
        requests.turn[row] = turn
        cost = self._costs[row] = _UNITS * (known + min(limit - known, _OUTPUTS_COUNTED))
        level.ends[tenant] = turn + cost
        if len(level.ends) > level.num_kept:
            level.ends = {each: end for each, end in level.ends.items() if end > level.now}
            level.num_kept = max(_FEW_TENANTS, 2 * len(level.ends))
        self.add(row)

    def add(self, row: int) -> None:
        """Queue a request in its position."""
        insort(self._keys, self._key(row))
        tenant, num_tokens = self._requests.tenants[row], int(self._requests.known[row])
        self._level(row).waiting[tenant] += 1
        self._tokens[row] = num_tokens
        self._nums[tenant] += 1
        self._num_tokens[tenant] += num_tokens
        self.num_tokens += num_tokens

    def begin(self, row: int) -> None:
        """Take out a request that begins to run."""
        level, turn = self._level(row), int(self._requests.turn[row])
        cost = self._costs.pop(row, None)
        if cost is not None:  # else it was preempted and began before
            level.now = max(level.now, turn) + -(-cost // len(level.waiting))
            self._latest = max(self._latest, turn)
        self._take_out(row, level)

    def remove(self, row: int) -> None:
        """Take out a waiting request that is removed."""
        level, tenant = self._level(row), self._requests.tenants[row]
        cost, turn = self._costs.pop(row, 0), int(self._requests.turn[row])
        if cost and level.ends.get(tenant) == turn + cost:
            level.ends[tenant] = turn
        elif cost:
            level.removed[tenant] += cost
        self._take_out(row, level)

    def peek(self, nth: int) -> int | None:
        """The row behind the first `nth`, or None."""
        return self._keys[-1 - nth][-1] if nth < len(self._keys) else None

    def _take_out(self, row: int, level: _Level) -> None:
        del self._keys[bisect_left(self._keys, self._key(row))]
        tenant, num_tokens = self._requests.tenants[row], self._tokens.pop(row)
        level.waiting[tenant] -= 1
        if not level.waiting[tenant]:
            del level.waiting[tenant]
            returned = level.removed.pop(tenant, 0)
            if tenant in level.ends:
                level.ends[tenant] -= returned
            if not level.waiting:
                del self._levels[int(self._requests.priority[row])]
        self._nums[tenant] -= 1
        self._num_tokens[tenant] -= num_tokens
        self.num_tokens -= num_tokens
        if not self._nums[tenant]:
            del self._nums[tenant], self._num_tokens[tenant]

    def _level(self, row: int) -> _Level:
        # not before a turn that has begun, so that running requests keep their order
        return self._levels.setdefault(int(self._requests.priority[row]), _Level(self._latest))

    def _key(self, row: int) -> tuple[int, int, int, int]:
        requests = self._requests
        turn, arrival = int(requests.turn[row]), int(requests.arrival[row])
        return -int(requests.priority[row]), -turn, -arrival, row
