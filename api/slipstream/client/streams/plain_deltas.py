"""A message of deltas that has nothing but a token, its text and candidates for each of the streams
of the message before it, behind that.

Most messages are so. `plain_ends` tells of one that is decoded; `DeltaRelay` takes one as it came
(`plain_deltas.h`).
"""

from __future__ import annotations

from slipstream.compiled import ends_of
from slipstream_ipc.messages import Deltas, LogprobColumns


def plain_ends(
    message: Deltas, handles: bytes, chars: bytes, tokens: bytes
) -> tuple[bytes, bytes] | None:
    """`ends_of` a message that continues the streams with these columns in this way; None for any
    other, which may be invalid.
    """
    if message.handles != handles or message.tokens != tokens or message.chars != chars:
        return None
    if message.counts or message.ended or message.ends:
        return None
    if message.logprobs is not None and not _are_even(message.logprobs, len(message.texts)):
        return None
    if message.kinds or message.event_entries or message.events:
        return None
    if not len(message.token_ids) == 4 * len(message.texts) == len(handles):
        return None
    return ends_of(chars, tokens, message.texts, b"")


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
