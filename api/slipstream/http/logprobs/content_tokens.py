"""The tokens of an answer that belong to its content, for its log-probabilities.

A token counts for the part that its last character belongs to, which its delta says: of a delta
with a kind all tokens are of that kind, and listed events say how many tokens they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.outputs import Delta, columns_of, events_of, kind_of
from slipstream_ipc.messages import AnswerEvent, EventKind


def tokens_of(delta: Delta) -> HeldLogprobs:
    """The log-probabilities of a delta."""
    tokens = HeldLogprobs()
    tokens.add(columns_of(delta))
    return tokens


def add_content(held: HeldLogprobs, delta: Delta) -> None:
    """Add the log-probabilities of a delta's content."""
    if kind_of(delta) in (0, EventKind.CONTENT):
        held.add(columns_of(delta))
    else:
        held.extend(content_of(tokens_of(delta), delta))


def content_of(tokens: HeldLogprobs, delta: Delta) -> HeldLogprobs:
    """The log-probabilities of a delta's content, taken from those of all its tokens. Of a stream
    that is not read as events everything is content.
    """
    kind = kind_of(delta)
    if kind in (0, EventKind.CONTENT):
        return tokens
    found = HeldLogprobs()
    if kind is None:
        for is_content, run in groupby(content_tokens(events_of(delta), delta.num_tokens)):
            some = tokens.take(sum(1 for _ in run))
            if is_content:
                found.extend(some)
    return found


def content_tokens(events: Sequence[AnswerEvent], num_tokens: int) -> list[bool]:
    """True for each token of a delta with these events that belongs to the content."""
    found: list[bool] = []
    for event in events:
        found += [False] * event.num_before
        found += [event.kind == EventKind.CONTENT] * event.num_tokens
    del found[num_tokens:]
    return found + [False] * (num_tokens - len(found))
