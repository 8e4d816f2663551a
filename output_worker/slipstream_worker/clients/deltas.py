"""Builds the `Deltas` message with what is new in one client's streams.

Decides when a slow row is due (its interval) and fills the message's columns.

- The first tokens and the end are due at once; in between, `interval` new tokens are. A token whose
  text is partly released counts as one.
- A message is filled up to a byte budget, slow rows first; what does not fit stays due.
- An entry of a stream that is read as events has the events of its units, joined.
- Building moves no cursors; that follows once the message has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import Struct

from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.history.text_log import TextCursor
from slipstream_ipc.history.wide_logprobs import MAX_NARROW
from slipstream_ipc.messages import AnswerEvent, Deltas, End, LogprobColumns
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import RowSet
from slipstream_worker.output.answer_output import AnswerOutput
from slipstream_worker.output.stream_output import StreamOutput
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

ENTRY_BYTES = 32
TEXT_BYTES = 8  # per token, a generous estimate
_WIDE_BYTES = MESSAGE_BUDGET_BYTES // 2  # from here on no more wide rows are added to a message


def is_due(stream: WorkerStream) -> bool:
    """True if a slow row is due."""
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
    """True if a slow row's first token or end is due."""
    output, reader = stream.output, stream.reader
    if output is None or reader is None or reader.is_waiting:
        return False
    return output.end is not None or (reader.cursor.num_tokens == 0 and output.log.num_tokens > 0)


class FastEntries(Struct, frozen=True, gc=False):
    """The entries of fast rows, as columns (see `RowLoops`)."""

    rows: bytes
    starts: bytes
    counts: bytes
    num_chars: bytes


class BuiltDeltas(Struct, frozen=True, gc=False):
    """A message, and the cursor moves that follow once it has been sent (`latency`)."""

    message: Deltas
    slow: SlowEntries
    fast: FastEntries
    is_all: bool  # whether everything due is in the message


class SlowEntries:
    """The entries of slow rows, and the bytes left of the budget."""

    __slots__ = (
        "chars",
        "ended",
        "ended_at",
        "ends",
        "event_entries",
        "events",
        "handles",
        "has_several",
        "has_wide",
        "is_all",
        "kinds",
        "left",
        "new_cursors",
        "spans",
        "texts",
        "token_ids",
    )

    def __init__(self) -> None:
        self.handles: list[int] = []
        self.chars: list[int] = []
        self.texts: list[str] = []
        self.ended_at: list[int] = []
        self.ended: list[WorkerStream] = []  # streams whose end is in the message
        self.ends: list[End] = []
        self.new_cursors: list[
            tuple[WorkerStream, TextCursor]
        ] = []  # each reader's cursor afterwards
        self.spans: list[tuple[int, int, int]] = []  # row, first token, number of tokens
        self.token_ids: list[int] = []
        self.has_several = False  # whether an entry has not just one token
        self.kinds: list[int] = []  # see `Deltas`; empty while no stream is read as events
        self.event_entries: list[int] = []
        self.events: list[tuple[AnswerEvent, ...]] = []
        self.is_all = True  # whether everything due is in the message
        self.has_wide = False
        self.left = MESSAGE_BUDGET_BYTES

    @classmethod
    def of(cls, columns: StreamColumns, slow: Sequence[WorkerStream]) -> SlowEntries:
        """Entries for as many of these streams as fit."""
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
        width = columns.widths.item(worker_row)
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
        self.handles.append(reader.handle)
        self.chars.append(start.num_chars)
        self.texts.append(text)
        num_tokens = stop.num_tokens - start.num_tokens
        self.spans.append((worker_row, start.num_tokens, num_tokens))
        self.token_ids += columns.ids_between(worker_row, start.num_tokens, stop.num_tokens)
        self.has_several |= num_tokens != 1
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
        is_dirty = columns.is_dirty
        for stream in self.ended:
            is_dirty[stream.worker_row] = False
        for stream, cursor in self.new_cursors:
            assert stream.output is not None
            if stream.output.end is None:
                is_dirty[stream.worker_row] = cursor.unit < stream.output.log.num_units
                columns.make_fast(stream, cursor)


_NO_SLOW = SlowEntries()  # shared, read-only


