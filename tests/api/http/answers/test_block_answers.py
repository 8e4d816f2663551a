"""Answers that are printed by blocks: whatever the division, the pauses, and where one resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.answer_units import AnswerUnit, answer_units
from tests.helpers.fake_worker import Entry
from tests.helpers.http_answer import CARD, Asked, say
from tests.helpers.message_events import (
    by_number,
    content_of,
    content_of_units,
    named_events,
    number_of,
)

from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.event_ids import parse_event_id
from slipstream.http.anthropic.messages import plan_messages, read_messages
from slipstream.http.endpoints.resume import plan_or_resume
from slipstream.http.exchange import HttpRequest
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import Fault
from slipstream_ipc.messages import Accepted, AnswerEvent, End, EventKind, Resume

TOOL = {"name": "f", "input_schema": {"type": "object"}}
BODY: dict[str, Any] = {
    "model": CARD.name,
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "x"}],
    "tools": [TOOL],
}
CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind


def new_plan(*, is_resumable: bool = False, **fields: Any) -> AnswerPlan:
    """The plan of a message."""
    body = {**BODY, "stream": True, **fields}
    plan = plan_messages(read_messages(json.dumps(body).encode()), CARD)
    return replace(plan, is_resumable=is_resumable)


def resumed_plan(event_id: str) -> AnswerPlan:
    """The plan of the same message, posted again after an event."""
    request = HttpRequest(headers={b"last-event-id": event_id.encode()})
    return plan_or_resume(request, "msg", CARD, new_plan)


AskedMessage = partial(Asked, path="/v1/messages")


@given(answer_units(), st.booleans(), st.sampled_from(["1.0", "1.1"]), st.data())
def test_every_division_adds_up_to_one_message(
    units: list[AnswerUnit], is_resumable: bool, version: str, data: st.DataObject
) -> None:
    asked = AskedMessage(new_plan(is_resumable=is_resumable), version=version)
    say(asked, units, data)
    assert not asked.exchange.is_open
    events = named_events(asked.body)
    content, last = content_of(events)
    assert content == content_of_units(units, asked.plan.states[0].stream_id)
    has_called = any(event.kind == ENDS for unit in units for event in unit.events)
    assert last["delta"]["stop_reason"] == ("tool_use" if has_called else "end_turn")
    assert last["usage"]["output_tokens"] == sum(unit.num_tokens for unit in units)
    assert all(bool(event_id) == is_resumable for event_id, _ in events)


@given(answer_units(), st.data())
def test_a_whole_message_says_the_same(units: list[AnswerUnit], data: st.DataObject) -> None:
    asked = AskedMessage(new_plan(stream=False))
    say(asked, units, data)
    answer = json.loads(asked.body)
    expected = content_of_units(units, asked.plan.states[0].stream_id)
    assert [each["type"] for each in answer["content"]] == [each[0] for each in expected]
    for found, (kind, text, tool_id, name) in zip(answer["content"], expected, strict=True):
        if kind == "tool_use":
            assert (found["id"], found["name"]) == (tool_id, name)
        else:
            assert found[kind] == text


@given(answer_units(), st.data())
def test_after_every_event_the_rest_is_the_same(
    units: list[AnswerUnit], data: st.DataObject
) -> None:
    """Read by another front, at another division; the first one may have been resumed already."""
    first = AskedMessage(new_plan(is_resumable=True))
    say(first, units, data)
    events = named_events(first.body)
    at = data.draw(st.integers(0, len(events) - 1))
    before, last_id = events[: at + 1], events[at][0]
    if data.draw(st.booleans()):
        again = AskedMessage(resumed_plan(last_id))
        say(again, units, data)
        more = named_events(again.body)
        before += more[: data.draw(st.integers(0, len(more)))]
        last_id = before[-1][0]
    second = AskedMessage(resumed_plan(last_id))
    request = second.plan.states[0].request
    assert isinstance(request, Resume)
    assert (request.num_chars, request.num_tokens) == (0, 0)
    say(second, units, data)
    assert not second.exchange.is_open
    rest = named_events(second.body)
    assert by_number(before + rest) == by_number(events)
    assert [number_of(each) for each, _ in rest] == sorted({number_of(each) for each, _ in rest})


@given(answer_units(), st.data())
def test_another_answer_is_never_joined(units: list[AnswerUnit], data: st.DataObject) -> None:
    """What is computed again has another token before the client's number: nothing of it leaves."""
    first = AskedMessage(new_plan(is_resumable=True))
    say(first, units, data)
    events = named_events(first.body)
    last_id = data.draw(st.sampled_from([each for each, _ in events]))
    [cursor] = parse_event_id(last_id).cursors
    if not cursor.num_tokens:
        return
    wrong = data.draw(st.integers(0, cursor.num_tokens - 1))
    is_short = data.draw(st.booleans())
    second = AskedMessage(resumed_plan(last_id))
    num_tokens = num_chars = 0
    for unit in units:
        ids = [number + 7 * (number == wrong) for number in range(num_tokens, 99)]
        end = None
        if is_short and num_tokens + unit.num_tokens > wrong:
            unit, end = replace(unit, num_tokens=wrong - num_tokens), End("stop", wrong)
        entry = Entry(second.handle, unit.text, num_chars, num_tokens, ids[: unit.num_tokens], end)
        second.table.say(replace(entry, events=unit.events))
        num_tokens, num_chars = num_tokens + unit.num_tokens, num_chars + len(unit.text)
        if end is not None or not second.exchange.is_open:
            break
    assert not second.exchange.is_open
    answer = json.loads(second.body)
    assert answer["error"]["type"] == "invalid_request_error"
    assert "computed again" in answer["error"]["message"]


