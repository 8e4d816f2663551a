"""Questions that wait for the tokenizer: whose turn it is, and how many a client may have.

Owns: one queue, the short questions' or the long ones'. Pure. Does not know: what is asked, whom.

Rules:
- Clients take turns; of a client's own the shorter goes first (`fair_order`).
- Only a part is asked at a time: a stream's prompt waits for no more than that.
- A client may have as much as is left to all others. So a single one may fill half of the queue,
  and there is always room for somebody new.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.fair_order import FairOrder

MAX_WAITING = 2048  # questions that wait for their answer, asked or not
MAX_WAITING_CHARS = 2**27  # of them together


class Query(NamedTuple):
    """What a client asks, and under which number of its own."""

    client: bytes
    number: int
    render: Render
    size: int  # characters, or token ids


class QueryQueue:
    """Those that wait, and what is kept in mind of those that are asked."""

    def __init__(self, max_asked: int) -> None:
        """`max_asked`: characters that are asked, from which on others wait."""
        self._max_asked = max_asked
        self._asked_chars = 0
        self._waiting: dict[int, Query] = {}
        # of each client that may have something to be asked; whose turn is next first
        self._turns: dict[bytes, FairOrder] = {}
        self._num_added = 0
        self._nums: Counter[bytes] = Counter()  # of each client, asked or not
        self._chars: Counter[bytes] = Counter()

    @property
    def clients(self) -> list[bytes]:
        """Whoever waits for an answer."""
        return list(self._nums)

    def why_full(self, question: Query) -> str:
        """Why this one may not wait; empty where it may."""
        num, num_chars = self._nums.total(), self._chars.total()
        client, size = question.client, question.size
        if self._nums[client] >= MAX_WAITING - num:
            return f"{num} questions wait for the tokenizer already"
        if self._chars[client] + size > MAX_WAITING_CHARS - num_chars:
            return f"questions of {num_chars} characters wait for the tokenizer already"
        return ""

    def add(self, question: Query) -> None:
        """It waits."""
        self._num_added += 1
        self._waiting[self._num_added] = question
        turns = self._turns.setdefault(question.client, FairOrder())
        turns.add(self._num_added, question.size)
        self._count(question, 1)

    def next(self) -> Query | None:
        """What is to be asked now; None: enough is asked, or nothing waits."""
        while self._turns and self._asked_chars < self._max_asked:
            client = next(iter(self._turns))
            turns = self._turns.pop(client)
            key = turns.next()
            if key is not None:
                turns.discard(key)  # the next may have its turn before this one is answered
                self._turns[client] = turns  # behind the others
                question = self._waiting.pop(key)
                self._asked_chars += question.size
                return question
        return None

    def done(self, question: Query) -> None:
        """One that was asked is answered, or will not be any more."""
        self._asked_chars -= question.size
        self._count(question, -1)

    def withdraw(self, client: bytes) -> None:
        """Nothing of a client's waits any more; what is asked of it still is."""
        self._turns.pop(client, None)
        for key in [key for key, each in self._waiting.items() if each.client == client]:
            self._count(self._waiting.pop(key), -1)

    def _count(self, question: Query, num: int) -> None:
        client = question.client
        self._nums[client] += num
        self._chars[client] += num * question.size
        if not self._nums[client]:
            del self._nums[client], self._chars[client]
