"""What each client is sent: states of its streams and deltas.

Owns: the client's session, which of its streams have news, the states that wait for credit.
Does not know: how streams are computed, admitted or ended.

Rules (STREAMS I, II, V):
- States (Accepted, Rejected) leave before deltas; both wait for credit, nothing queues in a socket.
- A client without credit is sent nothing; what it misses is merged into the next message.
- Where the interval is "auto", first tokens and ends leave at once, everything else when the reader
  has room: when few messages are under way. So every token streams under light load, and under
  heavy load messages merge by themselves.
- An attach drops what waited: the client says which streams it wants, and from where.
"""

from __future__ import annotations

from collections import deque

from slipstream_ipc.accept import Acceptor, Session
from slipstream_ipc.messages import ClientToWorker, WorkerToClient
from slipstream_ipc.text_log import Cursor
from slipstream_worker import deltas
from slipstream_worker.deltas import Sent
from slipstream_worker.streams import Reader, Stream

Receipt = list[Sent]
AUTO_ROOM = 2

FrontAcceptor = Acceptor[WorkerToClient, ClientToWorker, Receipt]


class ClientPort:
    """Everything that goes to one client."""

    def __init__(
        self, acceptor: FrontAcceptor, session: Session[Receipt], room: int | None = None
    ) -> None:
        """`room`: messages under way from which on only what is urgent is sent; None: no such."""
        self._acceptor = acceptor
        self._room = room
        self._session = session
        self._states: deque[WorkerToClient] = deque()
        self._news: dict[Stream, None] = {}  # an ordered set: who waits longest comes first
        self.streams: set[Stream] = set()  # read by this client

    @property
    def session(self) -> Session[Receipt]:
        """The client's latest session, which may be over."""
        return self._session

    def attach(self, session: Session[Receipt]) -> None:
        """A new life: the client will say what it wants."""
        self._session = session
        self._states.clear()
        self._news.clear()
        for stream in self.streams:
            assert stream.reader is not None
            stream.reader.is_waiting = True

    def state(self, body: WorkerToClient) -> None:
        """Queue a state of one of the client's streams."""
        self._states.append(body)

    def read(self, stream: Stream, handle: int, cursor: Cursor) -> None:
        """The client reads this stream from `cursor` on, under `handle`."""
        stream.reader = Reader(self._session.identity, handle, cursor)
        self.streams.add(stream)
        self._news[stream] = None

    def leave(self, stream: Stream) -> None:
        """The client reads this stream no more. Idempotent."""
        self.streams.discard(stream)
        self._news.pop(stream, None)

    def mark(self, stream: Stream) -> None:
        """This stream may have something new."""
        self._news[stream] = None

    def flush(self) -> list[Stream]:
        """Send what is due and credit allows; the streams whose end has been acknowledged."""
        session = self._session
        over: list[Stream] = []
        for receipt in session.link.take_receipts():
            over += [entry.stream for entry in receipt if entry.is_end]
        if not session.is_open:
            return over
        while self._states and self._acceptor.send(session, self._states[0], []):
            self._states.popleft()
        while self._news and not self._states and session.link.has_credit:
            is_crowded = self._room is not None and session.link.num_unacked >= self._room
            leaves_now = deltas.is_urgent if is_crowded else deltas.is_due
            due = [stream for stream in self._news if leaves_now(stream)]
            if not due:
                if not is_crowded:
                    self._news.clear()  # who is not due yet comes back with its next token
                break
            message, sent = deltas.build(due)
            if not self._acceptor.send(session, message, sent):
                break
            for entry in sent:
                assert entry.stream.reader is not None
                entry.stream.reader.cursor = entry.cursor
                # what a stream has beyond its share of this message stays news
                if entry.is_end or not deltas.is_due(entry.stream):
                    del self._news[entry.stream]
                else:
                    self._news[entry.stream] = self._news.pop(entry.stream)
            if len(sent) == len(due):
                self._news = {stream: None for stream in self._news if deltas.is_due(stream)}
        return over
