"""The message that brings one client what is new of its streams.

Owns: how entries become the columns of a `Deltas`, and when a line is due (its interval). Does not
know: sockets, credit, clients' lives.

Rules:
- The first tokens and the end are due at once; in between, `interval` tokens are.
- A message is filled up to a byte budget, slow lines first; what did not fit stays due.
- Building moves no cursor: `Built.commit` does, when the message has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_ipc.codec import MESSAGE_BUDGET_BYTES
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Deltas, End
from slipstream_ipc.text_log import Cursor
from slipstream_ipc.wide_logprobs import MAX_NARROW
from slipstream_worker.columns import StreamColumns
from slipstream_worker.streams import Stream

Int64s = npt.NDArray[np.int64]

_ENTRY_BYTES = 32
_TEXT_BYTES = 8  # of a token, on the generous side
_WIDE_BYTES = MESSAGE_BUDGET_BYTES // 2  # from which on a message takes no more of wide lines


def due_fast(columns: StreamColumns, lines: Int64s, *, urgent: bool) -> Int64s:
    """Those of these fast lines that have something for their readers now; or just first tokens."""
    sent = columns.sent_tokens[lines]
    new = columns.tokens.lengths(lines) - sent
    is_due = (sent == 0) & (new > 0)
    if not urgent:
        is_due |= new >= columns.intervals[lines]
    return lines if np.count_nonzero(is_due) == len(lines) else lines[is_due]


def is_due(stream: Stream) -> bool:
    """Whether a slow line has something that its reader should have now."""
    output, reader = stream.output, stream.reader
    if output is None or reader is None or reader.is_waiting:
        return False
    if output.end is not None:
        return True
    log = output.log
    if reader.cursor.unit == log.num_units:
        return False
    done = reader.cursor.num_tokens
    return not done or log.num_tokens - done >= stream.interval


def is_urgent(stream: Stream) -> bool:
    """Whether that is its first token or its end."""
    output, reader = stream.output, stream.reader
    if output is None or reader is None or reader.is_waiting:
        return False
    return output.end is not None or (reader.cursor.num_tokens == 0 and output.log.num_tokens > 0)


@dataclass(frozen=True, slots=True)
class Built:
    """A message, and what it will have delivered."""

    message: Deltas
    ended: list[
        Stream
    ]  # whose end is in it: their readers have all of them when it is acknowledged
    slow: list[tuple[Stream, Cursor]]  # and where each reader's copy ends then
    fast: Int64s
    fast_tokens: Int64s
    fast_chars: Int64s

    def commit(self, columns: StreamColumns) -> None:
        """The message has left: move the cursors."""
        fast = self.fast
        if len(fast):
            columns.sent_tokens[fast] += self.fast_tokens
            columns.sent_chars[fast] += self.fast_chars
            columns.is_dirty[fast] = columns.tokens.lengths(fast) > columns.sent_tokens[fast]
        for stream, cursor in self.slow:
            assert stream.reader is not None
            stream.reader.cursor = cursor
        for stream in self.ended:
            columns.is_dirty[stream.line] = False
        for stream, cursor in self.slow:
            assert stream.output is not None
            if stream.output.end is None:
                columns.is_dirty[stream.line] = cursor.unit < stream.output.log.num_units
                columns.speed_up(stream, cursor)


def build(columns: StreamColumns, fast: Int64s, slow: Sequence[Stream]) -> Built:
    """One message of what is new of lines that are due. Who finds no room is left out."""
    chars: list[int] = []
    texts: list[str] = []
    ended_at: list[int] = []
    ended: list[Stream] = []
    ends: list[End] = []
    moves: list[tuple[Stream, Cursor]] = []
    spans: list[tuple[int, int, int]] = []  # line, first token, number of tokens
    num_bytes, has_wide = 0, False
    for stream in slow:
        output, reader, line = stream.output, stream.reader, stream.line
        assert output is not None
        assert reader is not None
        width = int(columns.widths[line])
        if width > MAX_NARROW:
            if num_bytes >= _WIDE_BYTES:
                continue
            has_wide = True
        start = reader.cursor
        token_bytes = 4 + 8 * width
        left = max(MESSAGE_BUDGET_BYTES - num_bytes, 0)
        stop = output.log.advance(start, left // 4, left // token_bytes)
        text = output.log.text_between(start, stop)
        if output.end is not None and stop.unit == output.log.num_units:
            ended_at.append(len(moves))
            ended.append(stream)
            ends.append(output.end)
        chars.append(start.num_chars)
        texts.append(text)
        num_tokens = stop.num_tokens - start.num_tokens
        spans.append((line, start.num_tokens, num_tokens))
        moves.append((stream, stop))
        num_bytes += _ENTRY_BYTES + len(text) + token_bytes * num_tokens
        if num_bytes >= MESSAGE_BUDGET_BYTES:
            break
    least = _WIDE_BYTES if has_wide else 0
    fast, fast_tokens = _fitting(columns, fast, max(MESSAGE_BUDGET_BYTES - num_bytes, least))
    lines, starts, counts = fast, columns.sent_tokens[fast], fast_tokens
    fast_chars, chars_before = fast_tokens, columns.sent_chars[fast]
    if spans:
        slow_lines, slow_starts, slow_counts = np.array(spans, np.int64).T
        lines = np.concatenate([slow_lines, lines])
        starts = np.concatenate([slow_starts, starts])
        counts = np.concatenate([slow_counts, counts])
        chars_before = np.concatenate([np.array(chars, np.int64), chars_before])
    several = None if np.count_nonzero(counts == 1) == len(counts) else counts
    token_ids = columns.tokens.gather(lines, starts, several)
    if len(fast):
        num_slow = sum(count for _, _, count in spans)
        fast_texts, fast_chars = columns.texts(fast, fast_tokens, token_ids[num_slow:])
        texts += fast_texts
    message = Deltas(
        pack_u32(columns.handles[lines]),
        pack_u32(chars_before),
        pack_u32(starts),
        texts,
        pack_u32(token_ids),
        b"" if several is None else pack_u32(several),
        pack_u32(ended_at) if ended_at else b"",
        tuple(ends),
        columns.logprobs.columns(lines, starts, several) if columns.has_logprobs else None,
    )
    return Built(message, ended, moves, fast, fast_tokens, fast_chars)


def _fitting(columns: StreamColumns, fast: Int64s, budget: int) -> tuple[Int64s, Int64s]:
    """As many of the lines as fit, and how many tokens of each: everything new, or even shares."""
    if budget <= 0:
        fast = fast[:0]
    counts = columns.tokens.lengths(fast) - columns.sent_tokens[fast]
    if not len(fast):
        return fast, counts
    token_bytes = 4 + 8 * columns.max_width + _TEXT_BYTES
    if _ENTRY_BYTES * len(fast) + token_bytes * int(counts.sum()) <= budget:
        return fast, counts
    num_lines = max(1, budget // (_ENTRY_BYTES + token_bytes))
    fast, counts = fast[:num_lines], counts[:num_lines]
    share = max(1, (budget // len(fast) - _ENTRY_BYTES) // token_bytes)
    return fast, np.minimum(counts, share)
