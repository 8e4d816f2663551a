"""Events of answers: however they are divided, repeated or merged, their reader gets the same."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.answer_units import AnswerUnit, answer_units, entry_of, whole_events
from tests.helpers.fake_worker import Entry, deltas, end_of

from slipstream.answers.events import (
    ContentDelta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from slipstream.answers.tool_calls import ToolCall, call_id
from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.client.streams.unread_deltas import merge_unread
from slipstream.outputs import Delta, RequestOutput, events_of, join
from slipstream.request.requests import new_submit
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.event_log import joined_events
from slipstream_ipc.messages import AnswerEvent, ChatMessage, EventKind, Resume, SamplingParams


def new_state(table: ClientStreamTable) -> StreamState:
    state = StreamState(new_submit("x", SamplingParams()), wants_whole=False)
    table.add(state)
    return state


def read(read_deltas: list[Delta] | deque[Delta]) -> list[tuple[EventKind, str, int]]:
    """Kind, text and call of all events, adjacent pieces joined."""
    every = joined_events(event for delta in read_deltas for event in events_of(delta))
    return [(event.kind, event.text, event.call) for event in every]


def output_of(whole: Delta) -> RequestOutput:
    return RequestOutput(whole.text, whole, "id", "", b"")


@given(
    st.lists(answer_units(), min_size=1, max_size=3),
    st.integers(0, 33),
    st.data(),
)
def test_any_division_gives_the_same_events(
    answers: list[list[AnswerUnit]], num_plain: int, data: st.DataObject
) -> None:
    """Among streams without events, in messages that are taken whole and entry by entry, merged
    while unread, with parts that are sent twice.
    """
    table = ClientStreamTable()
    states = [new_state(table) for _ in answers]
    plain = [new_state(table) for _ in range(num_plain)]
    sent = [0] * len(answers)
    round_number = 0
    while any(not state.is_over for state in states):
        entries = [Entry(state.handle, "x", round_number) for state in plain]
        for index, units in enumerate(answers):
            if states[index].is_over:
                continue
            end = len(units) - data.draw(st.integers(0, len(units) - sent[index]))
            is_last = end == len(units) and not data.draw(st.booleans())
            is_repeated = data.draw(st.integers(0, 9)) == 9
            begin = data.draw(st.integers(0, sent[index])) if is_repeated else sent[index]
            if begin < sent[index]:  # nothing new, unless it can be cut
                end, is_last = sent[index], False
            lists = data.draw(st.booleans())
            handle = states[index].handle
            entries.append(entry_of(handle, units, begin, end, lists_events=lists, is_last=is_last))
            sent[index] = end
        assert table.deliver(deltas(*data.draw(st.permutations(entries))))
        round_number += 1
        for state in states:
            if data.draw(st.integers(0, 3)) == 3 and not state.is_over:
                merge_unread(state.deltas)
    for state, units in zip(states, answers, strict=True):
        raw = "".join(unit.text for unit in units)
        expected = whole_events(units)
        assert read(state.deltas) == expected
        whole = join(list(state.deltas), state.end)
        assert whole.text == raw
        assert read([whole]) == expected
        check_whole(whole, expected, state.stream_id)
        assert "".join(delta.content for delta in state.deltas) == whole.content
        assert "".join(delta.reasoning for delta in state.deltas) == whole.reasoning
        arguments: dict[int, str] = {}
        for part in [part for delta in state.deltas for part in delta.tool_calls]:
            arguments[part.index] = arguments.get(part.index, "") + part.arguments
        calls = output_of(whole).tool_calls
        assert list(arguments.values()) == [call.arguments for call in calls]
    for state in plain:
        whole = join(list(state.deltas))
        assert whole.content == whole.text == "x" * round_number
        assert (whole.reasoning, whole.tool_calls) == ("", [])


def check_whole(whole: Delta, expected: list[tuple[EventKind, str, int]], stream_id: bytes) -> None:
    """The conveniences of outputs, against the joined events."""
    output = output_of(whole)
    of_kind = {
        kind: "".join(text for each, text, _ in expected if each == kind) for kind in EventKind
    }
    assert output.content == of_kind[EventKind.CONTENT]
    assert (output.reasoning or "") == of_kind[EventKind.REASONING]
    ended = {call for kind, _, call in expected if kind == EventKind.CALL_ENDS}
    begun = [(text, call) for kind, text, call in expected if kind == EventKind.CALL_BEGINS]
    calls = output.tool_calls
    assert [call.name for call in calls] == [name for name, _ in begun]
    for (_, number), call in zip(begun, calls, strict=True):
        assert call.id in (call_id(stream_id, number), f"id-{number}")
        assert call.status == ("complete" if number in ended else "incomplete")
        assert call.arguments == "".join(
            text
            for kind, text, index in expected
            if kind == EventKind.CALL_ARGUMENTS and index == number
        )
    turn = output.message
    assert (turn.content, turn.reasoning_content) == (output.content, output.reasoning)
    assert [call.id for call in turn.tool_calls or ()] == [
        call.id for call in calls if call.status == "complete"
    ]


@given(answer_units(), st.data())
def test_what_begins_before_the_position_is_cut_or_asked_for_again(
    units: list[AnswerUnit], data: st.DataObject
) -> None:
    """An entry of which a reader has a part: one with a kind is cut, one with events is a gap, and
    is sent from the reader's position on after that.
    """
    table = ClientStreamTable()
    state = new_state(table)
    taken = 0
    for _ in range(8):
        begin = data.draw(st.integers(0, taken))
        end = data.draw(st.integers(taken, len(units)))
        lists = data.draw(st.booleans())
        entry = entry_of(state.handle, units, begin, end, lists_events=lists)
        if not table.deliver(deltas(entry)):
            assert entry.events
            assert begin < taken < end
            entry = entry_of(state.handle, units, taken, end, lists_events=lists)
            assert table.deliver(deltas(entry))
        taken = end
        assert read(state.deltas) == whole_events(units[:taken])
        assert table.position(state)[0] == sum(len(unit.text) for unit in units[:taken])


def test_an_end_that_comes_again_brings_no_events_again() -> None:
    table = ClientStreamTable()
    state = StreamState(Resume(0, bytes(16), 3, 3), wants_whole=False)
    table.add(state)
    event = AnswerEvent(EventKind.REASONING, "ab")
    assert table.deliver(deltas(Entry(state.handle, "<ab", end=end_of("<ab"), events=(event,))))
    assert state.is_over
    assert [delta.events for delta in state.deltas] == [[]]
    assert [delta.finish_reason for delta in state.deltas] == ["stop"]


def test_public_events_and_their_names() -> None:
    table = ClientStreamTable()
    state = new_state(table)
    sent = (
        AnswerEvent(EventKind.REASONING, "so"),
        AnswerEvent(EventKind.CONTENT, "a"),
        AnswerEvent(EventKind.CONTENT, "b"),
        AnswerEvent(EventKind.CALL_BEGINS, "f", 0),
        AnswerEvent(EventKind.CALL_ARGUMENTS, "{}", 0),
        AnswerEvent(EventKind.CALL_ENDS, "", 0),
        AnswerEvent(EventKind.CALL_BEGINS, "g", 1, "functions.g:1"),
        AnswerEvent(EventKind.CALL_ARGUMENTS, '{"x', 1),
    )
    table.deliver(deltas(Entry(state.handle, "raw", end=end_of("raw"), events=sent)))
    [delta] = state.deltas
    own_id = call_id(state.stream_id, 0)
    assert delta.events == [
        ReasoningDelta("so"),
        ContentDelta("ab"),
        ToolCallStart(0, own_id, "f"),
        ToolCallArguments(0, "{}"),
        ToolCallEnd(0),
        ToolCallStart(1, "functions.g:1", "g"),
        ToolCallArguments(1, '{"x'),
    ]
    output = output_of(delta)
    assert output.text == "raw"
    assert output.tool_calls == [
        ToolCall(own_id, "f", "{}"),
        ToolCall("functions.g:1", "g", '{"x', "incomplete"),
    ]
    [completion] = output.outputs
    assert completion.tool_calls == output.tool_calls
    assert (completion.content, completion.reasoning_content) == ("ab", "so")
    assert isinstance(completion.message, ChatMessage)


def test_a_calls_id_is_of_its_stream_and_number() -> None:
    assert call_id(bytes(16), 0) == "call_3235550b26f63706a3e766ce"
    ids = {call_id(bytes([which] * 16), index) for which in range(9) for index in range(9)}
    assert len(ids) == 81


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([0, 0], "must increase"),
        ([1, 2], "index 2 of 2"),
        ([0], "entries, expected 2"),
    ],
)
def test_columns_that_do_not_match_are_refused(entries: list[int], wrong: str) -> None:
    table = ClientStreamTable()
    first, second = new_state(table), new_state(table)
    message = deltas(Entry(first.handle, "a", events=()), Entry(second.handle, "b", events=()))
    with pytest.raises(ProtocolError, match=wrong):
        table.deliver(replace(message, event_entries=pack_u32(entries)))
    with pytest.raises(ProtocolError, match="kinds: 1 entries"):
        table.deliver(replace(message, kinds=b"\0" * 4))


@pytest.mark.parametrize("kind", [3, 5, 6, 255, 4 | 1024 << 8])
def test_kinds_are_those_of_text(kind: int) -> None:
    table = ClientStreamTable()
    states = [new_state(table) for _ in range(2)]
    entries = [Entry(states[0].handle, "a", kind=1), Entry(states[1].handle, "b", kind=kind)]
    with pytest.raises(ProtocolError, match="kinds"):
        table.deliver(deltas(*entries))
    assert not any(state.deltas for state in states)
