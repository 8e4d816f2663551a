"""The life of every stream of a worker: accepted or rejected, ended, kept for a while, forgotten.

Owns: all streams and all clients' ports, and every change from one stage of a stream to the next.
Does not know: where the wish or the token came from that causes a change.

Rules (STREAMS III, V):
- Every stream that a client submits gets exactly one answer, every accepted one exactly one end.
- A stream that was rejected is not kept. An ended one is kept for the grace time after its reader
  has all of it (or after its end, if nobody reads it), then forgotten here and in the core; earlier
  where ended streams together take too much memory. Its id is remembered for long: what has ended
  is not run again.
- A stream has one reader. Whoever comes later is it, the one before is told and has no say.
- When a client is gone for good, so is everything that only it could read.
"""

from __future__ import annotations

import heapq
import logging
from collections import deque
from collections.abc import Sequence
from math import inf
from typing import Literal

import numpy as np
import numpy.typing as npt
from msgspec import structs

from slipstream_ipc.accept import Session
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Accepted,
    Admit,
    Fault,
    FinishReason,
    Forget,
    Rejected,
    Superseded,
    Withdraw,
)
from slipstream_ipc.text_log import Cursor
from slipstream_worker.clients import AUTO_ROOM, ClientPort, FrontAcceptor, Receipt
from slipstream_worker.columns import StreamColumns
from slipstream_worker.core_hop import CoreHop
from slipstream_worker.detokenizer import DetokenizerFactory
from slipstream_worker.output import StreamOutput
from slipstream_worker.positions import Diverged, locate
from slipstream_worker.streams import Position, Reader, Stage, Stream, StreamTable
from slipstream_worker.tombstones import Tombstones

logger = logging.getLogger(__name__)

_MAX_STRIKES = 3  # cores that may die over a stream; the last one ran it alone
_MAX_ENDED_BYTES = 256 * 2**20  # of ended streams that are kept for readers that come back
_LEAST_TOMBSTONES = 2**16
_FEW_CLIENTS = 8  # to look at all of them is cheaper than to find out which have news

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]


