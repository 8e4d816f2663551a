"""Sends each client state messages of its streams, and deltas.

A port has the client's session, the rows it reads, and the state messages that wait for credit.

- State messages (Accepted, Rejected, …) leave before deltas. Both wait for credit; nothing queues
  in a socket.
- A flood of state messages does not hold up the streams that run: it leaves some credit to deltas,
  which pass queued state messages of other streams.
- A client without credit is sent nothing; what it misses is merged into the next message.
- With the interval "auto", first tokens and ends leave at once, and everything else while fewer
  than AUTO_MAX_UNACKED messages are unacknowledged. Every token streams under light load; under
  heavy load messages merge by themselves.
- At most _MAX_QUEUED_MESSAGES state messages are queued for a client. Beyond that its session is
  ended, as a new attach restores whatever still holds.
- An attach drops what was queued: the client then requests its streams, and from which position.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from time import monotonic

import numpy as np

from slipstream_ipc.arrays import Int64s
from slipstream_ipc.messages import ClientToWorker, PromptLogprobs, Superseded, WorkerToClient
from slipstream_ipc.transport.link import MAY_OWE, WINDOW, Link
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_ipc.transport.router import Router, Session
from slipstream_worker.clients import deltas
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.streams.stream import Reader, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

Receipt = list[WorkerStream]  # streams whose end was in the message
AUTO_MAX_UNACKED = 2 + MAY_OWE
_MAX_QUEUED_MESSAGES = 2**16
_MOST_UNACKED_STATES = WINDOW - 4  # messages, from which on states wait: deltas need credit

FrontAcceptor = Router[WorkerToClient, ClientToWorker, Receipt]


class ClientPort:
    """Everything that is sent to one client."""

    def __init__(
        self,
        acceptor: FrontAcceptor,
        session: Session[Receipt],
        columns: StreamColumns,
        counters: RequestCounters,
        max_unacked: int | None = None,
        number: int = 1,
    ) -> None:
        """number: a positive one that no other port of these columns has.

        max_unacked: number of unacknowledged messages from which on only first tokens and ends are
        sent; None: no such limit.
        """
        self._acceptor = acceptor
        self._max_unacked = max_unacked
        self._session = session
        self._columns = columns
        self._counters = counters
        self.number = number
        self._messages: deque[WorkerToClient] = deque()
        self._message_bytes: deque[int] = deque()  # of each, see `enqueue`
        self._num_unsent_bytes = 0  # their sum
        self._message_rows: deque[int] = deque()  # whose deltas each message is ahead of; 0: none
        self._num_queued = np.zeros(64, np.int64)  # by worker row: messages ahead of its deltas
        self._sending: list[int] = []  # rows of the streams being sent, ascending
        self._worker_rows: Int64s | None = None  # the same as an array, made on demand
        self._first_worker_row = 0  # slow row to begin with, if not all fit
        self._is_due = False
        self.streams: set[WorkerStream] = set()  # read by this client

    @property
    def session(self) -> Session[Receipt]:
        """The client's latest session, which may have ended."""
        return self._session

    @property
    def num_unsent(self) -> int:
        """State messages that wait for credit."""
        return len(self._messages)

    @property
    def num_unsent_bytes(self) -> int:
        """The size of queued answers, see `enqueue`."""
        return self._num_unsent_bytes

    @property
    def idle_link(self) -> tuple[Link[Receipt], LocalConnection, Int64s | None, int | None] | None:
        """The client's link and local connection, the rows that are sent, and how many messages may
        be unacknowledged; None while anything waits to be sent, or without either.
        """
        session = self._session
        route, rows = session.route, self._worker_rows
        is_quiet = session.is_open and not self.has_unsent and rows is not None
        if not is_quiet or not isinstance(route, LocalConnection):
            return None
        return session.link, route, rows, self._max_unacked

    @property
    def has_unsent(self) -> bool:
        """True if anything waits for credit."""
        return bool(self._messages) or self._is_due

    def attach(self, session: Session[Receipt]) -> None:
        """Start over with a new session, in which the client requests its streams again."""
        self._session = session
        self._drop_messages()
        self._sending, self._worker_rows = [], None
        self._is_due = False
        for stream in self.streams:
            assert stream.reader is not None
            stream.reader.is_waiting = True
            stream.reader.awaited = None

    def enqueue(self, body: WorkerToClient, worker_row: int = 0, num_bytes: int = 0) -> None:
        """Queue a state message. worker_row: of a stream whose deltas have to follow it; 0: none,
        or one that has no deltas from here on. num_bytes: of the answer to a query.
        """
        if worker_row >= len(self._num_queued):
            self._num_queued = np.pad(self._num_queued, (0, worker_row))
        self._messages.append(body)
        self._message_bytes.append(num_bytes)
        self._num_unsent_bytes += num_bytes
        self._message_rows.append(worker_row)
        self._num_queued[worker_row] += 1

    def enqueue_prompt_logprobs(self, stream: WorkerStream, handle: int) -> None:
        """Queue the log-probabilities of a stream's prompt, if requested and complete."""
        for start, columns in self._columns.prompts.pieces(stream.worker_row):
            self.enqueue(PromptLogprobs(handle, start, columns), stream.worker_row)

    def read(self, stream: WorkerStream, reader: Reader) -> None:
        """Make the client this stream's reader. Nothing is sent of it before `start_sending`."""
        reader.is_waiting = True
        stream.reader = reader
        self.streams.add(stream)
        self._drop_worker_row(stream.worker_row)

    def start_sending(self, stream: WorkerStream) -> None:
        """Send the stream from its reader's cursor on, which is the end of the reader's copy."""
        assert stream.reader is not None
        stream.reader.is_waiting = False
        stream.reader.awaited = None
        worker_row = stream.worker_row
        self._columns.handles[worker_row] = stream.reader.handle
        self._columns.ports[worker_row] = self.number
        self._columns.is_dirty[worker_row] = True
        self._columns.make_fast(stream, stream.reader.cursor)
        self._is_due = True
        self._insert_worker_row(worker_row)

    def stop_reading(self, stream: WorkerStream) -> None:
        """The client no longer reads this stream. Idempotent."""
        self.streams.discard(stream)
        self._drop_worker_row(stream.worker_row)

    def supersede(self, stream: WorkerStream) -> None:
        """Another reader has taken over this stream: notify the client."""
        assert stream.reader is not None
        self.stop_reading(stream)
        self.enqueue(Superseded(stream.reader.handle))

    def mark_due(self) -> None:
        """Some stream of the client may have something new."""
        self._is_due = True

    def take_ended(self) -> list[WorkerStream]:
        """The streams whose end has been acknowledged since the last call."""
        # a stream that another client has taken over is left to that client
        receipts = self._session.link.take_receipts()
        if not receipts or not any(receipts):
            return []
        return [stream for ended in receipts for stream in ended if stream in self.streams]

    def flush(self) -> bool:
        """Send what is due and credit allows; returns whether deltas were sent."""
        session = self._session
        if not session.is_open:
            return False
        if len(self._messages) > _MAX_QUEUED_MESSAGES:
            self._acceptor.reattach(session)
            self._drop_messages()
            return False
        self._flush_states(session)
        has_sent = False
        while self._is_due and session.link.has_credit:
            is_crowded = (
                self._max_unacked is not None
                and not self._messages  # the credit that they leave is less
                and session.link.num_unacked >= self._max_unacked
            )
            built = self._build(urgent=is_crowded)
            stays_due = is_crowded or bool(self._messages)
            if built is None:
                # a row that is not due yet is marked again by its next token
                self._is_due = stays_due
                break
            if not self._acceptor.send(session, built.message, built.slow.ended):
                break
            has_sent = True
            self._counters.delivered(self._columns, built, monotonic())
            if built.slow.new_cursors:
                self._first_worker_row = built.slow.new_cursors[-1][0].worker_row + 1
            if built.is_all:
                self._is_due = stays_due
                break
        return has_sent

    def _flush_states(self, session: Session[Receipt]) -> None:
        while self._messages and session.link.num_unacked < _MOST_UNACKED_STATES:
            if not self._acceptor.send(session, self._messages[0], []):
                return
            self._messages.popleft()
            self._num_unsent_bytes -= self._message_bytes.popleft()
            self._num_queued[self._message_rows.popleft()] -= 1

    def _drop_messages(self) -> None:
        self._messages.clear()
        self._message_bytes.clear()
        self._num_unsent_bytes = 0
        self._message_rows.clear()
        self._num_queued[:] = 0

    def _build(self, *, urgent: bool) -> deltas.BuiltDeltas | None:
        """A message of what is due, if anything is."""
        columns, worker_rows = self._columns, self._worker_rows
        if worker_rows is None:
            worker_rows = self._worker_rows = np.array(self._sending, np.int64)
        if self._messages:
            worker_rows = self._without_queued(worker_rows)
        fast, counts, slow_worker_rows = columns.loops.due(worker_rows, urgent)
        slow = self._due_slow(slow_worker_rows, urgent=urgent) if slow_worker_rows else ()
        return deltas.build(columns, fast, counts, slow) if fast or slow else None

    def _without_queued(self, worker_rows: Int64s) -> Int64s:
        """The rows without those that have a state message ahead of their deltas."""
        longest = len(self._num_queued)
        is_queued = self._num_queued.take(worker_rows, mode="clip") > 0
        is_queued &= worker_rows < longest
        return worker_rows[~is_queued]

    def _due_slow(self, worker_rows: Sequence[int], *, urgent: bool) -> list[WorkerStream]:
        """The streams of these slow rows that are due, in round-robin order."""
        streams, leaves_now = self._columns.streams, deltas.is_urgent if urgent else deltas.is_due
        turn = bisect_left(worker_rows, self._first_worker_row)
        return [
            stream
            for worker_row in (*worker_rows[turn:], *worker_rows[:turn])
            if (stream := streams[worker_row]) is not None and leaves_now(stream)
        ]

    def _insert_worker_row(self, worker_row: int) -> None:
        numbers = self._sending
        at = bisect_left(numbers, worker_row)
        if at == len(numbers) or numbers[at] != worker_row:
            numbers.insert(at, worker_row)
            self._worker_rows = None

    def _drop_worker_row(self, worker_row: int) -> None:
        numbers = self._sending
        at = bisect_left(numbers, worker_row)
        if at < len(numbers) and numbers[at] == worker_row:
            del numbers[at]
            self._worker_rows = None
