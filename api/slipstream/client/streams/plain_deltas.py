"""A message of deltas that has nothing but a token, its text and candidates for each of the streams
of the message before it, behind that.

Most messages are so. `plain_ends` tells of one that is decoded; `take_plain_deltas` in C
(`plain_deltas.c`) takes one from a link as it came, in one call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

from slipstream.client.streams.entry_ends import EndsOf, EntryEnds
from slipstream_ipc.messages import Deltas, LogprobColumns
from slipstream_ipc.native.extension import MSGPACK_HEADER, load_extension
from slipstream_ipc.transport import link_numbers

# link, message, streams with their `handles`, `chars` and `tokens`, now (monotonic, in s) -> what
# the message is, if it is the link's next one and so: the link has received it then, and the
# streams are behind it. Otherwise None, without effect.
TakePlainDeltas = Callable[[Any, bytes, Any, float], Deltas | None]


def plain_ends(
    message: Deltas, handles: bytes, chars: bytes, tokens: bytes, ends_of: EndsOf
) -> EntryEnds | None:
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


@cache
def native_take_plain_deltas() -> TakePlainDeltas | None:
    """`take_plain_deltas`; None where that, or a link in C, is not to be had."""
    numbers = link_numbers.NativeLinkNumbers
    headers = (link_numbers.HEADER, MSGPACK_HEADER)
    native: Any = load_extension(
        "plain_deltas", Path(__file__).with_name("plain_deltas.c"), headers
    )
    if numbers is None or native is None:
        return None
    native.prepare(numbers, Deltas, LogprobColumns)
    return cast("TakePlainDeltas", native.take_plain_deltas)


def _are_even(columns: LogprobColumns, num_tokens: int) -> bool:
    """Whether these are the columns of so many tokens, each with `width` candidates, at least 1."""
    num_bytes = 4 * num_tokens
    return (
        columns.width > 0
        and not columns.widths
        and len(columns.values) == len(columns.ids) == num_bytes * columns.width
        and len(columns.ranks) == num_bytes
    )
