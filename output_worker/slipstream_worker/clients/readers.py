"""The readers of streams: which client reads which stream, and from where on.

Keeps all clients' ports, and makes every change of a stream's reader.

- A stream has one reader. A later one takes it over; the earlier one is sent Superseded.
- A stream whose reader is not listening (it has none, or its reader has not requested it since the
  last attach) gets a time at which `Retention` gives it up, whatever its stage. A stream whose
  client is lost is given up when the client is gone for good.
- A reader that is ahead of this worker is sent nothing until the stream has reached the end of its
  copy.
- A lost client may attach again within the grace time; after that `take_gone` returns it. A client
  that is attached but acknowledges nothing is gone at once.
"""

from __future__ import annotations

import logging
from itertools import count
from math import inf

import numpy as np

from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.messages import Accepted, Admit, Fault, Rejected, Superseded
from slipstream_ipc.transport.router import Session
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.clients.ports import ClientPort, FrontAcceptor, Receipt
from slipstream_worker.detokenizer.factory import DetokenizerFactory
from slipstream_worker.streams.resume_cursor import Diverged, locate
from slipstream_worker.streams.retention import Retention
from slipstream_worker.streams.stream import Reader, ResumePoint, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

logger = logging.getLogger(__name__)

_FEW_CLIENTS = 8  # up to here, checking all is cheaper than finding those with news


