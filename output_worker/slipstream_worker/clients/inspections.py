"""Clients' queries for the statistics of the stack, which the supervisor holds.

The supervisor is asked once for all that wait, when the first of them comes. A question whose
answer does not come stays unanswered, and its client goes on without it.
"""

from __future__ import annotations

import msgspec

from slipstream_ipc.messages import Inspected
from slipstream_ipc.telemetry.statistics import Statistics
from slipstream_worker.clients.readers import StreamReaders

_MAX_WAITING = 1024  # questions; further ones push out the oldest


class Inspections:
    """Questions that are not answered yet."""

    def __init__(self, readers: StreamReaders) -> None:
        self._readers = readers
        self._waiting: dict[tuple[bytes, int], None] = {}  # by client and number, oldest first
        self._is_due = False

    def ask(self, client: bytes, number: int, *, is_refused: bool) -> None:
        """A client asks. is_refused: it leaves too much unread."""
        if is_refused:
            self._readers.port(client).enqueue(Inspected(number))
            return
        self._is_due = True
        self._waiting[client, number] = None
        if len(self._waiting) > _MAX_WAITING:
            del self._waiting[next(iter(self._waiting))]

    def take_due(self) -> bool:
        """True once for each time that the supervisor has to be asked."""
        is_due, self._is_due = self._is_due, False
        return is_due

    def answer(self, statistics: Statistics) -> None:
        """Answer all that wait."""
        encoded = msgspec.json.encode(statistics)
        waiting, self._waiting = self._waiting, {}
        for client, number in waiting:
            if self._readers.is_here(client):
                port = self._readers.port(client)
                port.enqueue(Inspected(number, encoded), num_bytes=len(encoded))
