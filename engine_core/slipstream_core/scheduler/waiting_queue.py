"""The requests that wait to be computed, in the order in which they are to run.

Owns: that order, and how much waits, of each tenant and in all. Does not know: why a request waits,
which may run.

Rules:
- By priority, then by turn, then by arrival. Of equal priority tenants take turns, however many
  requests each of them has: a request that arrives goes behind what its own tenant asked for
  before, and not behind what others did. For one tenant alone that is the order of arrival.
- A request's turn is where its tenant's last one ends, or now, whichever is later; it ends its cost
  later (start-time fair queueing: Goyal, Vin and Cheng, 1996). Each request that begins moves `now`
  on by its cost over the number of tenants that wait (as in weighted fair queueing: Demers, Keshav
  and Shenker, 1989). So a tenant with nothing waiting lets others go first about once each, and
  newcomers without end do not keep a tenant from its next turn.
- A turn is given once. A request that is preempted waits at its old place.
- What is given up while it waits costs its tenant nothing, once nothing of the tenant's waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from dataclasses import dataclass, field

from slipstream_core.scheduler.request_table import RequestTable

_OUTPUTS_COUNTED = 256  # of a request's cost; how many there will be is known to nobody
_FEW_TENANTS = 1024
_UNITS = 1024  # of a turn, to a token: what a token costs is divided among tenants


@dataclass(slots=True)
class _Level:
    """The turns of one priority."""

    now: int  # where the turn of a tenant begins that has none
    ends: dict[bytes, int] = field(default_factory=dict)  # of each tenant's last request
    waiting: Counter[bytes] = field(default_factory=Counter)  # requests by tenant
    num_kept: int = _FEW_TENANTS  # tenants from which on those that are even are forgotten


class WaitingQueue:
    """Rows of requests that hold no slot."""

    def __init__(self, requests: RequestTable) -> None:
        self._requests = requests
        # (-priority, -turn, -arrival, row): next is last
        self._keys: list[tuple[int, int, int, int]] = []
        self._levels: dict[int, _Level] = {}  # by priority, while a request with it waits
        self._latest = 0  # turn of all that began
        self._tokens: dict[int, int] = {}  # by row
        self._costs: dict[int, int] = {}  # by row, of those that have yet to begin
        self._nums: Counter[bytes] = Counter()  # requests by tenant
        self._num_tokens: Counter[bytes] = Counter()
        self.num_tokens = 0  # that all of them have to compute

    def __len__(self) -> int:
        return len(self._keys)

    def of_tenant(self, tenant: bytes) -> tuple[int, int]:
        """How many of a tenant's requests wait, and how many tokens they have to compute."""
        return self._nums[tenant], self._num_tokens[tenant]

    def join(self, row: int) -> None:
        """A request that is new gets its turn, and waits for it."""
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
        """Let a request wait at its place."""
        insort(self._keys, self._key(row))
        tenant, num_tokens = self._requests.tenants[row], int(self._requests.known[row])
        self._level(row).waiting[tenant] += 1
        self._tokens[row] = num_tokens
        self._nums[tenant] += 1
        self._num_tokens[tenant] += num_tokens
        self.num_tokens += num_tokens

    def begin(self, row: int) -> None:
        """A request's turn has come."""
        level, turn = self._level(row), int(self._requests.turn[row])
        cost = self._costs.pop(row, None)
        if cost is not None:  # else it began before, and was preempted
            level.now = max(level.now, turn) + -(-cost // len(level.waiting))
            self._latest = max(self._latest, turn)
        self._take_out(row, level)

    def remove(self, row: int) -> None:
        """A request that waits is given up."""
        level, tenant = self._level(row), self._requests.tenants[row]
        self._costs.pop(row, None)
        self._take_out(row, level)
        if not level.waiting[tenant]:
            level.ends.pop(tenant, None)

    def peek(self, nth: int) -> int | None:
        """Who is next after `nth` others, None where nobody is."""
        return self._keys[-1 - nth][-1] if nth < len(self._keys) else None

    def _take_out(self, row: int, level: _Level) -> None:
        del self._keys[bisect_left(self._keys, self._key(row))]
        tenant, num_tokens = self._requests.tenants[row], self._tokens.pop(row)
        level.waiting[tenant] -= 1
        if not level.waiting[tenant]:
            del level.waiting[tenant]
            if not level.waiting:
                del self._levels[int(self._requests.priority[row])]
        self._nums[tenant] -= 1
        self._num_tokens[tenant] -= num_tokens
        self.num_tokens -= num_tokens
        if not self._nums[tenant]:
            del self._nums[tenant], self._num_tokens[tenant]

    def _level(self, row: int) -> _Level:
        # not before a turn that began: requests that run keep their order
        return self._levels.setdefault(int(self._requests.priority[row]), _Level(self._latest))

    def _key(self, row: int) -> tuple[int, int, int, int]:
        requests = self._requests
        turn, arrival = int(requests.turn[row]), int(requests.arrival[row])
        return -int(requests.priority[row]), -turn, -arrival, row