class StreamReaders:
    """The readers of one worker's streams."""

    def __init__(
        self,
        front: FrontAcceptor,
        columns: StreamColumns,
        detokenizers: DetokenizerFactory,
        counters: RequestCounters,
        retention: Retention,
        max_unacked: int | None,
    ) -> None:
        """`max_unacked`: see `ClientPort`."""
        self._front = front
        self._columns = columns
        self._detokenizers = detokenizers
        self._counters = counters
        self._retention = retention
        self._max_unacked = max_unacked
        self._clients: dict[bytes, ClientPort] = {}
        self._by_number: dict[int, ClientPort] = {}  # the same
        self._numbers = count(1)
        self._disconnected: list[tuple[float, Session[Receipt]]] = []  # with their deadlines
        self._awaiting: dict[WorkerStream, None] = {}  # streams whose readers are ahead of us

    @property
    def num_clients(self) -> int:
        """Clients that are attached or may attach again."""
        return len(self._clients)

    @property
    def ports(self) -> list[ClientPort]:
        """The ports of all of them."""
        return list(self._clients.values())

    @property
    def only_port(self) -> ClientPort | None:
        """The port of the client that reads all streams, where nothing waits to be sent to others;
        None if there is none, if a stream's reader waits, or if there are many clients.
        """
        if self._awaiting or len(self._clients) > _FEW_CLIENTS:
            return None
        busy = [port for port in self._clients.values() if port.streams or port.has_unsent]
        return busy[0] if len(busy) == 1 else None

    @property
    def has_unsent(self) -> bool:
        """True if anything is still to be sent to an attached client."""
        return any(port.has_unsent and port.session.is_open for port in self._clients.values())

    # ---- clients -------------------------------------------------------------------------

    def attach_client(self, session: Session[Receipt]) -> None:
        """A client attached, for the first time or again."""
        port = self._clients.get(session.identity)
        if port is None:
            number = next(self._numbers)
            port = self._by_number[number] = ClientPort(
                self._front, session, self._columns, self._counters, self._max_unacked, number
            )
            self._clients[session.identity] = port
        else:
            port.attach(session)
            for stream in port.streams:
                if stream.expires_at == inf:
                    # it may have all of it, or have dropped it, and its message was lost
                    self._retention.expire_after_grace(stream)

    def is_here(self, client: bytes) -> bool:
        """True if a client is attached."""
        port = self._clients.get(client)
        return port is not None and port.session.is_open

    def port(self, client: bytes) -> ClientPort:
        """The port of an attached client. Raises KeyError if there is none."""
        return self._clients[client]

    def remove(self, client: bytes) -> list[WorkerStream]:
        """Remove a client that is gone for good; returns the streams it read. Idempotent."""
        port = self._clients.pop(client, None)
        if port is None:
            return []
        del self._by_number[port.number]
        streams = list(port.streams)
        for stream in streams:
            stream.reader = None
        return streams

    def take_gone(self) -> list[bytes]:
        """Clients gone for good since the last call: away for the grace time, or stalled."""
        now = self._retention.now
        for session in self._front.take_lost():
            self._disconnected.append((now + self._retention.grace_s, session))
        gone = [session.identity for session in self._front.take_stalled()]
        while self._disconnected and self._disconnected[0][0] <= now:
            _, session = self._disconnected.pop(0)
            port = self._clients.get(session.identity)
            if port is not None and port.session is session:
                gone.append(session.identity)
        return gone

    def flush(self) -> bool:
        """Send every client what is due; returns whether deltas were sent."""
        if self._awaiting:
            self._retry_awaiting()
        has_sent = False
        for port in self._clients.values():
            for stream in port.take_ended():
                self._retention.expire_once_read(stream)
            has_sent |= port.has_unsent and port.flush()
        return has_sent

    # ---- streams -------------------------------------------------------------------------

    def read(self, stream: WorkerStream, client: bytes, handle: int, position: ResumePoint) -> None:
        """Make `client` the reader of a stream from `position` on; the reader before is superseded.

        If the stream has no such position, the client is sent a rejection and another reader stays.
        """
        port, reader = self._clients[client], Reader(client, handle, awaited=position)
        if (client, handle) in stream.past_readers:  # Superseded did not reach it
            port.enqueue(Superseded(handle))
            return
        try:
            cursor = self._locate(stream, position)
        except Diverged as error:
            port.enqueue(_diverged(handle, error))
            if stream.reader is not None and stream.reader.matches(client, handle):
                self._drop_reader(stream)
            return
        before = stream.reader
        if before is not None:
            if before.matches(client, handle):
                port.stop_reading(stream)
            else:
                self._clients[before.client].supersede(stream)
                stream.past_readers.append((before.client, before.handle))
        port.read(stream, reader)
        stream.expires_at = inf
        self._start_when_reached(stream, reader, cursor)

    def is_reader(self, stream: WorkerStream, client: bytes, handle: int | None) -> bool:
        """True if a client that has this handle for the stream may act on it."""
        reader = stream.reader
        if reader is None:  # it was replayed, and not requested since
            return stream.registration is not None and stream.registration.begun.owner == client
        return reader.client == client and handle in (None, reader.handle)

    def mark_due(self, worker_rows: Int64s) -> None:
        """Mark the ports of these rows' readers as due: the rows have new tokens."""
        if len(self._clients) <= _FEW_CLIENTS:
            self.mark_all_due()
            return
        for number in np.unique(self._columns.ports.take(worker_rows)).tolist():
            if number in self._by_number:
                self._by_number[number].mark_due()

    def mark_all_due(self) -> None:
        """Mark every port as due."""
        for port in self._clients.values():
            port.mark_due()

    def opened(self, stream: WorkerStream) -> None:
        """A stream has its row, and perhaps tokens: locate the end of its reader's copy."""
        if stream.reader is not None and stream.reader.awaited is not None:
            self._retry_locate(stream, stream.reader)

    def ended(self, stream: WorkerStream) -> None:
        """A stream has ended: send the rest to its reader, or let it leave after the grace time."""
        self.opened(stream)
        reader = stream.reader
        if reader is not None and not reader.is_waiting:
            self._columns.is_dirty[stream.worker_row] = True
            self._clients[reader.client].mark_due()
        else:
            self._retention.expire_once_read(stream)

    def accept(self, stream: WorkerStream) -> None:
        """Send Accepted to the stream's reader."""
        reader, admit = stream.reader, stream.registration
        if reader is not None and reader.is_listening and admit is not None:
            port = self._clients[reader.client]
            port.enqueue(accepted(reader.handle, admit), stream.worker_row)
            port.enqueue_prompt_logprobs(stream, reader.handle)

    def reject(self, stream: WorkerStream, fault: Fault) -> None:
        """Send Rejected to the stream's reader, which no longer reads it."""
        if stream.reader is not None:
            port = self._clients[stream.reader.client]
            if stream.reader.is_listening:  # else it submits again, and is answered then
                port.enqueue(Rejected(stream.reader.handle, fault))
            port.stop_reading(stream)

    def supersede(self, stream: WorkerStream, client: bytes, handle: int) -> None:
        """Tell the stream's reader, if it is another, that `client` takes over under `handle`."""
        reader = stream.reader
        if reader is not None and not reader.matches(client, handle):
            self._clients[reader.client].supersede(stream)

    def forget(self, stream: WorkerStream) -> None:
        """A stream is forgotten, or has lost its row."""
        self._awaiting.pop(stream, None)
        if stream.reader is not None:
            self._clients[stream.reader.client].stop_reading(stream)

    def clear(self) -> None:
        """All streams are forgotten."""
        self._awaiting.clear()

    # ---- inside --------------------------------------------------------------------------

    def _locate(self, stream: WorkerStream, position: ResumePoint) -> TextCursor | None:
        if stream.output is None:
            return None  # looked for again when the stream is registered
        return locate(self._columns, stream, position, self._detokenizers)

    def _start_when_reached(
        self, stream: WorkerStream, reader: Reader, cursor: TextCursor | None
    ) -> None:
        """Start sending to the reader, once the stream has reached the end of its copy."""
        if cursor is None:
            self._awaiting[stream] = None
        else:
            self._awaiting.pop(stream, None)
            reader.cursor = cursor
            self._clients[reader.client].start_sending(stream)

    def _retry_locate(self, stream: WorkerStream, reader: Reader) -> None:
        """A stream has grown whose reader is ahead of this worker."""
        assert reader.awaited is not None
        try:
            self._start_when_reached(stream, reader, self._locate(stream, reader.awaited))
        except Diverged as error:
            self._clients[reader.client].enqueue(_diverged(reader.handle, error))
            self._drop_reader(stream)
        except Exception:  # what its output raises ends this reader, not the worker
            logger.exception("a stream's output could not be made again for a reader")
            fault = Fault("engine", "the stream's text could not be made again")
            self._clients[reader.client].enqueue(Rejected(reader.handle, fault))
            self._drop_reader(stream)

    def _drop_reader(self, stream: WorkerStream) -> None:
        """Remove the stream's reader, which has been sent a rejection."""
        assert stream.reader is not None
        self._clients[stream.reader.client].stop_reading(stream)
        self._awaiting.pop(stream, None)
        stream.reader = None
        self._retention.expire_after_grace(stream)

    def _retry_awaiting(self) -> None:
        for stream in list(self._awaiting):
            if stream.reader is None or stream.reader.awaited is None:
                del self._awaiting[stream]
            elif self._columns.is_dirty[stream.worker_row]:  # since the last look
                self._columns.is_dirty[stream.worker_row] = False
                self._retry_locate(stream, stream.reader)


def _diverged(handle: int, error: Diverged) -> Rejected:
    return Rejected(handle, Fault("diverged", str(error), "num_tokens"))


def accepted(handle: int, admit: Admit) -> Accepted:
    """The acceptance of a stream with this registration, for its reader."""
    derived, digest = admit.derived, admit.spec.adapter_digest
    return Accepted(handle, admit.prompt_ids, derived.changed_turns, derived.left_out, digest)
