"""The message that brings one client what is new of a few streams: the scalar way of `deltas`.

Owns: the same entries, one by one in Python numbers. Does not know: what `deltas` does not.

Rules:
- What is due, what is sent and what is committed are just what `deltas` makes of the same lines.
- Numpy costs the same for one line as for a hundred, this the same for each line: up to FEW lines
  it is cheaper (see ARCHITECTURE.md for what was measured).
- Log-probabilities, and more than fits one message, are left to `deltas`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream_ipc.messages import Deltas
from slipstream_ipc.short import pack_short
from slipstream_worker.columns import StreamColumns
from slipstream_worker.deltas import ENTRY_BYTES, TEXT_BYTES, SlowEntries
from slipstream_worker.streams import Stream

FEW = 16  # lines

Span = tuple[int, int, int]  # a line, its first token, the number of tokens


def due_few(columns: StreamColumns, lines: Sequence[int], *, urgent: bool) -> list[Span]:
    """As `deltas.due_fast`: what these fast lines have for their readers now."""
    sent_tokens, intervals = columns.cells.sent_tokens, columns.cells.intervals
    length = columns.tokens.length
    due = []
    for line in lines:
        sent = sent_tokens[line]
        new = length(line) - sent
        if (not urgent and new >= intervals[line]) or (new > 0 and not sent):
            due.append((line, sent, new))
    return due


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
    cells, tokens = columns.cells, columns.tokens
    entries = SlowEntries(columns, slow)
    spans = [*entries.spans, *fast]
    lines = [line for line, _, _ in spans]
    counts = [num for _, _, num in spans]
    token_bytes = 4 + 8 * columns.max_width + TEXT_BYTES
    num_bytes = ENTRY_BYTES * len(fast) + token_bytes * sum([num for _, _, num in fast])
    if num_bytes > entries.left or (columns.max_width and any([cells.widths[i] for i in lines])):
        return None
    ids: list[int] = []
    for line, start, num in entries.spans:
        ids += tokens.read_list(line, start, start + num)
    chars, texts = entries.chars, []
    for line, start, num in fast:
        some = tokens.read_list(line, start, start + num)
        ids += some
        texts.append(columns.text(line, some))
        chars.append(cells.sent_chars[line])
    message = Deltas(
        pack_short([cells.handles[line] for line in lines]),
        pack_short(chars),
        pack_short([start for _, start, _ in spans]),
        entries.texts + texts,
        pack_short(ids),
        b"" if counts.count(1) == len(counts) else pack_short(counts),
        pack_short(entries.ended_at),
        tuple(entries.ends),
    )
    return FewBuilt(message, entries, fast, texts, entries.is_all)
