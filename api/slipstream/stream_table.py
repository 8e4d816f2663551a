"""The streams of one client, as its I/O thread keeps them: what each has, and how each ends.

Owns: every stream's position, its unread deltas, its one end. Does not know: sockets, clocks,
who reads.

Rules (STREAMS I and III):
- An entry continues a stream exactly at the reader's position. What begins earlier is cut to what
  is new; what begins later is a gap, of which nothing is taken: the caller attaches anew.
- A stream is over exactly once: by its End, by a fault, or because its client gave up. Only then
  does it leave the table. Its handle is free when the server knows, too.
- The I/O thread alone writes here. A reader pops from `deltas`, and finds the end by looking at
  `is_over` before it finds no more deltas.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import repeat

from slipstream.batch import Batch
from slipstream.bells import Bell, LoopBell, ring_loops
from slipstream.errors import SlipstreamError, error_from
from slipstream.outputs import Delta
from slipstream_ipc.columns import check_deltas, u32
from slipstream_ipc.messages import Accepted, Deltas, End, Fault, Rejected, Submit, UnknownStreams

_MAX_GAPS = 3  # at one position: then the server, not the way to it, has lost something


@dataclass(eq=False, slots=True)
class StreamState:
    """One stream, between its reader and the I/O thread."""

    submit: Submit
    wants_whole: bool  # the reader is woken by the end alone
    submitted_at: float = 0.0
    deltas: deque[Delta] = field(default_factory=deque)  # unread; grows while nobody reads
    bell: Bell[StreamState] | LoopBell | None = None  # hangs here while the reader waits
    prompt_ids: bytes | None = None  # u32; None until the stream is accepted
    end: End | None = None
    error: SlipstreamError | None = None
    is_over: bool = False
    handle: int = -1
    num_chars: int = 0  # received
    num_tokens: int = 0
    gap_at: tuple[int, int] = (-1, -1)  # where a part was missing last
    num_gaps: int = 0  # how often in a row there
    was_sent: bool = False  # the server may know of it
    is_abort_wanted: bool = False


class StreamTable:
    """Every stream that is not over, by its handle; and those the server has yet to end."""

    def __init__(self) -> None:
        self._streams: dict[int, StreamState] = {}
        self._abandoned: dict[int, StreamState] = {}
        self._next_handle = 0
        self._woken: list[StreamState] = []

    @property
    def streams(self) -> list[StreamState]:
        """Those that are not over."""
        return list(self._streams.values())

    @property
    def abandoned(self) -> list[StreamState]:
        """Those over on our side alone: the server is to be told until it has heard."""
        return list(self._abandoned.values())

    def add(self, state: StreamState) -> None:
        """Give the stream a handle that no other one has now; a u32."""
        while self._next_handle in self._streams or self._next_handle in self._abandoned:
            self._next_handle = (self._next_handle + 1) % 2**32
        state.handle = self._next_handle
        self._streams[state.handle] = state
        self._next_handle = (self._next_handle + 1) % 2**32

    def accept(self, message: Accepted) -> None:
        """The stream runs."""
        state = self._streams.get(message.handle)
        if state is not None:
            u32(message.prompt_ids, "prompt_ids")
            state.prompt_ids = message.prompt_ids

    def reject(self, message: Rejected) -> None:
        """The stream does not run, or not on; to who asked for its end, that is the end."""
        state = self._streams.get(message.handle)
        if state is not None and state.is_abort_wanted:
            self._finish(state)
        else:
            self._fault(message.handle, message.fault)

    def lose(self, message: UnknownStreams) -> None:
        """The server has none of these."""
        why = "the server does not have this stream any more: submit the request again"
        for handle in message.handles:
            self._fault(handle, Fault("unknown_stream", why))

    def deliver(self, message: Deltas) -> bool:
        """Hand the entries to their streams; False if one of them left a gap.

        Raises: ProtocolError where the columns do not fit each other.
        """
        check_deltas(message)
        handles = u32(message.handles).tolist()
        ends = dict(zip(u32(message.ended).tolist(), message.ends, strict=True))
        batch = Batch(message, ends)
        positions = zip(
            range(len(handles)),
            handles,
            u32(message.chars).tolist(),
            u32(message.tokens).tolist(),
            message.texts,
            repeat(1) if batch.counts is None else batch.counts,
            strict=False,  # repeat has no end
        )
        is_whole = True
        streams, woken = self._streams, self._woken
        for entry, handle, chars, tokens, text, count in positions:
            state = streams.get(handle)
            if state is None:
                continue
            if chars == state.num_chars and tokens == state.num_tokens:
                delta = Delta(text, batch, entry)
                state.num_chars = chars + len(text)
                state.num_tokens = tokens + count
            elif chars > state.num_chars or tokens > state.num_tokens:
                is_whole = False
                self._note_gap(state)
                continue
            else:
                new_text = text[state.num_chars - chars :]
                skip = min(state.num_tokens - tokens, count)
                if not new_text and skip == count and entry not in ends:
                    continue
                delta = Delta(new_text, batch, entry, skip)
                state.num_chars += len(new_text)
                state.num_tokens += count - skip
            if ends and entry in ends:
                self._end(state, delta, ends[entry])
                continue
            state.deltas.append(delta)
            if state.bell is not None and not state.wants_whole:
                woken.append(state)
        return is_whole

    def give_up(self, state: StreamState, error: SlipstreamError | None) -> None:
        """End the stream on our side: by an error, or because nobody reads it. Idempotent."""
        if state.is_over:
            return
        state.error = error
        self._finish(state)
        if state.was_sent:
            self._abandoned[state.handle] = state

    def give_up_all(self, error: Callable[[], SlipstreamError]) -> None:
        """End every stream on our side, each by an error of its own."""
        for state in self.streams:
            self.give_up(state, error())

    def forget(self, state: StreamState) -> None:
        """The server has heard that an abandoned stream is over."""
        self._abandoned.pop(state.handle, None)

    def wake(self) -> None:
        """Ring for every stream with news; once after each batch."""
        if not self._woken:
            return
        woken, self._woken = self._woken, []
        loop_bells = []
        for state in woken:
            bell = state.bell
            if isinstance(bell, LoopBell):
                loop_bells.append(bell)
            elif bell is not None:
                bell.ring(state)
        if loop_bells:
            ring_loops(loop_bells)

    def _fault(self, handle: int, fault: Fault) -> None:
        state = self._streams.get(handle)
        if state is not None:
            state.error = error_from(fault)
            self._finish(state)

    def _note_gap(self, state: StreamState) -> None:
        position = (state.num_chars, state.num_tokens)
        state.num_gaps = state.num_gaps + 1 if state.gap_at == position else 1
        state.gap_at = position
        if state.num_gaps >= _MAX_GAPS:
            why = "the server lost a part of this stream: submit the request again"
            self.give_up(state, error_from(Fault("diverged", why)))

    def _end(self, state: StreamState, last: Delta, end: End) -> None:
        if end.reason == "error":
            why = end.fault or Fault("engine", "the engine failed this stream and did not say why")
            state.error = error_from(why)
        if state.error is None or last.text or last.num_tokens:
            state.deltas.append(last)
        state.end = end
        self._finish(state)

    def _finish(self, state: StreamState) -> None:
        self._streams.pop(state.handle, None)  # one that came too late was never added
        state.is_over = True  # last of all: the reader looks here first
        self._woken.append(state)
