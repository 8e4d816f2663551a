"""The queries that wait to be computed, and which of their sequences a step takes. Pure.

- Tenants take turns; within a tenant its calls do, sequence by sequence: a short call waits for no
  long one. The sequences of one call come in order.
- A step takes as many tokens as it may have, and at least one sequence.
- A query that was computed when a core died is computed in steps of its own, so that the next death
  tells whether it is the cause.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from slipstream_ipc.arrays import Float32s, UInt32s
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Pool


@dataclass(eq=False, slots=True)
class PoolingQuery:
    """A worker's query. vectors: [sequences, dimensions], of those that are computed; None before
    the first one is. num_left: sequences that are not computed.
    """

    worker: bytes
    pool: Pool
    sequences: list[UInt32s] = field(init=False)
    first_lens: list[int] | None = field(init=False)  # as in Pool; None: there are none
    vectors: Float32s | None = None
    num_left: int = field(init=False)
    is_over: bool = False  # answered, or not asked any more

    def __post_init__(self) -> None:
        """Cut the ids into sequences."""
        counts = u32(self.pool.counts)
        self.sequences = np.split(u32(self.pool.token_ids), counts.cumsum()[:-1])
        self.first_lens = u32(self.pool.first_lens).tolist() or None
        self.num_left = len(self.sequences)

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return len(self.pool.token_ids) // 4


@dataclass(frozen=True, slots=True)
class PoolingStep:
    """The sequences of a step: each its query, and the sequence's index there."""

    entries: list[tuple[PoolingQuery, int]]

    @property
    def sequences(self) -> list[UInt32s]:
        """Their token ids."""
        return [query.sequences[index] for query, index in self.entries]

    @property
    def first_lens(self) -> list[int | None]:
        """Tokens of type 0 at the beginning of each; None: all are."""
        return [
            None if query.first_lens is None else query.first_lens[index]
            for query, index in self.entries
        ]

    @property
    def num_tokens(self) -> int:
        """Tokens of all of them."""
        return sum([len(each) for each in self.sequences])


_Entries = deque[tuple[PoolingQuery, int]]


class PoolingQueue:
    """The sequences that are in no step yet."""

    def __init__(self, max_tokens: int, max_sequences: int) -> None:
        """Both: of a step."""
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        # by tenant and call; those with the next turn are first
        self._turns: OrderedDict[bytes, OrderedDict[bytes, _Entries]] = OrderedDict()
        self._suspects: deque[PoolingQuery] = deque()
        self._queries: dict[tuple[bytes, int], PoolingQuery] = {}  # by worker and number
        self.num_tokens = 0  # of waiting sequences

    @property
    def num_queries(self) -> int:
        """Queries that are not answered."""
        return len(self._queries)

    def add(self, query: PoolingQuery) -> None:
        """Add a query; one that its worker has asked before is the same one."""
        key = query.worker, query.pool.number
        if key in self._queries:
            return
        self._queries[key] = query
        self.num_tokens += query.num_tokens
        if query.pool.strikes:
            self._suspects.append(query)
            return
        calls = self._turns.setdefault(query.pool.tenant, OrderedDict())
        entries = calls.setdefault(query.pool.call, deque())
        entries.extend((query, index) for index in range(len(query.sequences)))

    def next_step(self) -> PoolingStep | None:
        """The sequences to compute next; None if none waits."""
        entries: list[tuple[PoolingQuery, int]] = []
        while self._suspects and not entries:
            query = self._suspects.popleft()
            self.num_tokens -= query.num_tokens
            if not query.is_over:
                entries = [(query, index) for index in range(len(query.sequences))]
        if entries:
            return PoolingStep(entries)
        num_tokens = 0
        for query, index in self._in_turn():
            num = len(query.sequences[index])
            is_full = num_tokens + num > self._max_tokens or len(entries) == self._max_sequences
            if entries and is_full:
                self._put_back(query, index)
                break
            self.num_tokens -= num
            num_tokens += num
            entries.append((query, index))
        return PoolingStep(entries) if entries else None

    def drop(self, query: PoolingQuery) -> None:
        """A query is answered, or not asked any more; what waits of it is not computed."""
        query.is_over = True
        self._queries.pop((query.worker, query.pool.number), None)

    def drop_number(self, worker: bytes, number: int) -> None:
        """A worker's query is not asked any more."""
        query = self._queries.get((worker, number))
        if query is not None:
            self.drop(query)

    def drop_of(self, worker: bytes) -> None:
        """A worker's queries are not asked any more: it attaches, and asks them again."""
        for query in [each for each in self._queries.values() if each.worker == worker]:
            self.drop(query)

    def _in_turn(self) -> Iterator[tuple[PoolingQuery, int]]:
        while self._turns:
            tenant, calls = self._turns.popitem(last=False)
            call, entries = calls.popitem(last=False)
            entry = entries.popleft()
            if entries:
                calls[call] = entries
            if calls:
                self._turns[tenant] = calls
            if entry[0].is_over:
                self.num_tokens -= len(entry[0].sequences[entry[1]])
            else:
                yield entry

    def _put_back(self, query: PoolingQuery, index: int) -> None:
        """Let a sequence have the next turn."""
        tenant, call = query.pool.tenant, query.pool.call
        calls = self._turns.setdefault(tenant, OrderedDict())
        calls.setdefault(call, deque()).appendleft((query, index))
        calls.move_to_end(call, last=False)
        self._turns.move_to_end(tenant, last=False)
