"""The queue of queries for the prompt process, short or long ones. Pure.

- Clients take turns; among one client's queries shorter ones go first (`fair_order`).
- Only a limited amount is in the prompt process at a time, so that streams' prompts wait for no
  more than that.
- A client may have at most as much queued as is left for all others. A single client can fill half
  of the queue, and a new client always finds room.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from slipstream_ipc.messages import Render
from slipstream_worker.tokenizer.fair_order import FairOrder

MAX_WAITING = 2048  # unanswered queries, in the prompt process or not
MAX_WAITING_CHARS = 2**27  # their total size


class Query(NamedTuple):
    """A client's query, and the number it has given it."""

    client: bytes
    number: int
    render: Render
    size: int  # characters, or token ids


class QueryQueue:
    """Queries that wait, and the amount that is in the prompt process."""

    def __init__(self, max_asked: int) -> None:
        """`max_asked`: characters in the prompt process from which on further queries wait."""
        self._max_asked = max_asked
        self._asked_chars = 0
        self._waiting: dict[int, Query] = {}
        # by client; the client with the next turn is first
        self._turns: dict[bytes, FairOrder] = {}
        self._num_added = 0
        self._nums: Counter[bytes] = Counter()  # by client, in the prompt process or not
        self._chars: Counter[bytes] = Counter()

    @property
    def clients(self) -> list[bytes]:
        """Clients with unanswered queries."""
        return list(self._nums)

    def why_full(self, question: Query) -> str:
        """Why this query has to be rejected; empty if it may wait."""
        num, num_chars = self._nums.total(), self._chars.total()
        client, size = question.client, question.size
        if self._nums[client] >= MAX_WAITING - num:
            return f"{num} questions wait for the tokenizer already"
        if self._chars[client] + size > MAX_WAITING_CHARS - num_chars:
            return f"questions of {num_chars} characters wait for the tokenizer already"
        return ""

    def add(self, question: Query) -> None:
        """Add a waiting query."""
        self._num_added += 1
        self._waiting[self._num_added] = question
        turns = self._turns.setdefault(question.client, FairOrder())
        turns.add(self._num_added, question.size)
        self._count(question, 1)

    def next(self) -> Query | None:
        """The next query for the prompt process; None if it has enough, or nothing waits."""
        while self._turns and self._asked_chars < self._max_asked:
            client = next(iter(self._turns))
            turns = self._turns.pop(client)
            key = turns.next()
            if key is not None:
                turns.discard(key)  # the client's next query need not wait for the answer
                self._turns[client] = turns  # after the other clients
                question = self._waiting.pop(key)
                self._asked_chars += question.size
                return question
        return None

    def done(self, question: Query) -> None:
        """A query that was in the prompt process is answered, or will not be."""
        self._asked_chars -= question.size
        self._count(question, -1)

    def withdraw(self, client: bytes) -> None:
        """Drop a client's waiting queries; those in the prompt process stay."""
        self._turns.pop(client, None)
        for key in [key for key, each in self._waiting.items() if each.client == client]:
            self._count(self._waiting.pop(key), -1)

    def _count(self, question: Query, num: int) -> None:
        client = question.client
        self._nums[client] += num
        self._chars[client] += num * question.size
        if not self._nums[client]:
            del self._nums[client], self._chars[client]
