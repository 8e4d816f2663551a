"""The tokens of an answer that belong to its content, for its log-probabilities.

A token counts for the part that its last character belongs to, which its delta says: of a delta
with a kind all tokens are of that kind, and listed events say how many tokens they have.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import compress

from slipstream.delta_batch import TokenLogprobs
from slipstream.outputs import Delta, events_of, kind_of
from slipstream_ipc.messages import AnswerEvent, EventKind


def content_logprobs(delta: Delta) -> list[TokenLogprobs]:
    """The log-probabilities of a delta's content; empty where it has none."""
    entries = delta.logprobs or []
    return [each for part in only_content([entries], delta) for each in part]


def only_content(
    entries: Iterable[list[TokenLogprobs]], delta: Delta
) -> Iterator[list[TokenLogprobs]]:
    """The log-probabilities of a delta's content. entries: of all its tokens, in parts. Of a stream
    that is not read as events everything is content.
    """
    kind = kind_of(delta)
    if kind is None:
        are_content = iter(content_tokens(events_of(delta), delta.num_tokens))
        for part in entries:
            yield list(compress(part, are_content))
    elif kind in (0, EventKind.CONTENT):
        yield from entries


def content_tokens(events: Sequence[AnswerEvent], num_tokens: int) -> list[bool]:
    """True for each token of a delta with these events that belongs to the content."""
    found: list[bool] = []
    for event in events:
        found += [False] * event.num_before
        found += [event.kind == EventKind.CONTENT] * event.num_tokens
    del found[num_tokens:]
    return found + [False] * (num_tokens - len(found))
