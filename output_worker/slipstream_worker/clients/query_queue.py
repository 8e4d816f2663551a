"""The queue of queries of one lane for the tokenizer process. Pure.

- Tenants take turns; among one tenant's queries shorter ones go first (`fair_order`). A tenant is a
  client, all clients with one key, or whom a client without a key names: an HTTP front, its keys.
- Only a limited amount is in the tokenizer process at a time, so that streams' prompts wait for no
  more than that.
- A tenant may have at most as much queued as is left for all others. A single tenant can fill half
  of the queue, and a new tenant always finds room.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.fair_order import FairOrder

MAX_WAITING = 2048  # unanswered queries, in the tokenizer process or not
MAX_WAITING_CHARS = 2**27  # their total size


class QueuedQuery(NamedTuple):
    """A client's query, and the number it has given it."""

    client: bytes
    number: int
    render: Render
    size: int  # characters, or token ids
    tenant: bytes  # whose bounds and turns it counts for


class QueryQueue:
    """Queries that wait, and the amount that is in the tokenizer process."""

    def __init__(self, max_in_process: int) -> None:
        """`max_in_process`: characters in the tokenizer process at which further queries wait."""
        self._max_in_process = max_in_process
        self._chars_in_process = 0
        self._waiting: dict[int, QueuedQuery] = {}
        # by tenant; the tenant with the next turn is first
        self._turns: dict[bytes, FairOrder] = {}
        self._num_added = 0
        self._nums: Counter[bytes] = Counter()  # by tenant, in the tokenizer process or not
        self._chars: Counter[bytes] = Counter()
        self._clients: Counter[bytes] = Counter()  # the same queries, by client

    @property
    def clients(self) -> list[bytes]:
        """Clients with unanswered queries."""
        return list(self._clients)

    def why_full(self, query: QueuedQuery) -> str:
        """The reason to reject this query; empty if it may wait."""
        num, num_chars = self._nums.total(), self._chars.total()
        tenant, size = query.tenant, query.size
        if self._nums[tenant] >= MAX_WAITING - num:
            return f"{num} queries are waiting for the tokenizer already"
        if self._chars[tenant] + size > MAX_WAITING_CHARS - num_chars:
            return f"queries of {num_chars} characters are waiting for the tokenizer already"
        return ""

    def add(self, query: QueuedQuery) -> None:
        """Add a waiting query."""
        self._num_added += 1
        self._waiting[self._num_added] = query
        turns = self._turns.setdefault(query.tenant, FairOrder())
        turns.add(self._num_added, query.size)
        self._count(query, 1)

    def next(self) -> QueuedQuery | None:
        """The next query for the tokenizer process; None if it has enough, or nothing waits."""
        while self._turns and self._chars_in_process < self._max_in_process:
            tenant = next(iter(self._turns))
            turns = self._turns.pop(tenant)
            key = turns.next()
            if key is not None:
                self._turns[tenant] = turns  # after the other tenants
                query = self._waiting.pop(key)
                self._chars_in_process += query.size
                return query
        return None

    def done(self, query: QueuedQuery) -> None:
        """A query that was in the tokenizer process is answered, or will not be."""
        self._chars_in_process -= query.size
        self._count(query, -1)

    def withdraw(self, client: bytes) -> None:
        """Drop a client's waiting queries; those in the tokenizer process stay."""
        for key in [key for key, each in self._waiting.items() if each.client == client]:
            query = self._waiting.pop(key)
            self._count(query, -1)
            if query.tenant in self._nums:
                self._turns[query.tenant].discard(key)
            else:
                del self._turns[query.tenant]

    def _count(self, query: QueuedQuery, num: int) -> None:
        client, tenant = query.client, query.tenant
        self._nums[tenant] += num
        self._chars[tenant] += num * query.size
        if not self._nums[tenant]:
            del self._nums[tenant], self._chars[tenant]
        self._clients[client] += num
        if not self._clients[client]:
            del self._clients[client]
