"""The message that brings one client what is new of a few streams: the scalar way of `deltas`.

Owns: the same entries, one by one in Python numbers. Does not know: what `deltas` does not.

Rules:
- What is due, what is sent and what is committed are just what `deltas` makes of the same lines.
- Numpy costs the same for one line as for a hundred, this the same for each line: up to FEW lines
  it is cheaper (docs/decisions has what was measured).
- Log-probabilities, and more than fits one message, are left to `deltas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_ipc.columns import pack_short
from slipstream_ipc.messages import Deltas
from slipstream_worker.clients.deltas import ENTRY_BYTES, TEXT_BYTES, SlowEntries
from slipstream_worker.streams.stream import Stream
from slipstream_worker.streams.stream_columns import StreamColumns

FEW = 16  # lines

Span = tuple[int, int, int]  # a line, its first token, the number of tokens


def due_few(
    columns: StreamColumns, lines: Sequence[int], *, urgent: bool
) -> tuple[list[Span], list[int]]:
    """As `deltas.due_fast`, of those lines that are dirty: what fast ones have for their readers
    now; and the slow ones."""
    cells = columns.cells
    is_dirty, is_fast = cells.is_dirty, cells.is_fast
    sent_tokens, intervals = cells.sent_tokens, cells.intervals
    due, slow = [], []
    for line, length in zip(lines, columns.tokens.lengths_few(lines), strict=True):
        if not is_dirty[line]:
            continue
        if not is_fast[line]:
            slow.append(line)
            continue
        sent = sent_tokens[line]
        new = length - sent
        if (not urgent and new >= intervals[line]) or (new > 0 and not sent):
            due.append((line, sent, new))
    return due, slow


@dataclass(slots=True)
class FewBuilt:
    """A message of a few lines, and what it will have delivered."""

    message: Deltas
    slow: SlowEntries
    fast: Sequence[Span]
    fast_texts: Sequence[str]
    is_all: bool  # that was due

    def commit(self, columns: StreamColumns) -> None:
        """The message has left: move the cursors."""
        cells = columns.cells
        for (line, start, num), text in zip(self.fast, self.fast_texts, strict=True):
            cells.sent_tokens[line] = start + num
            cells.sent_chars[line] += len(text)
            cells.is_dirty[line] = False
        self.slow.commit(columns)


def build_few(
    columns: StreamColumns, fast: Sequence[Span], slow: Sequence[Stream]
) -> FewBuilt | None:
    """One message of what is new of lines that are due; None where that is for `deltas.build`."""
    entries = SlowEntries.of(columns, slow)
    spans = [*entries.spans, *fast]
    cells, handles, starts, counts = columns.cells, [], [], []
    for line, start, num in spans:
        handles.append(cells.handles[line])
        starts.append(start)
        counts.append(num)
    num_fast = sum(counts[len(entries.spans) :])
    token_bytes = 4 + 8 * columns.max_width + TEXT_BYTES
    if ENTRY_BYTES * len(fast) + token_bytes * num_fast > entries.left:
        return None
    if columns.has_logprobs and any(cells.widths[line] for line, _, _ in spans):
        return None
    ids = columns.tokens.read_few(spans)
    chars, texts = entries.chars.copy(), []
    at = len(ids) - num_fast
    for line, _, num in fast:
        texts.append(columns.text(line, ids[at : at + num]))
        chars.append(cells.sent_chars[line])
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
    return FewBuilt(message, entries, fast, texts, entries.is_all)
