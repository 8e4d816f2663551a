"""Builds the `Deltas` message with what is new in one client's streams.

Decides when a row is due (its interval) and fills the message's columns.

- The first tokens and the end are due at once; in between, `interval` new tokens are. A token whose
  text is partly released counts as one.
- A message is filled up to a byte budget, slow rows first; what does not fit stays due.
- An entry of a stream that is read as events has the events of its units, joined.
- Building moves no cursors. `BuiltDeltas.commit` does, once the message has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.messages import AnswerEvent, Deltas, End
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

Int64s = npt.NDArray[np.int64]

ENTRY_BYTES = 32
TEXT_BYTES = 8  # per token, a generous estimate
_WIDE_BYTES = MESSAGE_BUDGET_BYTES // 2  # from here on no more wide rows are added to a message


def due_fast(columns: StreamColumns, worker_row_set: RowSet, *, urgent: bool) -> RowSet:
    """Those of these fast rows that are due; with `urgent`, only those with first tokens."""
    worker_rows = worker_row_set.array
    sent = columns.sent_tokens[worker_rows]
    new = columns.tokens.lengths(worker_row_set) - sent
    is_due = (sent == 0) & (new > 0)
    if not urgent:
        is_due |= new >= columns.intervals[worker_rows]
    return (
        worker_row_set
        if np.count_nonzero(is_due) == len(worker_rows)
        else RowSet(worker_rows[is_due])
    )


def is_due(stream: WorkerStream) -> bool:
    """Whether a slow row is due."""
    output, reader = stream.output, stream.reader
    if output is None or reader is None or reader.is_waiting:
        return False
    if output.end is not None:
        return True
    log = output.log
    if reader.cursor.unit == log.num_units:
        return False
    done = reader.cursor.num_tokens
    return not done or log.num_tokens + log.ends_within_token - done >= stream.interval


def is_urgent(stream: WorkerStream) -> bool:
    """Whether a slow row's first token or end is due."""
    output, reader = stream.output, stream.reader
    if output is None or reader is None or reader.is_waiting:
        return False
    return output.end is not None or (reader.cursor.num_tokens == 0 and output.log.num_tokens > 0)


@dataclass(slots=True)
class BuiltDeltas:
    """A message, and the cursor moves that follow once it has been sent."""

    message: Deltas
    slow: SlowEntries
    fast: RowSet
    fast_starts: Int64s
    fast_tokens: Int64s
    fast_chars: Int64s
    is_all: bool  # whether everything due is in the message

    def commit(self, columns: StreamColumns) -> None:
        """Move the cursors; call it once the message has been sent."""
        if len(self.fast):
            fast, ends = self.fast.array, self.fast_starts + self.fast_tokens
            columns.sent_tokens[fast] = ends
            columns.sent_chars[fast] += self.fast_chars
            columns.is_dirty[fast] = (
                False if self.is_all else columns.tokens.lengths(self.fast) > ends
            )
        self.slow.commit(columns)


