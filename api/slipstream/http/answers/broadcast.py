"""Writes the deltas of one message to the connections of all its streams in one pass.

- Messages are written once all messages of a turn of the loop have been read. A message that came
  alone takes one pass: its texts are encoded in one call, and a stream costs a format and a write.
- Where the C extension `text_chunks` is available, it writes the entries that are nothing but text,
  or text and log-probabilities, as Python does here.
- Several messages in one turn mean that the front is late: then each stream's deltas are merged
  into one chunk. The same holds for a stream under backpressure or at its end. Both go through the
  stream's queue and its own wakeup (`stream_queue`, `unary`, `block_answers`).
- Entries that are read as events go the same way, with the constant parts of their kind. Those that
  list their events are written by their stream's `chunk_writer`. The others of a message with such
  entries cost what they cost without.
- An exception while one stream is written affects that stream only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress, repeat
from typing import Protocol

from msgspec import Struct

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.unread_deltas import MOST_UNREAD, MOST_UNREAD_AT_END, merge_unread
from slipstream.client.streams.wakeup import Wakeup
from slipstream.compiled import write_texts
from slipstream.delta_batch import DeltaBatch
from slipstream.http.answers.event_ids import EventCursor
from slipstream.http.exchange import Exchange
from slipstream.http.logprobs.logprob_bodies import TextPosition
from slipstream.http.logprobs.logprob_encoding import (
    Tails,
    chat_tails,
    completion_tails,
)
from slipstream.http.logprobs.vocabulary import TokenTexts
from slipstream.http.response_encoding import json_parts
from slipstream.outputs import Delta


class ChunkFrame(Struct, frozen=True, gc=False):
    """The constant parts of the chunks that contain a text of one kind.

    between: behind the text, where log-probabilities follow it. num_framed: bytes of `before` and
    `after` that count towards an HTTP chunk's size, so without the line break that ends `after`.
    repeat: where the chunk contains its text twice, what stands between. after_number: where it
    contains its number, what stands between that and the text.
    """

    before: bytes
    after: bytes
    num_framed: int
    between: bytes = b""
    has_logprobs: bool = False
    repeat: bytes = b""
    after_number: bytes = b""


class ChunkWriter(Protocol):
    """Writes chunks that contain more than text."""

    def write_delta(self, delta: Delta, part: bytes) -> None:
        """Write a delta while none is queued. part: its text as JSON, without the quotes."""


class ChunkNumbers(Protocol):
    """Numbers chunks."""

    def grow(self, text: str) -> int:
        """The number of the chunk that contains `text`, which is not empty."""


class BroadcastStream:
    """A stream whose deltas are written as text alone, by `chunk_writer`, or by its wakeup.

    is_text_only: each chunk but the last is `before`, the text and `after`, and an empty text gives
    no chunk. num_framed, repeat: as in `ChunkFrame`. frames: instead of those, for text that is
    read as events: by its kind, those that `chunk_writer` has made. cursor: where chunks begin with
    an `id:` line, what it says; else None. texts: those of tokens, where chunks are a text and
    log-probabilities; else None. position: where the next text begins, of a completion; else None.
    between, after_number: as in `ChunkFrame`. numbers: where text chunks contain their number,
    behind `before`; else None. on_exception: called while an exception is handled.
    """

    __slots__ = (
        "after",
        "after_number",
        "before",
        "between",
        "chunk_writer",
        "cursor",
        "deltas",
        "exchange",
        "frames",
        "is_text_only",
        "num_framed",
        "numbers",
        "on_exception",
        "position",
        "repeat",
        "state",
        "texts",
        "wakeup",
    )

    def __init__(
        self,
        state: StreamState,
        wakeup: Wakeup[StreamState],
        exchange: Exchange,
        on_exception: Callable[[], None],
    ) -> None:
        self.state = state
        self.wakeup = wakeup
        self.exchange = exchange
        self.on_exception = on_exception
        self.deltas = state.deltas
        self.chunk_writer: ChunkWriter | None = None
        self.is_text_only = False
        self.before = self.between = self.after = self.repeat = self.after_number = b""
        self.num_framed = 0
        self.numbers: ChunkNumbers | None = None
        self.cursor: EventCursor | None = None
        self.position: TextPosition | None = None
        self.texts: TokenTexts | None = None
        self.frames: dict[int, ChunkFrame] = {}

    def queue(self, delta: Delta) -> None:
        """Queue a delta; merge the queue if it has grown too long."""
        self.state.push(delta)
        if len(self.deltas) > (MOST_UNREAD_AT_END if self.state.is_over else MOST_UNREAD):
            merge_unread(self.deltas)

    def ring(self) -> None:
        """Wake the stream's answer for queued deltas; for the end, the client's table does it."""
        state = self.state
        if not (state.wants_whole or state.is_over):
            self.wakeup.ring(state)


class Broadcast:
    """A group of streams in the client's table (`GroupMember`), and the wakeup of each of them."""

    def __init__(self) -> None:
        self.group_id = 0
        self.states: dict[int, StreamState] = {}
        self._next = 0
        # by index, until the stream's end has been rung
        self._streams: dict[int, BroadcastStream] = {}
        self._indices: Sequence[int] = ()  # of the last message
        self._found: list[BroadcastStream] = []  # the streams of `_indices`
        # messages that are not written yet
        self._pending: list[tuple[list[BroadcastStream], DeltaBatch]] = []
        self._delayed: dict[BroadcastStream, None] = {}  # with queued deltas of such messages

    def join(
        self,
        state: StreamState,
        wakeup: Wakeup[StreamState],
        exchange: Exchange,
        on_exception: Callable[[], None],
    ) -> BroadcastStream:
        """Add a stream that is not submitted yet. wakeup: rung for queued deltas and the end."""
        state.group, state.index, state.wakeup = self, self._next, self
        self._next += 1
        self.states[state.index] = state
        self._streams[state.index] = stream = BroadcastStream(state, wakeup, exchange, on_exception)
        return stream

    def detach(self, state: StreamState) -> None:
        """Drop what the stream says from now on, as nothing reads it any more."""
        state.drop_deltas()
        stream = self._streams.get(state.index)
        if stream is not None:
            stream.deltas = state.deltas

    # ---- called by the table -----------------------------------------------------------------

    def add_batch(self, indices: list[int], batch: DeltaBatch) -> None:
        """See `GroupMember`."""
        if indices is not self._indices:
            self._indices, self._found = indices, [self._streams[index] for index in indices]
        self._pending.append((self._found, batch))

    def divide(self) -> None:
        """See `GroupMember`."""
        pending, self._pending = self._pending, []
        for streams, batch in pending:
            texts = batch.message.texts
            deltas = map(Delta, texts, repeat(batch), range(len(texts)))
            for stream, delta in zip(streams, deltas, strict=True):
                self._delayed[stream] = None
                try:
                    stream.queue(delta)
                except Exception:
                    stream.on_exception()

    def release(self, state: StreamState) -> None:
        """See `GroupMember`."""
        self.states.pop(state.index, None)

    def ring(self, state: StreamState) -> None:
        """There are deltas of the stream, perhaps of others too, or it has ended."""
        if self._pending or self._delayed:
            self._write()
        stream = self._streams.get(state.index)
        if stream is not None:
            if state.is_over:
                del self._streams[state.index]
                self._indices, self._found = (), []  # they would keep its answer until the next
            stream.wakeup.ring(state)

    # ---- within ------------------------------------------------------------------------------

    def _write(self) -> None:
        if len(self._pending) == 1 and not self._delayed:
            self._write_batch(*self._pending.pop())
            return
        self.divide()
        delayed, self._delayed = self._delayed, {}
        for stream in delayed:
            stream.ring()

    def _write_batch(self, streams: list[BroadcastStream], batch: DeltaBatch) -> None:
        message = batch.message
        left = bytearray(len(message.texts))  # 1: to be written by `_write_entries`
        for entry in (*batch.ends, *batch.own_events):
            left[entry] = 1
        shown = _tails(completion_tails, streams, batch, has_position=True)
        chats = _tails(chat_tails, streams, batch, has_position=False)
        columns = message.kinds, message.token_ids, message.counts
        tails = shown.ends, shown.lengths, chats.ends
        texts = message.texts, shown.text, chats.text
        write_texts(streams, *texts, *columns, *tails, left)
        if 1 in left:
            self._write_entries(streams, batch, list(compress(range(len(left)), left)))

    def _write_entries(
        self, streams: Sequence[BroadcastStream], batch: DeltaBatch, entries: Sequence[int]
    ) -> None:
        texts, ends = batch.message.texts, batch.ends
        kinds = batch.read_entries if batch.has_events else {}
        parts = json_parts([texts[entry] for entry in entries])
        for entry, part in zip(entries, parts, strict=True):
            stream = streams[entry]
            exchange = stream.exchange
            frame: BroadcastStream | ChunkFrame | None = None
            if stream.is_text_only and stream.cursor is None:
                kind = kinds.get(entry)  # 0: the entry lists its events
                frame = stream if kind is None else stream.frames.get(kind) if kind else None
            try:
                if not exchange.is_ready or stream.deltas or entry in ends:
                    stream.queue(Delta(texts[entry], batch, entry))
                    stream.ring()
                elif frame is not None:
                    if part:
                        if frame.repeat:
                            part = b"%b%b%b" % (part, frame.repeat, part)
                        if stream.numbers is not None:
                            number = stream.numbers.grow(texts[entry])
                            part = b"%d%b%b" % (number, frame.after_number, part)
                        size = frame.num_framed + len(part)
                        exchange.send(b"%x\r\n%b%b%b" % (size, frame.before, part, frame.after))
                        exchange.counters.num_chunks += 1
                elif stream.chunk_writer is not None:
                    stream.chunk_writer.write_delta(Delta(texts[entry], batch, entry), part)
                else:
                    stream.queue(Delta(texts[entry], batch, entry))
                    stream.ring()
            except Exception:
                stream.on_exception()


def _tails(
    make: Callable[[DeltaBatch, TokenTexts], Tails],
    streams: Sequence[BroadcastStream],
    batch: DeltaBatch,
    *,
    has_position: bool,
) -> Tails:
    """The log-probabilities of a message, if any of its streams shows them so: as completions do,
    whose texts have positions, or as chats.
    """
    if batch.message.logprobs is None:
        return Tails()
    shown = (each.texts for each in streams if (each.position is not None) == has_position)
    texts = next((each for each in shown if each is not None), None)
    try:
        return Tails() if texts is None else make(batch, texts)
    except Exception:  # each of these streams meets it by itself
        return Tails()
