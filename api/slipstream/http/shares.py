"""A budget for the memory that long work of a front may hold at once, shared among its tenants.

- Work that recalls or renders much, or that gathers many log-probabilities, takes a share before it
  holds anything, and gives it back once its answer has been sent. What waits for a share holds its
  request alone.
- A tenant has a part of the budget at most, so there is room for another at any time. Tenants take
  turns; one tenant's shares are given in the order of arrival.
- A share larger than a tenant may have counts as that much: it is the tenant's only one then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

MAX_BYTES = 64 * 2**20  # decision 015
MAX_LOGPROB_BYTES = 256 * 2**20  # in columns


class Share:
    """A part of the budget, taken or waited for."""

    __slots__ = ("_shares", "is_over", "is_taken", "num_bytes", "ready", "tenant")

    def __init__(
        self, shares: Shares, tenant: bytes, num_bytes: int, ready: Callable[[Share], None]
    ) -> None:
        self._shares = shares
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.ready: Callable[[Share], None] | None = ready
        self.is_taken = False

    def shrink(self, num_bytes: int) -> None:
        """No more than `num_bytes` are needed from now on; 0: the work is done, or not wanted."""
        before, self.num_bytes = self.num_bytes, min(self.num_bytes, num_bytes)
        if not num_bytes:
            self.ready = None
        if self.is_taken:
            self._shares.free(self, before - self.num_bytes)
        elif not num_bytes:
            self._shares.give()  # one behind it may have been kept waiting


class Shares:
    """A budget of one front. num_tenants: how many it has room for at least."""

    def __init__(self, max_bytes: int = MAX_BYTES, num_tenants: int = 2) -> None:
        self._max_bytes = max_bytes
        self._most = max_bytes // num_tenants  # of one tenant
        self._num_bytes = 0  # that are taken
        self._taken: Counter[bytes] = Counter()  # of them, by tenant
        self._waiting: dict[bytes, deque[Share]] = {}  # by tenant; the next one's turn first
        self._is_giving = False

    @classmethod
    def of_logprobs(cls) -> Shares:
        """The budget of log-probabilities that wait for their answers' ends."""
        return cls(MAX_LOGPROB_BYTES, num_tenants=4)

    @property
    def num_bytes(self) -> int:
        """The bytes of the shares that are taken."""
        return self._num_bytes

    def take(self, tenant: bytes, num_bytes: int, ready: Callable[[Share], None]) -> Share:
        """Call `ready` with a share once there is room for it: now, or later."""
        share = Share(self, tenant, min(num_bytes, self._most), ready)
        self._waiting.setdefault(tenant, deque()).append(share)
        self.give()
        return share

    def free(self, share: Share, num_bytes: int) -> None:
        """Free so many bytes of a share that was taken."""
        self._num_bytes -= num_bytes
        self._taken[share.tenant] -= num_bytes
        if not self._taken[share.tenant]:
            del self._taken[share.tenant]
        if waiting := self._waiting.pop(share.tenant, None):
            self._waiting[share.tenant] = waiting  # it has had its turn: behind the others
        self.give()

    def give(self) -> None:
        """Give the shares that there is room for."""
        if self._is_giving:  # `ready` has given a share back: the loop below goes on
            return
        self._is_giving = True
        try:
            while (share := self._next()) is not None:
                ready, share.ready = share.ready, None
                assert ready is not None
                share.is_taken = True
                self._num_bytes += share.num_bytes
                self._taken[share.tenant] += share.num_bytes
                ready(share)
        finally:
            self._is_giving = False

    def _next(self) -> Share | None:
        """Remove and return the share that is to be taken now, if any."""
        for tenant in list(self._waiting):
            waiting = self._waiting[tenant]
            while waiting and waiting[0].ready is None:
                waiting.popleft()
            if not waiting:
                del self._waiting[tenant]
                continue
            num_bytes = waiting[0].num_bytes
            if self._taken[tenant] + num_bytes > self._most:
                continue
            if self._num_bytes + num_bytes > self._max_bytes:
                return None  # no one passes a tenant whose turn it is
            share = waiting.popleft()
            del self._waiting[tenant]
            if waiting:
                self._waiting[tenant] = waiting  # behind the others
            return share
        return None
