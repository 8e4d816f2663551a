"""What each client is sent: states of its streams and deltas.

Owns: the client's session, the lines it reads, the states that wait for credit. Does not know: how
streams are computed, admitted or ended.

Rules:
- States (Accepted, Rejected) leave before deltas; both wait for credit, nothing queues in a socket.
- A client without credit is sent nothing; what it misses is merged into the next message.
- Where the interval is "auto", first tokens and ends leave at once, everything else when the reader
  has room: when few messages are under way. So every token streams under light load, and under
  heavy load messages merge by themselves.
- States that a client does not acknowledge are held up to a number; then its session is ended, for
  an attach tells anew whatever still holds.
- An attach drops what waited: the client says which streams it wants, and from where.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from time import monotonic

import numpy as np
import numpy.typing as npt

from slipstream_ipc.messages import ClientToWorker, PromptLogprobs, Superseded, WorkerToClient
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.transport.router import Acceptor, Session
from slipstream_worker.clients import deltas
from slipstream_worker.clients.deltas_scalar import FEW, FewBuilt, build_few, due_few
from slipstream_worker.clients.latency import Counters, Pace
from slipstream_worker.streams.stream import Reader, Stream
from slipstream_worker.streams.stream_columns import StreamColumns

Int64s = npt.NDArray[np.int64]

Receipt = list[Stream]  # whose end was in the message
AUTO_ROOM = 2
_MAX_STATES = 2**16

FrontAcceptor = Acceptor[WorkerToClient, ClientToWorker, Receipt]


class ClientPort:
    """Everything that goes to one client."""

    def __init__(
        self,
        acceptor: FrontAcceptor,
        session: Session[Receipt],
        columns: StreamColumns,
        counters: Counters,
        room: int | None = None,
    ) -> None:
        """`room`: messages under way from which on only what is urgent is sent; None: no such."""
        self._acceptor = acceptor
        self._room = room
        self._session = session
        self._columns = columns
        self._pace = Pace(columns, counters)
        self._states: deque[WorkerToClient] = deque()
        self._numbers: list[int] = []  # lines of the streams that it is sent, ascending
        self._lines: RowSet | None = None  # the same as a column, made when it is wanted
        self._first_line = 0  # the slow line whose turn it is, where not all fit
        self._has_news = False
        self.streams: set[Stream] = set()  # read by this client

    @property
    def session(self) -> Session[Receipt]:
        """The client's latest session, which may be over."""
        return self._session

    @property
    def unsent(self) -> Sequence[WorkerToClient]:
        """States that wait for credit."""
        return self._states

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for credit."""
        return bool(self._states) or self._has_news

    def attach(self, session: Session[Receipt]) -> None:
        """A new life: the client will say what it wants."""
        self._session = session
        self._states.clear()
        self._pace.settle()
        self._numbers, self._lines = [], None
        self._has_news = False
        for stream in self.streams:
            assert stream.reader is not None
            stream.reader.is_waiting = True
            stream.reader.awaited = None

    def state(self, body: WorkerToClient) -> None:
        """Queue a state of one of the client's streams."""
        self._states.append(body)

    def state_prompt(self, stream: Stream, handle: int) -> None:
        """Queue the log-probabilities of a stream's prompt, if it wants them and all are here."""
        for start, columns in self._columns.prompts.pieces(stream.line):
            self._states.append(PromptLogprobs(handle, start, columns))

    def read(self, stream: Stream, reader: Reader) -> None:
        """The client reads this stream; nothing of it is sent before `send_from_here`."""
        reader.is_waiting = True
        stream.reader = reader
        self.streams.add(stream)
        self._drop_line(stream.line)

    def send_from_here(self, stream: Stream) -> None:
        """Its reader's cursor is where its copy ends: send what lies behind."""
        assert stream.reader is not None
        stream.reader.is_waiting = False
        stream.reader.awaited = None
        line = stream.line
        self._columns.handles[line] = stream.reader.handle
        self._columns.is_dirty[line] = True
        self._has_news = True
        self._insert_line(line)

    def leave(self, stream: Stream) -> None:
        """The client reads this stream no more. Idempotent."""
        self.streams.discard(stream)
        self._drop_line(stream.line)

    def supersede(self, stream: Stream) -> None:
        """Another reader has taken this stream over."""
        assert stream.reader is not None
        self.leave(stream)
        self._states.append(Superseded(stream.reader.handle))

    def mark(self) -> None:
        """Some stream of it may have something new."""
        self._has_news = True

    def take_over(self) -> list[Stream]:
        """The streams whose end has been acknowledged since the last call."""
        # one that has another reader by now is for that one to read
        receipts = self._session.link.take_receipts()
        if not any(receipts):
            return []
        return [stream for ended in receipts for stream in ended if stream in self.streams]

    def flush(self) -> bool:
        """Send what is due and credit allows; whether deltas left."""
        session = self._session
        if not session.is_open:
            return False
        if len(self._states) > _MAX_STATES:
            self._acceptor.reattach(session)
            self._states.clear()
            return False
        while self._states and self._acceptor.send(session, self._states[0], []):
            self._states.popleft()
        has_sent = False
        while self._has_news and not self._states and session.link.has_credit:
            is_crowded = self._room is not None and session.link.num_unacked >= self._room
            built = self._build(urgent=is_crowded)
            if built is None:
                # who is not due yet comes back with its next token
                self._has_news = is_crowded
                break
            if not self._acceptor.send(session, built.message, built.slow.ended):
                break
            has_sent = True
            self._pace.left(built, monotonic())
            built.commit(self._columns)
            if built.slow.moves:
                self._first_line = built.slow.moves[-1][0].line + 1
            if built.is_all:
                self._has_news = is_crowded
                break
        return has_sent

    def _build(self, *, urgent: bool) -> deltas.Built | FewBuilt | None:
        """A message of what is due, if anything is."""
        columns, few = self._columns, self._numbers
        if len(few) > FEW:
            lines = self._lines
            if lines is None:
                lines = self._lines = RowSet(np.array(few, np.int64))
            is_dirty = columns.is_dirty.take(lines.array)
            if not is_dirty.all():
                lines = RowSet(lines.array[is_dirty])
            if len(lines) > FEW:
                return self._build_many(lines, urgent=urgent)
            few = lines.tolist()
        spans, slow_lines = due_few(columns, few, urgent=urgent)
        slow = self._due_slow(slow_lines, urgent=urgent) if slow_lines else []
        if not spans and not slow:
            return None
        built = build_few(columns, spans, slow)
        if built is None:
            fast = RowSet(np.array([line for line, _, _ in spans], np.int64))
            return deltas.build(columns, fast, slow)
        return built

    def _build_many(self, fast: RowSet, *, urgent: bool) -> deltas.Built | None:
        columns, slow = self._columns, list[Stream]()
        lines = fast.array
        is_fast = columns.is_fast.take(lines)
        if is_fast.all():
            fast = columns.in_order(fast)
        else:
            slow = self._due_slow(lines[~is_fast].tolist(), urgent=urgent)
            fast = RowSet(lines[is_fast])
        fast = deltas.due_fast(columns, fast, urgent=urgent)
        return deltas.build(columns, fast, slow) if len(fast) or slow else None

    def _due_slow(self, lines: Sequence[int], *, urgent: bool) -> list[Stream]:
        """Those of these slow lines' streams that have something for their readers now, in turn."""
        streams, leaves_now = self._columns.streams, deltas.is_urgent if urgent else deltas.is_due
        turn = bisect_left(lines, self._first_line)
        return [
            stream
            for line in (*lines[turn:], *lines[:turn])
            if (stream := streams[line]) is not None and leaves_now(stream)
        ]

    def _insert_line(self, line: int) -> None:
        numbers = self._numbers
        at = bisect_left(numbers, line)
        if at == len(numbers) or numbers[at] != line:
            self._pace.settle()
            numbers.insert(at, line)
            self._lines = None

    def _drop_line(self, line: int) -> None:
        numbers = self._numbers
        at = bisect_left(numbers, line)
        if at < len(numbers) and numbers[at] == line:
            self._pace.settle()
            del numbers[at]
            self._lines = None
