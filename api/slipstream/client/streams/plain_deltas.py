"""A message of deltas that has nothing but tokens, their text and candidates for each of some
streams, behind what these have.

Most messages are so. `plain_ends` tells of one that is decoded; `DeltaRelay` takes one as it came
(`plain_deltas.h`).
"""

from __future__ import annotations

from slipstream.compiled import ends_of
from slipstream_ipc.columns import u32
from slipstream_ipc.messages import Deltas, LogprobColumns


def plain_ends(
    message: Deltas, handles: bytes, chars: bytes, tokens: bytes
) -> tuple[bytes, bytes] | None:
    """`ends_of` a message that continues the streams with these columns in this way; None for any
    other, which may be invalid.
    """
    if message.handles != handles or message.tokens != tokens or message.chars != chars:
        return None
    num_tokens, counts = len(message.texts), message.counts
    if len(handles) != 4 * num_tokens or message.ended or message.ends:
        return None
    if counts:
        if len(counts) != len(handles):
            return None
        num_tokens = int(u32(counts).sum())
    if len(message.token_ids) != 4 * num_tokens:
        return None
    if message.logprobs is not None and not _are_even(message.logprobs, num_tokens):
        return None
    if message.kinds or message.event_entries or message.events:
        return None
    return ends_of(chars, tokens, message.texts, counts)


def _are_even(columns: LogprobColumns, num_tokens: int) -> bool:
    """True if these are the columns of `num_tokens` tokens, each with `width` candidates, at least
    1.
    """
    num_bytes = 4 * num_tokens
    return (
        columns.width > 0
        and not columns.widths
        and len(columns.values) == len(columns.ids) == num_bytes * columns.width
        and len(columns.ranks) == num_bytes
    )
