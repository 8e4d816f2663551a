"""The tokens of an answer's content are those that its events say, however it is divided."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.fake_worker import Entry, deltas

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.logprobs.content_tokens import add_content, content_tokens
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.outputs import join
from slipstream.request.requests import new_submit
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import AnswerEvent, EventKind, LogprobColumns, SamplingParams

CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind
NUMBERS = st.integers(0, 3)
EVENTS = st.lists(
    st.builds(
        AnswerEvent,
        st.sampled_from([CONTENT, CONTENT, REASONING, ARGUMENTS]),
        st.sampled_from(["a", "b"]),
        num_tokens=NUMBERS,
        num_before=NUMBERS,
    ),
    max_size=3,
).map(tuple)


def test_rewritten_arguments_and_repeated_texts_name_no_wrong_token() -> None:
    """`<tool_call>`, …, `True`, …, and then `True` as content."""
    events = [
        AnswerEvent(BEGINS, "f", num_tokens=1, num_before=1),
        AnswerEvent(ARGUMENTS, '{"b": true}', num_tokens=2),
        AnswerEvent(ENDS, num_tokens=1),
        AnswerEvent(CONTENT, "True", num_tokens=1, num_before=1),
    ]
    assert content_tokens(events, 8) == [False] * 6 + [True, False]


@given(st.lists(st.tuples(EVENTS, NUMBERS), min_size=1, max_size=5), st.data())
def test_they_are_the_same_however_deltas_are_joined(
    units: list[tuple[tuple[AnswerEvent, ...], int]], data: st.DataObject
) -> None:
    table = ClientStreamTable()
    state = StreamState(new_submit("x", SamplingParams(logprobs=0)), wants_whole=False)
    table.add(state)
    at, expected = 0, list[int]()
    for events, num_after in units:
        kinds = list[int]()
        for event in events:
            kinds += [0] * event.num_before + [event.kind] * event.num_tokens
        kinds += [0] * num_after
        ids = range(at, at + len(kinds))
        expected += [i for i, kind in zip(ids, kinds, strict=True) if kind == CONTENT]
        columns = LogprobColumns(
            1, np.zeros(len(ids), "<f4").tobytes(), pack_u32(ids), pack_u32([1] * len(ids))
        )
        entry = Entry(state.handle, "", 0, at, ids, events=events)
        assert table.deliver(replace(deltas(entry), logprobs=columns))
        at += len(kinds)
    read = list(state.deltas)
    cut = data.draw(st.integers(0, len(read)))
    for parts in (read, [join(read[:cut]), join(read[cut:])], [join(read)]):
        found = HeldLogprobs()
        for delta in parts:
            add_content(found, delta)
        assert u32(b"".join([part.ids for part in found.parts()])).tolist() == expected