def entries_of(handle: int, *told: tuple[str, int, tuple[AnswerEvent, ...] | None]) -> list[Entry]:
    """Entries of one token each. told: text, kind and events."""
    entries: list[Entry] = []
    num_chars = 0
    for number, (text, kind, events) in enumerate(told):
        entries.append(Entry(handle, text, num_chars, number, [7], None, kind, events))
        num_chars += len(text)
    return entries


def test_a_delta_is_one_write() -> None:
    """What continues a block is written by the broadcast, and all else at once."""
    call = (AnswerEvent(CONTENT, "So"), AnswerEvent(BEGINS, "f"), AnswerEvent(ARGUMENTS, "{"))
    for is_resumable in (False, True):
        asked = AskedMessage(new_plan(is_resumable=is_resumable))
        entries = entries_of(
            asked.handle,
            ("hm", REASONING, None),
            (" \u2028", REASONING, None),
            ("<c>", 0, call),
            ('"a"', ARGUMENTS, None),
            ("b", CONTENT, None),
        )
        sizes = []
        for entry in entries:
            asked.table.say(entry)
            sizes.append(len(asked.wire.writes))
        assert sizes == [2, 3, 4, 5, 6]  # the head is a write of its own
        events = [data["type"] for _, data in named_events(asked.body)]
        assert events[:4] == [
            "message_start",
            "ping",
            "content_block_start",
            "content_block_delta",
        ]
        assert len(events) == 4 + 1 + 6 + 1 + 3


def test_a_model_without_a_format_answers_in_text() -> None:
    for is_resumable in (False, True):
        asked = AskedMessage(new_plan(is_resumable=is_resumable))
        for at in range(3):
            asked.table.say(Entry(asked.handle, "<c>", 3 * at, at, [7]))
        asked.table.say(Entry(asked.handle, "", 9, 3, [], End("stop", 3)))
        content, last = content_of(named_events(asked.body))
        assert content == [("text", "<c>" * 3, "", "")]
        assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
        assert len(asked.wire.writes) == 5


