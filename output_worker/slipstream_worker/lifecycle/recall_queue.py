"""Clients' Recalls, which wait until they can be answered.

- A Recall waits while what can be said of its stream is undecided, and while its client has many
  answers left to read. It is looked at in the turn of the loop in which it arrives, behind all that
  has arrived with it, and then a few times a second; while answers are being restored, not at all.
- A turn answers a limited number, so that clients can read in between.
- One whose session has ended is dropped: its client repeats it after an attach.
- A tenant may have at most as many waiting as are left for all others; further ones are refused. A
  tenant is a client, or all clients with one key.
"""

from __future__ import annotations

from collections import Counter, deque

from slipstream_ipc.messages import Fault, Recall, Recalled
from slipstream_ipc.transport.router import Session
from slipstream_worker.clients.ports import Receipt
from slipstream_worker.clients.queries import ClientQueries
from slipstream_worker.lifecycle.lifecycle import StreamLifecycle
from slipstream_worker.streams.retention import Retention

MAX_WAITING = 8192
MAX_ANSWERED = 64  # in a turn
LOOK_S = 0.1  # between two looks at those that have been looked at

_Waiting = tuple[Session[Receipt], Recall]


class RecallQueue:
    """Recalls that are not answered yet."""

    def __init__(
        self, lifecycle: StreamLifecycle, queries: ClientQueries, retention: Retention
    ) -> None:
        self._lifecycle = lifecycle
        self._queries = queries
        self._retention = retention
        self._due: deque[_Waiting] = deque()  # to be looked at
        self._postponed: deque[_Waiting] = deque()  # they have been, and have to wait
        self._nums: Counter[bytes] = Counter()  # of both, by tenant
        self._look_at = 0.0  # when the postponed ones are due again

    def __len__(self) -> int:
        return len(self._due) + len(self._postponed)

    def add(self, session: Session[Receipt], recall: Recall) -> None:
        """A Recall has arrived: it waits for the next `flush`, or is refused."""
        tenant = _tenant_of(session)
        if self._nums[tenant] >= MAX_WAITING - len(self):
            why = f"{len(self)} queries for kept answers are waiting already"
            found = Recalled(recall.number, fault=Fault("overloaded", why))
            self._queries.respond(session.identity, found)
            return
        self._due.append((session, recall))
        self._nums[tenant] += 1

    def flush(self) -> None:
        """Answer some of those that can be answered. Call it in each turn."""
        if not self._lifecycle.keeper.is_complete:
            return
        if self._postponed and self._retention.now >= self._look_at:
            self._look_at = self._retention.now + LOOK_S
            self._due += self._postponed
            self._postponed.clear()
        num_left = MAX_ANSWERED
        while self._due and num_left:
            session, recall = self._due.popleft()
            if session.is_open and self._has_to_wait(session, recall):
                self._postponed.append((session, recall))
                continue
            self._removed(session)
            if session.is_open:
                num_left -= 1
                scope = session.public_key or recall.scope
                answer = self._lifecycle.recall(recall.stream_id, scope, forget=recall.forget)
                self._queries.respond(session.identity, Recalled(recall.number, answer))

    def beat(self) -> None:
        """Drop those whose sessions have ended. Call it regularly."""
        for queue in (self._due, self._postponed):
            for _ in range(len(queue)):
                session, recall = queue.popleft()
                if session.is_open:
                    queue.append((session, recall))
                else:
                    self._removed(session)

    def _has_to_wait(self, session: Session[Receipt], recall: Recall) -> bool:
        if self._lifecycle.is_undecided(recall.stream_id):
            return True
        return self._queries.leaves_much_unread(session.identity)

    def _removed(self, session: Session[Receipt]) -> None:
        tenant = _tenant_of(session)
        self._nums[tenant] -= 1
        if not self._nums[tenant]:
            del self._nums[tenant]


def _tenant_of(session: Session[Receipt]) -> bytes:
    return session.public_key or session.identity