class SlowEntries:
    """The entries of slow rows, and the bytes left of the budget."""

    __slots__ = (
        "chars",
        "ended",
        "ended_at",
        "ends",
        "event_entries",
        "events",
        "has_wide",
        "is_all",
        "kinds",
        "left",
        "new_cursors",
        "spans",
        "texts",
    )

    def __init__(self) -> None:
        self.chars: list[int] = []
        self.texts: list[str] = []
        self.ended_at: list[int] = []
        self.ended: list[WorkerStream] = []  # streams whose end is in the message
        self.ends: list[End] = []
        self.new_cursors: list[
            tuple[WorkerStream, TextCursor]
        ] = []  # each reader's cursor afterwards
        self.spans: list[tuple[int, int, int]] = []  # row, first token, number of tokens
        self.kinds: list[int] = []  # see `Deltas`; empty while no stream is read as events
        self.event_entries: list[int] = []
        self.events: list[tuple[AnswerEvent, ...]] = []
        self.is_all = True  # whether everything due is in the message
        self.has_wide = False
        self.left = MESSAGE_BUDGET_BYTES

    @classmethod
    def of(cls, columns: StreamColumns, slow: Sequence[WorkerStream]) -> SlowEntries:
        """Entries for as many of these streams as fit."""
        if not slow:
            return _NO_SLOW
        entries, has_events = cls(), columns.has_events
        for stream in slow:
            if entries.left <= 0:
                entries.is_all = False
                break
            entries._add(columns, stream, has_events=has_events)
        return entries

    def _add(self, columns: StreamColumns, stream: WorkerStream, *, has_events: bool) -> None:
        output, reader, worker_row = stream.output, stream.reader, stream.worker_row
        assert output is not None
        assert reader is not None
        width = columns.cells.widths[worker_row]
        if width > MAX_NARROW:
            if MESSAGE_BUDGET_BYTES - self.left >= _WIDE_BYTES:
                self.is_all = False
                return
            self.has_wide = True
        start = reader.cursor
        token_bytes = 4 + 8 * width
        stop = output.log.advance(start, self.left // 4, self.left // token_bytes)
        text = output.log.text_between(start, stop)
        is_whole = stop.unit == output.log.num_units
        self.is_all &= is_whole
        if output.end is not None and is_whole:
            self.ended_at.append(len(self.new_cursors))
            self.ended.append(stream)
            self.ends.append(output.end)
        num_chars = len(text)
        if has_events:
            num_chars = self._add_events(output, start, stop, num_chars)
        self.chars.append(start.num_chars)
        self.texts.append(text)
        num_tokens = stop.num_tokens - start.num_tokens
        self.spans.append((worker_row, start.num_tokens, num_tokens))
        self.new_cursors.append((stream, stop))
        self.left -= ENTRY_BYTES + num_chars + token_bytes * num_tokens

    def _add_events(
        self, output: StreamOutput, start: TextCursor, stop: TextCursor, num_chars: int
    ) -> int:
        """Add the events of the next entry; returns the characters of its text and events."""
        if not isinstance(output, AnswerOutput):
            self.kinds.append(0)
            return num_chars
        events = output.event_log.events_between(start, stop)
        if isinstance(events, int):
            self.kinds.append(events)
            return num_chars
        self.kinds.append(0)
        self.event_entries.append(len(self.new_cursors))
        self.events.append(events)
        return output.event_log.num_chars_between(start, stop)

    def commit(self, columns: StreamColumns) -> None:
        """Move the cursors; call it once the message has been sent."""
        if not self.new_cursors:
            return
        for stream, cursor in self.new_cursors:
            assert stream.reader is not None
            stream.reader.cursor = cursor
        is_dirty = columns.cells.is_dirty
        for stream in self.ended:
            is_dirty[stream.worker_row] = False
        for stream, cursor in self.new_cursors:
            assert stream.output is not None
            if stream.output.end is None:
                is_dirty[stream.worker_row] = cursor.unit < stream.output.log.num_units
                columns.make_fast(stream, cursor)


_NO_SLOW = SlowEntries()  # shared, read-only


def build(columns: StreamColumns, fast: RowSet, slow: Sequence[WorkerStream]) -> BuiltDeltas:
    """A message of what is new in these due rows; rows that do not fit are left out."""
    entries = SlowEntries.of(columns, slow)
    least = _WIDE_BYTES if entries.has_wide else 0
    fast, fast_tokens, has_all_fast = _fitting(columns, fast, max(entries.left, least))
    worker_rows, starts, counts = fast, columns.sent_tokens.take(fast.array), fast_tokens
    fast_chars, chars_before = fast_tokens, columns.sent_chars.take(fast.array)
    texts, spans = entries.texts, entries.spans
    if spans:
        slow_worker_rows, slow_starts, slow_counts = np.array(spans, np.int64).T
        worker_rows = RowSet(np.concatenate([slow_worker_rows, fast.array]))
        starts = np.concatenate([slow_starts, starts])
        counts = np.concatenate([slow_counts, counts])
        chars_before = np.concatenate([np.array(entries.chars, np.int64), chars_before])
    several = None if (counts == 1).all() else counts
    token_ids = columns.tokens.gather(worker_rows, starts, several)
    if len(fast):
        num_slow = sum(count for _, _, count in spans)
        fast_texts, fast_chars = columns.texts(fast.array, fast_tokens, token_ids[num_slow:])
        texts = texts + fast_texts if texts else fast_texts
    message = Deltas(
        pack_u32(columns.handles.take(worker_rows.array)),
        pack_u32(chars_before),
        pack_u32(starts),
        texts,
        pack_u32(token_ids),
        b"" if several is None else pack_u32(several),
        pack_u32(entries.ended_at) if entries.ended_at else b"",
        tuple(entries.ends),
        columns.logprobs.columns(worker_rows, starts, several) if columns.has_logprobs else None,
    )
    if columns.has_events:
        message = _with_events(message, columns, entries, fast, fast_chars)
    is_all = entries.is_all and has_all_fast
    return BuiltDeltas(
        message, entries, fast, starts[len(spans) :], fast_tokens, fast_chars, is_all
    )


def _with_events(
    message: Deltas, columns: StreamColumns, slow: SlowEntries, fast: RowSet, fast_chars: Int64s
) -> Deltas:
    """The message with its columns of events, if it has any."""
    kinds = np.where(fast_chars > 0, columns.kinds.take(fast.array), 0)
    if not slow.events and not any(slow.kinds) and not kinds.any():
        return message
    return replace(
        message,
        kinds=pack_u32(np.concatenate([np.array(slow.kinds, np.int64), kinds])),
        event_entries=pack_u32(slow.event_entries),
        events=tuple(slow.events),
    )


def _fitting(columns: StreamColumns, fast: RowSet, budget: int) -> tuple[RowSet, Int64s, bool]:
    """As many of the rows as fit `budget` bytes, the number of tokens of each (everything new, or
    equal shares), and whether that is everything.
    """
    counts = columns.tokens.lengths(fast) - columns.sent_tokens.take(fast.array)
    if not len(fast):
        return fast, counts, True
    token_bytes = 4 + 8 * columns.max_width + TEXT_BYTES
    if ENTRY_BYTES * len(fast) + token_bytes * int(counts.sum()) <= budget:
        return fast, counts, True
    if budget <= 0:
        return NO_ROWS, counts[:0], False
    num_worker_rows = max(1, budget // (ENTRY_BYTES + token_bytes))
    fast, counts = RowSet(fast.array[:num_worker_rows]), counts[:num_worker_rows]
    share = max(1, (budget // len(fast) - ENTRY_BYTES) // token_bytes)
    return fast, np.minimum(counts, share), False
