"""From a message of deltas to the connections of its streams, in one pass.

Owns: which streams are told together, the messages that have not been told yet, and the chunks that
are nothing but a text between bytes known beforehand. Does not know: what an answer looks like, how
it begins and ends (`answer`), sockets.

Rules:
- A message is told when the turn's messages have been read. One that came alone is told in one
  pass: all its texts are encoded at once, and what a stream costs is a format and a write.
- Of several messages in a turn, the front being late, each stream's deltas are put together, and
  leave in one chunk. So are those of a stream that waits for anything, its reader's room say, or
  that ends: its wakeup (`answer`) sees to them.
- A fault while one stream is told is that stream's own.
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
    """Makes the chunks of a stream that have more to them than a text."""

    def tell(self, delta: Delta, part: bytes) -> None:
        """Say a delta behind which none waits; part: its text, as JSON without the quotes."""


class BroadcastLine:
    """One stream's way out. Deltas of one that has no teller and is not bare wait for its wakeup.

    is_bare: its chunks, but for the last, are `before`, the text and `after`, and there is none
    where there is no text. num_framed: bytes of both as a chunk of HTTP counts them, less the line
    break that ends `after`. on_fault: is called while an exception is handled.
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
        """It waits with what waits already."""
        self.deltas.append(delta)
        if len(self.deltas) > (MOST_UNREAD_AT_END if self.state.is_over else MOST_UNREAD):
            merge_unread(self.deltas)

    def ring(self) -> None:
        """For what waits; the end is rung for by the table."""
        state = self.state
        if not (state.wants_whole or state.is_over):
            self.wakeup.ring(state)


class FanOut:
    """Streams of one client's table (`GroupMember`), and the wakeup of each of them."""

    def __init__(self) -> None:
        self.group_id = 0
        self.num_open = 0
        self.states: dict[int, StreamState] = {}
        self._next = 0
        self._lines: dict[int, BroadcastLine] = {}  # of those whose end has not been rung for
        self._indices: Sequence[int] = ()  # of the last message
        self._found: list[BroadcastLine] = []  # their lines
        self._untold: list[tuple[list[BroadcastLine], DeltaBatch]] = []
        self._late: dict[BroadcastLine, None] = {}  # whose parts of them lie in their queues now

    def join(
        self,
        state: StreamState,
        wakeup: Wakeup[StreamState],
        exchange: Exchange,
        on_fault: Callable[[], None],
    ) -> BroadcastLine:
        """A stream that has not been asked for yet. `wakeup` is rung for what waits, and the
        end."""
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
        """There is news of the stream, and of others perhaps."""
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