CALL = (AnswerEvent(BEGINS, "f"), AnswerEvent(ARGUMENTS, "{}"), AnswerEvent(ENDS))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("events", "end", "reason", "sequence"),
    [
        (CALL, End("stop", 1), "tool_use", None),
        (CALL, End("stop", 1, 7), "tool_use", None),
        (CALL, End("stop", 1, "###"), "stop_sequence", "###"),
        (CALL, End("length", 1), "max_tokens", None),
        (CALL[:2], End("stop", 1), "end_turn", None),
        ((), End("stop", 1), "end_turn", None),
        ((), End("abort", 1), "abort", None),
    ],
)
def test_stop_reasons(
    events: tuple[AnswerEvent, ...],
    end: End,
    reason: str,
    sequence: str | None,
    is_stream: bool,
) -> None:
    asked = AskedMessage(new_plan(stream=is_stream))
    asked.table.say(Entry(asked.handle, "f{}", ids=[1], end=end, events=events))
    if is_stream:
        shown = named_events(asked.body)[-2][1]["delta"]
    else:
        answer = json.loads(asked.body)
        shown = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    assert shown == {"stop_reason": reason, "stop_sequence": sequence}


def test_usage_has_cached_tokens_apart() -> None:
    for is_stream in (True, False):
        asked = AskedMessage(new_plan(stream=is_stream))
        asked.plan.states[0].prompt_len = 10
        end = End("stop", 1, num_cached_tokens=8)
        asked.table.say(Entry(asked.handle, "x", ids=[1], end=end))
        expected = {
            "input_tokens": 2,
            "output_tokens": 1,
            "cache_read_input_tokens": 8,
            "cache_creation_input_tokens": 0,
        }
        if not is_stream:
            assert json.loads(asked.body)["usage"] == expected
            continue
        events = [data for _, data in named_events(asked.body)]
        assert events[-2]["usage"] == expected
        first = events[0]["message"]["usage"]
        assert (first["input_tokens"], first["output_tokens"]) == (10, 0)


def test_a_failure_is_the_last_event() -> None:
    asked = AskedMessage(new_plan(is_resumable=True))
    asked.table.say(Entry(asked.handle, "x", ids=[1], kind=CONTENT))
    fault = Fault("engine", "the engine failed")
    asked.table.say(Entry(asked.handle, "y", 1, 1, [2], End("error", 2, fault=fault), CONTENT))
    *events, (event_id, last) = named_events(asked.body)
    assert [data["type"] for _, data in events][-2:] == ["content_block_delta"] * 2
    assert (event_id, last["type"], last["error"]["type"]) == ("", "error", "api_error")
    assert not asked.exchange.is_open


@pytest.mark.parametrize("is_resumable", [False, True])
def test_an_answer_begins_when_its_request_is_accepted(is_resumable: bool) -> None:
    asked = AskedMessage(new_plan(is_resumable=is_resumable))
    ids = pack_u32([1, 2, 3])
    for _ in range(2):  # again, where the stream has moved
        asked.table.streams.accept(Accepted(asked.handle, ids))
        asked.table.streams.wake()
        (event_id, begun), (_, ping) = named_events(asked.body)
        assert (begun["type"], ping["type"]) == ("message_start", "ping")
        assert begun["message"]["usage"]["input_tokens"] == 3
    asked.table.say(Entry(asked.handle, "text", ids=[5], end=End("stop", 1)))
    events = named_events(asked.body)
    assert [each["type"] for _, each in events].count("message_start") == 1
    assert [each[1] for each in content_of(events)[0]] == ["text"]
    if is_resumable:
        second = AskedMessage(resumed_plan(event_id))
        second.table.streams.accept(Accepted(second.handle, ids))
        second.table.streams.wake()
        second.table.say(Entry(second.handle, "text", ids=[5], end=End("stop", 1)))
        assert by_number(named_events(second.body)) == by_number(events[1:])


def test_a_failure_before_the_first_text_has_a_status() -> None:
    for is_stream in (True, False):
        asked = AskedMessage(new_plan(stream=is_stream))
        fault = Fault("overloaded", "no room")
        asked.table.say(Entry(asked.handle, "", end=End("error", 0, fault=fault)))
        answer = json.loads(asked.body)
        assert answer["type"] == "error"
        assert answer["error"]["type"] in ("overloaded_error", "api_error")
