"""The life of every stream of a worker: accepted or rejected, ended, kept for a while, forgotten.

Owns: all streams and all clients' ports, and every change from one stage of a stream to the next.
Does not know: where the wish or the token came from that causes a change.

Rules (STREAMS III, V):
- Every stream that a client submits gets exactly one answer, every accepted one exactly one end.
- A stream that was rejected is not kept. An ended one is kept for the grace time after its reader
  has all of it (or after its end, if nobody reads it), then forgotten here and in the core. A
  reader that attached anew and has not said where it is does not read it.
- When a client is gone for good, so is everything that only it could read.
"""

from __future__ import annotations

import heapq
import logging
from math import inf
from typing import Literal

from slipstream_ipc.accept import Session
from slipstream_ipc.messages import (
    Accepted,
    Admit,
    End,
    Fault,
    FinishReason,
    Forget,
    Rejected,
    Withdraw,
)
from slipstream_ipc.text_log import Cursor
from slipstream_worker.clients import AUTO_ROOM, ClientPort, FrontAcceptor, Receipt
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.output import StreamOutput
from slipstream_worker.streams import Stage, Stream, StreamTable

logger = logging.getLogger(__name__)


class Lives:
    """All streams of one worker, and whoever reads them."""

    def __init__(
        self,
        core: CoreHop,
        front: FrontAcceptor,
        grace_s: float,
        stream_interval: int | Literal["auto"],
    ) -> None:
        self._core = core
        self._front = front
        self._grace_s = grace_s
        self._least_interval = 1 if stream_interval == "auto" else stream_interval
        self._room = AUTO_ROOM if stream_interval == "auto" else None
        self._clients: dict[bytes, ClientPort] = {}
        self._vanished: list[tuple[float, Session[Receipt]]] = []  # and when they count as dead
        self._leaving: list[tuple[float, int, bytes]] = []  # heap: when to forget which stream
        self._num_left = 0
        self._now = 0.0
        self.streams = StreamTable()

    @property
    def num_clients(self) -> int:
        """Clients that are attached, or may come back."""
        return len(self._clients)

    # ---- clients -------------------------------------------------------------------------

    def greet(self, session: Session[Receipt]) -> None:
        """A client attached: for the first time, or anew."""
        port = self._clients.get(session.identity)
        if port is None:
            self._clients[session.identity] = ClientPort(self._front, session, self._room)
        else:
            port.attach(session)
            for stream in port.streams:
                if stream.stage is Stage.ENDED and stream.leaves_at == inf:
                    # perhaps the client has all of it, and what it acknowledged was lost
                    self._leave_at(stream, self._now + self._grace_s)

    def port(self, client: bytes) -> ClientPort:
        """The port of an attached client."""
        return self._clients[client]

    def read(self, stream: Stream, client: bytes, handle: int, cursor: Cursor) -> None:
        """`client` reads a stream from `cursor` on; whoever read it before does not any more."""
        before = stream.reader
        if before is not None and before.client != client:
            self._clients[before.client].leave(stream)
        self._clients[client].read(stream, handle, cursor)
        stream.leaves_at = inf

    def dismiss(self, client: bytes) -> None:
        """A client is gone for good. Idempotent."""
        port = self._clients.pop(client, None)
        if port is None:
            return
        for stream in list(port.streams):
            stream.reader = None
            if stream.stage is Stage.RENDERING:
                self.streams.remove(stream)
                continue
            if stream.stage is not Stage.ENDED:
                self.abort(stream)
            self._leave_at(stream, self._now)

    # ---- a stream's stages ---------------------------------------------------------------

    def register(self, stream: Stream, admit: Admit, output: StreamOutput) -> None:
        """A stream's prompt is known, or a life before this one knew it."""
        stream.registration = admit
        stream.output = output
        stream.submit = None
        stream.fingerprint = admit.fingerprint
        stream.interval = max(admit.params.stream_interval, self._least_interval)
        stream.width = 0 if admit.params.logprobs is None else 1 + admit.params.logprobs

    def submit(self, stream: Stream) -> None:
        """Have the core run a stream."""
        assert stream.registration is not None
        stream.stage = Stage.SUBMITTED
        self._core.state(stream.registration)

    def admitted(self, stream: Stream, row: int) -> None:
        """The core runs a stream, or goes on with it after an attach."""
        self.streams.place(stream, row)
        if stream.stage is Stage.ENDED:
            self._tell_end(stream)  # it ended while the core did not hear
        elif stream.stage is Stage.SUBMITTED:
            stream.stage = Stage.RUNNING
            self.accept(stream)

    def accept(self, stream: Stream) -> None:
        """Tell the reader that its stream runs."""
        reader, admit = stream.reader, stream.registration
        if reader is not None and not reader.is_waiting and admit is not None:
            self._clients[reader.client].state(Accepted(reader.handle, admit.prompt_ids))

    def refused(self, stream: Stream, fault: Fault) -> None:
        """The core did not take a stream, or had to end it."""
        if stream.stage is Stage.SUBMITTED:
            self.reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            self._finish(stream, "error", fault)
            self._ended(stream)

    def reject(self, stream: Stream, fault: Fault) -> None:
        """A stream is not taken."""
        if stream.reader is not None:
            port = self._clients[stream.reader.client]
            if not stream.reader.is_waiting:  # else it asks again, and is answered then
                port.state(Rejected(stream.reader.handle, fault))
            port.leave(stream)
        self.streams.remove(stream)

    def push(self, stream: Stream, token_ids: list[int]) -> None:
        """New tokens of a running stream; they may end it."""
        output = stream.output
        assert output is not None
        if output.end is not None:
            return
        if stream.pending_end is not None:
            self._push_replayed(stream, token_ids, stream.pending_end)
        elif output.push(token_ids):
            self._ended(stream)
            self._tell_end(stream)
        elif stream.reader is not None:
            self._clients[stream.reader.client].mark(stream)

    def abort(self, stream: Stream) -> None:
        """End a stream at its reader's wish, wherever it is on its way."""
        if stream.stage is Stage.RENDERING:
            self.reject(stream, Fault("bad_request", "aborted before it was accepted"))
        elif stream.output is not None and stream.output.end is None:
            if stream.stage is Stage.SUBMITTED:
                self.accept(stream)
            self._finish(stream, "abort")
            self._ended(stream)
            self._tell_end(stream)

    def fail(self, stream: Stream, why: str) -> None:
        """End a stream whose handling raised, without trusting its detokeniser any more."""
        fault = Fault("engine", why)
        if stream.stage in (Stage.RENDERING, Stage.SUBMITTED):
            self.reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            stream.output.break_off(fault)
            self._ended(stream)
            self._tell_end(stream)

    def _push_replayed(self, stream: Stream, token_ids: list[int], end: End) -> None:
        """Tokens of the life before, up to an end that they do not imply."""
        output = stream.output
        assert output is not None
        missing = end.num_tokens - len(output.token_ids)
        if output.push(token_ids[:missing]):
            self._ended(stream)
        elif len(output.token_ids) >= end.num_tokens:
            self._finish(stream, end.reason, end.fault)
            self._ended(stream)
        elif stream.reader is not None:
            self._clients[stream.reader.client].mark(stream)

    def _finish(self, stream: Stream, reason: FinishReason, fault: Fault | None = None) -> None:
        """End a stream for a reason that its tokens do not imply, whatever its detokeniser does."""
        assert stream.output is not None
        try:
            stream.output.finish(reason, fault)
        except Exception as error:
            logger.exception("stream %s failed at its end", stream.stream_id.hex())
            why = f"{type(error).__name__} at the stream's end"
            stream.output.break_off(Fault("engine", why))

    def _ended(self, stream: Stream) -> None:
        stream.stage = Stage.ENDED
        if stream.reader is not None and not stream.reader.is_waiting:
            self._clients[stream.reader.client].mark(stream)
        else:
            self._leave_at(stream, self._now + self._grace_s)

    def _tell_end(self, stream: Stream) -> None:
        """Tell the core of an end that was named here."""
        assert stream.output is not None
        end = stream.output.end
        assert end is not None
        if end.reason in ("stop", "length"):
            if stream.row is not None:
                self._core.ended(stream.row, end.num_tokens)
        else:
            self._core.state(Withdraw(stream.stream_id, end))

    # ---- time ----------------------------------------------------------------------------

    def flush(self, now: float) -> None:
        """Send every client what is due."""
        self._now = now
        for port in self._clients.values():
            for stream in port.flush():
                self._leave_at(stream, now + self._grace_s)

    def beat(self, now: float) -> None:
        """Dismiss clients that stayed away, forget streams whose time has come."""
        self._now = now
        for session in self._front.take_lost():
            self._vanished.append((now + self._grace_s, session))
        while self._vanished and self._vanished[0][0] <= now:
            _, session = self._vanished.pop(0)
            port = self._clients.get(session.identity)
            if port is not None and port.session is session:
                self.dismiss(session.identity)
        gone = []
        while self._leaving and self._leaving[0][0] <= now:
            stream = self.streams.get(heapq.heappop(self._leaving)[2])
            if stream is not None and stream.leaves_at <= now:
                if stream.reader is not None:
                    self._clients[stream.reader.client].leave(stream)
                self.streams.remove(stream)
                gone.append(stream.stream_id)
        if gone:
            self._core.state(Forget(tuple(gone)))

    def _leave_at(self, stream: Stream, when: float) -> None:
        stream.leaves_at = when
        self._num_left += 1  # ties in the heap never compare ids
        heapq.heappush(self._leaving, (when, self._num_left, stream.stream_id))