def build(
    columns: StreamColumns, rows: bytes, counts: bytes, slow: Sequence[WorkerStream]
) -> BuiltDeltas:
    """A message of what is new in these due rows; rows that do not fit are left out.

    rows, counts: of the fast ones, as `RowLoops.due` returns them.
    """
    entries = SlowEntries.of(columns, slow) if slow else _NO_SLOW
    has_all_fast = True
    if rows:
        least = _WIDE_BYTES if entries.has_wide else 0
        fits = _fitting(columns, rows, counts, max(entries.left, least))
        has_all_fast = fits == (rows, counts)
        rows, counts = fits
    last = None  # log-probabilities, if they are as they came
    row_set: RowSet | None = None
    if columns.has_logprobs:
        row_set = RowSet(np.frombuffer(rows, np.int64))
        if rows and not counts and not entries.spans:
            row_set = columns.in_order(rows)
            rows = row_set.array.tobytes()
            last = columns.logprobs.last(row_set, columns.lengths.item(row_set.array.item(0)))
    token_ids = _ids_of(columns, rows, counts) if counts else None
    found = columns.loops.entries(rows, counts, token_ids)
    handles, chars, starts, texts, ids, num_chars, kinds = found
    fast = FastEntries(rows, starts, counts, num_chars)
    ended, event_entries = b"", b""
    if entries.spans:
        ended, event_entries = pack_u32(entries.ended_at), pack_u32(entries.event_entries)
        num_fast = len(rows) // 8
        if counts or entries.has_several:
            counts = pack_u32([num for _, _, num in entries.spans]) + (counts or _ONE * num_fast)
        if kinds or any(entries.kinds):
            kinds = _padded(entries.kinds, len(entries.texts)) + (kinds or bytes(4 * num_fast))
        handles = pack_u32(entries.handles) + handles
        chars = pack_u32(entries.chars) + chars
        starts = pack_u32([start for _, start, _ in entries.spans]) + starts
        ids = pack_u32(entries.token_ids) + ids
        texts = entries.texts + texts
    logprobs = last
    if row_set is not None and last is None:
        logprobs = _logprobs_of(columns, entries, row_set, starts, counts)
    message = Deltas(
        handles,
        chars,
        starts,
        texts,
        ids,
        counts,
        ended,
        tuple(entries.ends),
        logprobs,
        kinds,
        event_entries,
        tuple(entries.events),
    )
    return BuiltDeltas(message, entries, fast, entries.is_all and has_all_fast)


_ONE = pack_u32([1])


def _padded(kinds: list[int], num: int) -> bytes:
    """The kinds of slow entries; no stream may be read as events yet."""
    return pack_u32(kinds or [0] * num)


def _ids_of(columns: StreamColumns, rows: bytes, counts: bytes) -> bytes:
    """The ids of the next `counts[i]` tokens of each fast row."""
    worker_rows = np.frombuffer(rows, np.int64)
    starts = columns.sent_tokens.take(worker_rows)
    return pack_u32(columns.tokens.gather(worker_rows, starts, u32(counts).astype(np.int64)))


def _logprobs_of(
    columns: StreamColumns, slow: SlowEntries, fast: RowSet, starts: bytes, counts: bytes
) -> LogprobColumns | None:
    """The log-probabilities of a message's entries."""
    rows = fast
    if slow.spans:
        of_slow = np.array([worker_row for worker_row, _, _ in slow.spans], np.int64)
        rows = RowSet(np.concatenate([of_slow, fast.array]))
    several = u32(counts).astype(np.int64) if counts else None
    return columns.logprobs.columns(rows, u32(starts).astype(np.int64), several)


def bytes_of_token(columns: StreamColumns) -> int:
    """The bytes that a token of a fast row counts in a message's budget."""
    return 4 + 8 * columns.max_width + TEXT_BYTES


def _fitting(
    columns: StreamColumns, rows: bytes, counts: bytes, budget: int
) -> tuple[bytes, bytes]:
    """Return as many of the rows as fit into `budget` bytes, and the number of tokens of each:
    everything new, or equal shares.
    """
    num = len(rows) // 8
    token_bytes = bytes_of_token(columns)
    num_tokens = int(u32(counts).sum()) if counts else num
    if ENTRY_BYTES * num + token_bytes * num_tokens <= budget:
        return rows, counts
    if budget <= 0:
        return b"", b""
    num = min(num, max(1, budget // (ENTRY_BYTES + token_bytes)))
    share = max(1, (budget // num - ENTRY_BYTES) // token_bytes)
    if not counts:
        return rows[: 8 * num], b""
    shares = np.minimum(u32(counts)[:num], share)
    return rows[: 8 * num], b"" if (shares == 1).all() else pack_u32(shares)
