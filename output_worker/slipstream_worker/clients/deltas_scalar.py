"""The scalar path of `deltas`, for a few streams: the same entries, built with Python numbers.

- What is due, sent and committed is exactly what `deltas` would produce for the same rows.
- Numpy's cost hardly depends on the number of rows, this path's is proportional to it: up to FEW
  rows this path is cheaper (docs/decisions/023).
- Log-probabilities, and more than fits one message, are left to `deltas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from slipstream_ipc.columns import pack_short
from slipstream_ipc.messages import Deltas
from slipstream_worker.clients.deltas import ENTRY_BYTES, TEXT_BYTES, SlowEntries
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

FEW = 16  # rows

Span = tuple[int, int, int]  # a row, its first token, the number of tokens


def due_few(
    columns: StreamColumns, worker_rows: Sequence[int], *, urgent: bool
) -> tuple[list[Span], list[int]]:
    """Scalar version of `deltas.due_fast` for the dirty ones of these rows.

    Returns the spans of the fast rows that are due, and the slow rows.
    """
    cells = columns.cells
    is_dirty, is_fast = cells.is_dirty, cells.is_fast
    sent_tokens, intervals = cells.sent_tokens, cells.intervals
    due, slow = [], []
    for worker_row, length in zip(
        worker_rows, columns.tokens.lengths_few(worker_rows), strict=True
    ):
        if not is_dirty[worker_row]:
            continue
        if not is_fast[worker_row]:
            slow.append(worker_row)
            continue
        sent = sent_tokens[worker_row]
        new = length - sent
        if (not urgent and new >= intervals[worker_row]) or (new > 0 and not sent):
            due.append((worker_row, sent, new))
    return due, slow


@dataclass(slots=True)
class BuiltScalarDeltas:
    """A message of a few rows, and the cursor moves that follow once it has been sent."""

    message: Deltas
    slow: SlowEntries
    fast: Sequence[Span]
    fast_texts: Sequence[str]
    is_all: bool  # whether everything due is in the message

    def commit(self, columns: StreamColumns) -> None:
        """Move the cursors; call it once the message has been sent."""
        cells = columns.cells
        for (worker_row, start, num), text in zip(self.fast, self.fast_texts, strict=True):
            cells.sent_tokens[worker_row] = start + num
            cells.sent_chars[worker_row] += len(text)
            cells.is_dirty[worker_row] = False
        self.slow.commit(columns)


def build_few(
    columns: StreamColumns, fast: Sequence[Span], slow: Sequence[WorkerStream]
) -> BuiltScalarDeltas | None:
    """A message of what is new in these due rows; None if it has to be built by `deltas.build`."""
    entries = SlowEntries.of(columns, slow)
    spans = [*entries.spans, *fast]
    cells, handles, starts, counts = columns.cells, [], [], []
    for worker_row, start, num in spans:
        handles.append(cells.handles[worker_row])
        starts.append(start)
        counts.append(num)
    num_fast = sum(counts[len(entries.spans) :])
    token_bytes = 4 + 8 * columns.max_width + TEXT_BYTES
    if ENTRY_BYTES * len(fast) + token_bytes * num_fast > entries.left:
        return None
    if columns.has_logprobs and any(cells.widths[worker_row] for worker_row, _, _ in spans):
        return None
    ids = columns.tokens.read_few(spans)
    chars, texts = entries.chars.copy(), []
    at = len(ids) - num_fast
    for worker_row, _, num in fast:
        texts.append(columns.text(worker_row, ids[at : at + num]))
        chars.append(cells.sent_chars[worker_row])
        at += num
    message = Deltas(
        pack_short(handles),
        pack_short(chars),
        pack_short(starts),
        entries.texts + texts if slow else texts,
        pack_short(ids),
        b"" if counts.count(1) == len(counts) else pack_short(counts),
        pack_short(entries.ended_at) if slow else b"",
        tuple(entries.ends) if slow else (),
    )
    if columns.has_events:
        message = _with_events(message, columns, entries, fast, texts)
    return BuiltScalarDeltas(message, entries, fast, texts, entries.is_all)


def _with_events(
    message: Deltas,
    columns: StreamColumns,
    slow: SlowEntries,
    fast: Sequence[Span],
    fast_texts: Sequence[str],
) -> Deltas:
    """The message with its columns of events, if it has any."""
    of_row = columns.cells.kinds
    of_fast = [
        of_row[worker_row] if text else 0
        for (worker_row, _, _), text in zip(fast, fast_texts, strict=True)
    ]
    kinds = [*slow.kinds, *of_fast]
    if not slow.events and not any(kinds):
        return message
    return replace(
        message,
        kinds=pack_short(kinds),
        event_entries=pack_short(slow.event_entries),
        events=tuple(slow.events),
    )
