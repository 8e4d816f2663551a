"""The tokens of an answer that belong to its content, for its log-probabilities.

A token counts for the part that its last character belongs to, which its delta says: of a delta
with a kind all tokens are of that kind, and listed events say how many tokens they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from slipstream.delta_batch import EntryColumns
from slipstream.http.openai.held_logprobs import HeldLogprobs
from slipstream.outputs import Delta, columns_of, events_of, kind_of
from slipstream_ipc.messages import AnswerEvent, EventKind


def add_content(held: HeldLogprobs, delta: Delta) -> None:
    """Add the log-probabilities of a delta's content. Of a stream that is not read as events
    everything is content.
    """
    columns, kind = columns_of(delta), kind_of(delta)
    if kind is not None:
        if kind in (0, EventKind.CONTENT):
            held.add(columns)
        return
    at = 0
    for is_content, tokens in groupby(content_tokens(events_of(delta), delta.num_tokens)):
        end = at + sum(1 for _ in tokens)
        if is_content:
            held.add(_some(columns, at, end))
        at = end


def content_tokens(events: Sequence[AnswerEvent], num_tokens: int) -> list[bool]:
    """True for each token of a delta with these events that belongs to the content."""
    found: list[bool] = []
    for event in events:
        found += [False] * event.num_before
        found += [event.kind == EventKind.CONTENT] * event.num_tokens
    del found[num_tokens:]
    return found + [False] * (num_tokens - len(found))


def _some(columns: EntryColumns, begin: int, end: int) -> EntryColumns:
    own, all_of = (
        slice(4 * begin, 4 * end),
        slice(4 * begin * columns.width, 4 * end * columns.width),
    )
    ranks, token_ids = columns.ranks[own], columns.token_ids[own]
    return EntryColumns(
        token_ids, columns.width, columns.values[all_of], columns.ids[all_of], ranks
    )
