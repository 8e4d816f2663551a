"""What each client is sent: states of its streams and deltas.

Owns: the client's session, the lines it reads, the states that wait for credit. Does not know: how
streams are computed, admitted or ended.

Rules (STREAMS I, II, V):
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

from collections import deque

import numpy as np
import numpy.typing as npt

from slipstream_ipc.accept import Acceptor, Session
from slipstream_ipc.messages import ClientToWorker, PromptLogprobs, Superseded, WorkerToClient
from slipstream_worker import deltas
from slipstream_worker.columns import StreamColumns
from slipstream_worker.streams import Reader, Stream

Int64s = npt.NDArray[np.int64]

Receipt = list[Stream]  # whose end was in the message
AUTO_ROOM = 2
_MAX_STATES = 2**16

FrontAcceptor = Acceptor[WorkerToClient, ClientToWorker, Receipt]

_NONE: Int64s = np.zeros(0, np.int64)


class ClientPort:
    """Everything that goes to one client."""

    def __init__(
        self,
        acceptor: FrontAcceptor,
        session: Session[Receipt],
        columns: StreamColumns,
        room: int | None = None,
    ) -> None:
        """`room`: messages under way from which on only what is urgent is sent; None: no such."""
        self._acceptor = acceptor
        self._room = room
        self._session = session
        self._columns = columns
        self._states: deque[WorkerToClient] = deque()
        self._lines = _NONE  # of the streams that it is sent, ascending
        self._first_line = 0  # the slow line whose turn it is, where not all fit
        self._has_news = False
        self.streams: set[Stream] = set()  # read by this client

    @property
    def session(self) -> Session[Receipt]:
        """The client's latest session, which may be over."""
        return self._session

    @property
    def has_unsent(self) -> bool:
        """Whether something waits for credit."""
        return bool(self._states) or self._has_news

    def attach(self, session: Session[Receipt]) -> None:
        """A new life: the client will say what it wants."""
        self._session = session
        self._states.clear()
        self._lines = _NONE
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
        """The client reads this stream; nothing of it is sent before `send_from`."""
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
        at = int(np.searchsorted(self._lines, line))
        if at == len(self._lines) or self._lines[at] != line:
            self._lines = np.insert(self._lines, at, line)

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
            fast, slow = self._due(urgent=is_crowded)
            if not len(fast) and not slow:
                # who is not due yet comes back with its next token
                self._has_news = is_crowded
                break
            built = deltas.build(self._columns, fast, slow)
            if not self._acceptor.send(session, built.message, built.ended):
                break
            has_sent = True
            built.commit(self._columns)
            if built.slow:
                self._first_line = built.slow[-1][0].line + 1
        return has_sent

    def _due(self, *, urgent: bool) -> tuple[Int64s, list[Stream]]:
        columns, lines = self._columns, self._lines
        lines = lines[columns.is_dirty[lines]]
        if not len(lines):
            return lines, []
        is_fast = columns.is_fast[lines]
        if np.count_nonzero(is_fast) == len(lines):
            lines = columns.in_order(lines)
            return deltas.due_fast(columns, lines, urgent=urgent), []
        slow_lines = lines[~is_fast]
        turn = int(np.searchsorted(slow_lines, self._first_line))
        leaves_now = deltas.is_urgent if urgent else deltas.is_due
        slow = [
            stream
            for line in (*slow_lines[turn:].tolist(), *slow_lines[:turn].tolist())
            if (stream := columns.streams[line]) is not None and leaves_now(stream)
        ]
        return deltas.due_fast(columns, lines[is_fast], urgent=urgent), slow

    def _drop_line(self, line: int) -> None:
        at = int(np.searchsorted(self._lines, line))
        if at < len(self._lines) and self._lines[at] == line:
            self._lines = np.delete(self._lines, at)
