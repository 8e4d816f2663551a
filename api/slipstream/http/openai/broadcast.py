"""Fan-out: writes the deltas of one message to the connections of all its streams in one pass.

- Messages are written once all messages of a turn of the loop have been read. A message that came
  alone takes one pass: its texts are encoded in one call, and a stream costs a format and a write.
- Several messages in one turn mean that the front is late: then each stream's deltas are merged
  into one chunk. The same holds for a stream under backpressure or at its end. Both go through the
  stream's queue and its own wakeup (`streaming`, `unary`).
- An exception while one stream is written affects that stream only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Protocol

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.unread_deltas import MOST_UNREAD, MOST_UNREAD_AT_END, merge_unread
from slipstream.client.streams.wakeup import Wakeup
from slipstream.delta_batch import DeltaBatch
from slipstream.http.exchange import Exchange
from slipstream.http.wire import json_parts
from slipstream.outputs import Delta


class Teller(Protocol):
    """Writes chunks that contain more than text."""

    def tell(self, delta: Delta, part: bytes) -> None:
        """Write a delta while none is queued. part: its text as JSON, without the quotes."""


class BroadcastLine:
    """How the deltas of one stream are written: bare, by a teller, or by its own wakeup.

    is_bare: every chunk but the last is `before`, the text and `after`; empty text gives no chunk.
    num_framed: bytes of `before` and `after` that count towards an HTTP chunk's size, so without
    the line break that ends `after`. on_fault: called while an exception is being handled.
    """

    __slots__ = (
        "after",
        "before",
        "deltas",
        "exchange",
        "is_bare",
        "num_framed",
        "on_fault",
        "state",
        "teller",
        "wakeup",
    )

    def __init__(
        self,
        state: StreamState,
        wakeup: Wakeup[StreamState],
        exchange: Exchange,
        on_fault: Callable[[], None],
    ) -> None:
        self.state = state
        self.wakeup = wakeup
        self.exchange = exchange
        self.on_fault = on_fault
        self.deltas = state.deltas
        self.teller: Teller | None = None
        self.is_bare = False
        self.before = self.after = b""
        self.num_framed = 0

    def hold(self, delta: Delta) -> None:
        """Queue a delta; merge the queue if it has grown too long."""
        self.deltas.append(delta)
        if len(self.deltas) > (MOST_UNREAD_AT_END if self.state.is_over else MOST_UNREAD):
            merge_unread(self.deltas)

    def ring(self) -> None:
        """Wake the stream's answer for queued deltas; for the end, the client's table does it."""
        state = self.state
        if not (state.wants_whole or state.is_over):
            self.wakeup.ring(state)


class FanOut:
    """A group of streams in the client's table (`GroupMember`), and the wakeup of each of them."""

    def __init__(self) -> None:
        self.group_id = 0
        self.num_open = 0
        self.states: dict[int, StreamState] = {}
        self._next = 0
        self._lines: dict[int, BroadcastLine] = {}  # by index, until the stream's end has been rung
        self._indices: Sequence[int] = ()  # of the last message
        self._found: list[BroadcastLine] = []  # the lines of `_indices`
        self._untold: list[tuple[list[BroadcastLine], DeltaBatch]] = []  # messages not written yet
        self._late: dict[BroadcastLine, None] = {}  # with queued deltas of such messages

    def join(
        self,
        state: StreamState,
        wakeup: Wakeup[StreamState],
        exchange: Exchange,
        on_fault: Callable[[], None],
    ) -> BroadcastLine:
        """Add a stream that is not submitted yet. wakeup: rung for queued deltas and the end."""
        state.group, state.index, state.wakeup = self, self._next, self
        self._next += 1
        self.num_open += 1
        self.states[state.index] = state
        self._lines[state.index] = line = BroadcastLine(state, wakeup, exchange, on_fault)
        return line

    # ---- called by the table -----------------------------------------------------------------

    def add_batch(self, indices: Sequence[int], batch: DeltaBatch) -> None:
        """See `GroupMember`."""
        if indices is not self._indices:
            lines = self._lines
            self._indices, self._found = indices, [lines[index] for index in indices]
        self._untold.append((self._found, batch))

    def divide(self) -> None:
        """See `GroupMember`."""
        untold, self._untold = self._untold, []
        for lines, batch in untold:
            texts = batch.message.texts
            deltas = map(Delta, texts, repeat(batch), range(len(texts)))
            for line, delta in zip(lines, deltas, strict=True):
                self._late[line] = None
                try:
                    line.hold(delta)
                except Exception:
                    line.on_fault()

    def release(self, state: StreamState) -> None:
        """See `GroupMember`."""
        self.num_open -= 1
        self.states.pop(state.index, None)

    def ring(self, state: StreamState) -> None:
        """There are deltas of the stream, perhaps of others too, or it has ended."""
        if self._untold or self._late:
            self._tell()
        line = self._lines.get(state.index)
        if line is not None:
            if state.is_over:
                del self._lines[state.index]
            line.wakeup.ring(state)

    # ---- within ------------------------------------------------------------------------------

    def _tell(self) -> None:
        if len(self._untold) == 1 and not self._late:
            self._tell_at_once(*self._untold.pop())
            return
        self.divide()
        late, self._late = self._late, {}
        for line in late:
            line.ring()

    def _tell_at_once(self, lines: Sequence[BroadcastLine], batch: DeltaBatch) -> None:
        texts, ends = batch.message.texts, batch.ends
        parts = json_parts(texts)
        for entry, (line, part) in enumerate(zip(lines, parts, strict=True)):
            exchange = line.exchange
            try:
                if not exchange.is_ready or line.deltas or entry in ends:
                    line.hold(Delta(texts[entry], batch, entry))
                    line.ring()
                elif line.is_bare:
                    if part:
                        size = line.num_framed + len(part)
                        exchange.send(b"%x\r\n%b%b%b" % (size, line.before, part, line.after))
                        exchange.counters.num_chunks += 1
                elif line.teller is not None:
                    line.teller.tell(Delta(texts[entry], batch, entry), part)
                else:
                    line.hold(Delta(texts[entry], batch, entry))
                    line.ring()
            except Exception:
                line.on_fault()