class Lives:
    """All streams of one worker, and whoever reads them."""

    def __init__(
        self,
        core: CoreHop,
        front: FrontAcceptor,
        columns: StreamColumns,
        detokenizers: DetokenizerFactory,
        grace_s: float,
        stream_interval: int | Literal["auto"],
    ) -> None:
        self._core = core
        self._detokenizers = detokenizers
        self._front = front
        self._grace_s = grace_s
        self._least_interval = 1 if stream_interval == "auto" else stream_interval
        self._room = AUTO_ROOM if stream_interval == "auto" else None
        self._clients: dict[bytes, ClientPort] = {}
        self._vanished: list[tuple[float, Session[Receipt]]] = []  # and when they count as dead
        self._leaving: list[tuple[float, int, bytes]] = []  # heap: when to forget which stream
        self._num_left = 0
        self.now = 0.0  # set by whoever drives us, before anything else
        self._awaiting: dict[Stream, None] = {}  # whose readers are ahead of us
        self._kept: deque[Stream] = deque()  # that have ended, oldest first
        self._ended_bytes = 0
        self._tombstones = Tombstones(_LEAST_TOMBSTONES)
        self._struck_by = -1  # incarnation of the core whose suspects have been struck
        self.columns = columns
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
            port = ClientPort(self._front, session, self.columns, self._room)
            self._clients[session.identity] = port
        else:
            port.attach(session)
            for stream in port.streams:
                if stream.stage is Stage.ENDED and stream.leaves_at == inf:
                    # perhaps the client has all of it, and what it acknowledged was lost
                    self._leave_at(stream, self.now + self._grace_s)

    def port(self, client: bytes) -> ClientPort:
        """The port of an attached client."""
        return self._clients[client]

    def read(self, stream: Stream, client: bytes, handle: int, position: Position) -> None:
        """`client` reads a stream from `position` on; whoever read it before is superseded.

        Where the stream has no such position the newcomer is told so, and nothing changes.
        """
        port, reader = self._clients[client], Reader(client, handle, awaited=position)
        if (client, handle) in stream.past_readers:  # it was away when it was told
            port.state(Superseded(handle))
            return
        try:
            cursor = self._locate(stream, position)
        except Diverged as error:
            port.state(_diverged(handle, error))
            return
        before = stream.reader
        if before is not None:
            if (before.client, before.handle) == (client, handle):
                port.leave(stream)
            else:
                self._clients[before.client].supersede(stream)
                stream.past_readers.append((before.client, before.handle))
        port.read(stream, reader)
        stream.leaves_at = inf
        self._place(stream, reader, cursor)

    def is_reader(self, stream: Stream, client: bytes, handle: int | None) -> bool:
        """Whether a client that calls the stream by this handle has a say over it."""
        reader = stream.reader
        if reader is None:  # nobody has come back to it since it was replayed
            return stream.registration is not None and stream.registration.owner == client
        return reader.client == client and handle in (None, reader.handle)

    def dismiss(self, client: bytes) -> None:
        """A client is gone for good. Idempotent."""
        port = self._clients.pop(client, None)
        if port is None:
            return
        for stream in list(port.streams):
            stream.reader = None
            if stream.stage is Stage.RENDERING:
                self._remove(stream)
                continue
            if stream.stage is not Stage.ENDED:
                self.abort(stream)
            self._leave_at(stream, self.now)

    def _locate(self, stream: Stream, position: Position) -> Cursor | None:
        if stream.output is None:
            return None  # looked for again when the stream is registered
        return locate(self.columns, stream, position, self._detokenizers)

    def _place(self, stream: Stream, reader: Reader, cursor: Cursor | None) -> None:
        """Begin to send a stream to its reader, once we have come to where its copy ends."""
        if cursor is None:
            self._awaiting[stream] = None
        else:
            self._awaiting.pop(stream, None)
            reader.cursor = cursor
            self._clients[reader.client].send_from_here(stream)

    def _look_again(self, stream: Stream, reader: Reader) -> None:
        """There is more of a stream whose reader is ahead of us."""
        assert reader.awaited is not None
        try:
            self._place(stream, reader, self._locate(stream, reader.awaited))
        except Diverged as error:
            self._awaiting.pop(stream, None)
            port = self._clients[reader.client]
            port.state(_diverged(reader.handle, error))
            port.leave(stream)
            stream.reader = None
            if stream.stage is Stage.ENDED:
                self._leave_at(stream, self.now + self._grace_s)

    # ---- a stream's stages ---------------------------------------------------------------

    def register(self, stream: Stream, admit: Admit, output: StreamOutput) -> None:
        """A stream's prompt is known, or a life before this one knew it."""
        stream.registration = admit
        stream.output = output
        stream.submit = None
        stream.fingerprint = admit.fingerprint
        stream.interval = max(admit.params.stream_interval, self._least_interval)
        stream.strikes = admit.strikes
        stream.struck_at = len(admit.output_ids) // 4
        self.columns.open(stream, admit)
        if stream.reader is not None and stream.reader.awaited is not None:
            self._look_again(stream, stream.reader)

    def submit(self, stream: Stream) -> None:
        """Have the core run a stream, unless the tokens it comes with have ended it already."""
        assert stream.registration is not None
        assert stream.output is not None
        stream.stage = Stage.SUBMITTED
        if stream.output.end is None:
            self._core.state(stream.registration)
        else:
            self.accept(stream)
            self._ended(stream)

    def admitted(self, stream: Stream, row: int) -> None:
        """The core runs a stream, or goes on with it after an attach."""
        self.streams.place(stream, row)
        if stream.stage is Stage.ENDED:
            self.streams.silence(stream)
            self._tell_end(stream)  # it ended while the core did not hear
        elif stream.stage is Stage.SUBMITTED:
            stream.stage = Stage.RUNNING
            self.accept(stream)

    def readmission(self, stream: Stream) -> Admit:
        """The registration with which a core that lost a stream can go on with it."""
        assert stream.registration is not None
        num_tokens = self.columns.num_tokens(stream)
        is_whole = not stream.logprobs_from
        return structs.replace(
            stream.registration,
            output_ids=pack_u32(self.columns.token_ids(stream)),
            logprobs=self.columns.logprobs.read(stream.line, 0, num_tokens) if is_whole else None,
            prompt_logprobs=self.columns.prompts.columns(stream.line),
            was_accepted=stream.stage is not Stage.SUBMITTED or stream.registration.was_accepted,
            strikes=stream.strikes,
        )

    def suspect(self, incarnation: int, stream_ids: Sequence[bytes]) -> None:
        """A core died from within while it ran these; `incarnation` is its successor's."""
        if incarnation == self._struck_by:
            return  # said again after an attach
        self._struck_by = incarnation
        for stream_id in stream_ids:
            stream = self.streams.get(stream_id)
            if stream is None or stream.output is None or stream.output.end is not None:
                continue
            num_tokens = self.columns.num_tokens(stream)
            has_progressed = num_tokens > stream.struck_at
            stream.strikes = 1 if has_progressed else stream.strikes + 1
            stream.struck_at = num_tokens
            if stream.strikes >= _MAX_STRIKES:
                times = f"{stream.strikes} times in a row"
                self.fail(stream, f"the engine died {times} over this request, at last alone")

    def accept(self, stream: Stream) -> None:
        """Tell the reader that its stream runs."""
        reader, admit = stream.reader, stream.registration
        if reader is not None and reader.is_listening and admit is not None:
            port = self._clients[reader.client]
            port.state(Accepted(reader.handle, admit.prompt_ids))
            port.state_prompt(stream, reader.handle)

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
            if stream.reader.is_listening:  # else it asks again, and is answered then
                port.state(Rejected(stream.reader.handle, fault))
            port.leave(stream)
        self._remove(stream)

    def push(self, stream: Stream, token_ids: Sequence[int]) -> None:
        """New tokens of a running stream, which are in its history already; they may end it."""
        output = stream.output
        assert output is not None
        if output.end is not None:
            return
        columns = self.columns
        if columns.is_fast[stream.line]:
            columns.slow_down(stream, columns.num_tokens(stream) - len(token_ids))
            for token_id in token_ids:
                columns.learn(stream, token_id)
        if output.push(token_ids):
            self._ended(stream)
            self._tell_end(stream)

    def push_replayed(self, stream: Stream, token_ids: UInt32s) -> None:
        """Tokens of the life before, up to an end that they do not imply; not in the history."""
        output, end = stream.output, stream.pending_end
        assert output is not None
        assert end is not None
        token_ids = token_ids[: end.num_tokens - output.num_tokens]
        if output.end is None and len(token_ids):
            self.columns.append(np.array([stream.line]), np.array([len(token_ids)]), token_ids)
            if output.push(token_ids.tolist()):
                self._ended(stream)
        if output.end is None and output.num_tokens >= end.num_tokens:
            self._finish(stream, end.reason, end.fault)
            self._ended(stream)

    def has_news(self, lines: Int64s | Sequence[int]) -> None:
        """These lines have new tokens; see to it that their readers' clients are looked at."""
        if len(self._clients) <= _FEW_CLIENTS:
            for port in self._clients.values():
                port.mark()
            return
        streams = self.columns.streams
        readers = {
            stream.reader.client
            for line in (lines.tolist() if isinstance(lines, np.ndarray) else lines)
            if (stream := streams[line]) is not None and stream.reader is not None
        }
        for client in readers:
            self._clients[client].mark()

    def abort(self, stream: Stream) -> None:
        """End a stream at its reader's wish, wherever it is on its way."""
        if stream.stage is Stage.RENDERING:
            self.reject(stream, Fault("bad_request", "aborted before it was accepted"))
        elif stream.output is not None and stream.output.end is None:
            if stream.stage is Stage.SUBMITTED:
                self.accept(stream)
            self._end(stream, "abort")

    def fail(self, stream: Stream, why: str) -> None:
        """End a stream whose handling raised, without trusting its detokeniser any more."""
        fault = Fault("engine", why)
        if stream.stage in (Stage.RENDERING, Stage.SUBMITTED):
            self.reject(stream, fault)
        elif stream.output is not None and stream.output.end is None:
            self.columns.slow_down(stream, self.columns.num_tokens(stream))
            stream.output.break_off(fault)
            self._ended(stream)
            self._tell_end(stream)

    def end_all(self, fault: Fault) -> None:
        """End whatever still goes on; what is held back is released first."""
        for stream in self.streams.all():
            if stream.stage in (Stage.RENDERING, Stage.SUBMITTED):
                self.reject(stream, fault)
            elif stream.output is not None and stream.output.end is None:
                self._end(stream, "error", fault)

    def _end(self, stream: Stream, reason: FinishReason, fault: Fault | None = None) -> None:
        self._finish(stream, reason, fault)
        self._ended(stream)
        self._tell_end(stream)

    def _finish(self, stream: Stream, reason: FinishReason, fault: Fault | None = None) -> None:
        """End a stream for a reason that its tokens do not imply, whatever its detokeniser does."""
        assert stream.output is not None
        self.columns.slow_down(stream, self.columns.num_tokens(stream))
        try:
            stream.output.finish(reason, fault)
        except Exception as error:
            logger.exception("a stream failed at its end")
            why = f"{type(error).__name__} at the stream's end"
            stream.output.break_off(Fault("engine", why))

    def _ended(self, stream: Stream) -> None:
        stream.stage = Stage.ENDED
        self.streams.silence(stream)
        assert stream.registration is not None
        token_bytes = 16 + 8 * int(self.columns.widths[stream.line])
        num_tokens = self.columns.num_tokens(stream)
        stream.held_bytes = len(stream.registration.prompt_ids) + token_bytes * num_tokens
        stream.held_bytes += self.columns.prompts.num_bytes(stream.line)
        self._ended_bytes += stream.held_bytes
        self._kept.append(stream)
        reader = stream.reader
        if reader is not None and reader.awaited is not None:
            self._look_again(stream, reader)
            reader = stream.reader
        if reader is not None and not reader.is_waiting:
            self.columns.is_dirty[stream.line] = True
            self._clients[reader.client].mark()
        elif stream.leaves_at == inf:
            self._leave_at(stream, self.now + self._grace_s)

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

    @property
    def num_running(self) -> int:
        """Streams that have not ended."""
        return sum(stream.stage is not Stage.ENDED for stream in self.streams.all())

    @property
    def has_unsent(self) -> bool:
        """Whether something waits to be sent to a client that is there."""
        return any(port.has_unsent and port.session.is_open for port in self._clients.values())

    def flush(self) -> bool:
        """Send every client what is due; whether that was anything."""
        if self._awaiting:
            self._look_for_places()
        has_sent = False
        for port in self._clients.values():
            for stream in port.take_over():
                self._leave_at(stream, self.now + self._grace_s)
            has_sent |= port.has_unsent and port.flush()
        return has_sent

    def beat(self) -> None:
        """Dismiss clients that stayed away, forget streams whose time has come."""
        now = self.now
        for session in self._front.take_lost():
            self._vanished.append((now + self._grace_s, session))
        while self._vanished and self._vanished[0][0] <= now:
            _, session = self._vanished.pop(0)
            port = self._clients.get(session.identity)
            if port is not None and port.session is session:
                self.dismiss(session.identity)
        self._make_room()
        gone = []
        while self._leaving and self._leaving[0][0] <= now:
            stream = self.streams.get(heapq.heappop(self._leaving)[2])
            if stream is not None and stream.leaves_at <= now:
                if stream.reader is not None:
                    self._clients[stream.reader.client].leave(stream)
                self._remove(stream)
                self._tombstones.add(stream.stream_id)
                gone.append(stream.stream_id)
        if gone:
            self._core.state(Forget(tuple(gone)))

    def has_been(self, stream_id: bytes) -> bool:
        """Whether a stream of this id ended and was forgotten."""
        return stream_id in self._tombstones

    def clear(self) -> None:
        """Forget everything: the core will tell it anew."""
        for stream in self.streams.all():
            self.columns.close(stream)
        self.streams.clear()
        self._awaiting.clear()
        self._kept.clear()
        self._ended_bytes = 0

    def _look_for_places(self) -> None:
        for stream in list(self._awaiting):
            if stream.reader is None or stream.reader.awaited is None:
                del self._awaiting[stream]
            elif self.columns.is_dirty[stream.line]:  # since the last look
                self.columns.is_dirty[stream.line] = False
                self._look_again(stream, stream.reader)

    def _make_room(self) -> None:
        """Let go of ended streams, the oldest first, where they take too much memory."""
        kept = self._kept
        while kept and not kept[0].line:
            kept.popleft()  # forgotten meanwhile
        for _ in range(len(kept)):
            if self._ended_bytes <= _MAX_ENDED_BYTES:
                break
            stream = kept.popleft()
            if stream.line and stream.leaves_at == inf:
                kept.append(stream)  # its reader has yet to get all of it
            elif stream.line:
                self._ended_bytes -= stream.held_bytes
                stream.held_bytes = 0
                self._leave_at(stream, self.now)

    def _remove(self, stream: Stream) -> None:
        self._ended_bytes -= stream.held_bytes
        self._awaiting.pop(stream, None)
        self.columns.close(stream)
        self.streams.remove(stream)

    def _leave_at(self, stream: Stream, when: float) -> None:
        stream.leaves_at = when
        self._num_left += 1  # ties in the heap never compare ids
        heapq.heappush(self._leaving, (when, self._num_left, stream.stream_id))


def _diverged(handle: int, error: Diverged) -> Rejected:
    return Rejected(handle, Fault("diverged", str(error), "num_tokens"))
