"""The message that brings one client what is new of its streams.

Owns: how entries become the columns of a `Deltas`, and when a stream is due (its interval).
Does not know: sockets, credit, clients' lives.

Rules:
- The first tokens and the end are due at once; in between, `interval` tokens are.
- A message is filled up to a byte budget; what did not fit stays due.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from slipstream_ipc.codec import MESSAGE_BUDGET_BYTES
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Deltas, End, LogprobColumns
from slipstream_ipc.text_log import Cursor
from slipstream_worker.streams import Stream

_ENTRY_BYTES = 32


class Sent(NamedTuple):
    """The receipt of one entry: acknowledged, the reader has the stream up to `cursor`."""

    stream: Stream
    cursor: Cursor
    is_end: bool


def is_due(stream: Stream) -> bool:
    """Whether the stream has something that its reader should have now."""
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


def build(streams: Iterable[Stream]) -> tuple[Deltas, list[Sent]]:
    """One message of what is new of streams that are due, and what it will have delivered.

    Moves no cursor. Streams behind the one that fills the budget are left out.
    """
    handles: list[int] = []
    chars: list[int] = []
    tokens: list[int] = []
    texts: list[str] = []
    counts: list[int] = []
    token_ids: list[int] = []
    ended: list[int] = []
    ends: list[End] = []
    widths: list[int] = []
    values: list[bytes] = []
    ids: list[bytes] = []
    ranks: list[int] = []
    sent: list[Sent] = []
    num_bytes = 0
    for stream in streams:
        output, reader = stream.output, stream.reader
        assert output is not None
        assert reader is not None
        start = reader.cursor
        left = max(MESSAGE_BUDGET_BYTES - num_bytes, 0)
        stop = output.log.advance(start, left // 4, left // (4 + 8 * stream.width))
        text = output.log.text_between(start, stop)
        is_end = output.end is not None and stop.unit == output.log.num_units
        handles.append(reader.handle)
        chars.append(start.num_chars)
        tokens.append(start.num_tokens)
        texts.append(text)
        counts.append(stop.num_tokens - start.num_tokens)
        token_ids += output.token_ids[start.num_tokens : stop.num_tokens]
        if is_end:
            assert output.end is not None
            ended.append(len(sent))
            ends.append(output.end)
        widths.append(stream.width)
        if stream.width:
            for some_values, some_ids, rank in stream.logprobs[start.num_tokens : stop.num_tokens]:
                values.append(some_values)
                ids.append(some_ids)
                ranks.append(rank)
                num_bytes += len(some_values) + len(some_ids)
        sent.append(Sent(stream, stop, is_end))
        num_bytes += _ENTRY_BYTES + len(text) + 4 * counts[-1]
        if num_bytes >= MESSAGE_BUDGET_BYTES:
            break
    each_one = all(count == 1 for count in counts)
    deltas = Deltas(
        pack_u32(handles),
        pack_u32(chars),
        pack_u32(tokens),
        texts,
        pack_u32(token_ids),
        b"" if each_one else pack_u32(counts),
        pack_u32(ended) if ended else b"",
        tuple(ends),
        _logprobs(widths, values, ids, ranks),
    )
    return deltas, sent


def _logprobs(
    widths: list[int], values: list[bytes], ids: list[bytes], ranks: list[int]
) -> LogprobColumns | None:
    if not any(widths):
        return None
    same = widths.count(widths[0]) == len(widths)
    return LogprobColumns(
        widths[0] if same else 0,
        b"".join(values),
        b"".join(ids),
        pack_u32(ranks),
        b"" if same else pack_u32(widths),
    )
