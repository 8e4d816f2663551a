"""Chats whose answers are read as events: however these are divided, the message is the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion
from tests.helpers.answer_units import AnswerUnit, answer_units
from tests.helpers.chat_message import Message, accumulated, message_of, shown
from tests.helpers.fake_worker import Entry
from tests.helpers.http_answer import CARD, Asked, Table, Wire, body_of, identified_events, say
from tests.helpers.patience import Patience

from slipstream.answers.tool_calls import call_id
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.event_ids import parse_event_id
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.endpoints.resume import plan_or_resume
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel, TokenText
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import AnswerEvent, End, EventKind, LogprobColumns

CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind
USER = {"role": "user", "content": "x"}
LOOK = {"type": "function", "function": {"name": "look"}}


def chat(*, is_resumable: bool = False, strict_finish: bool = False, **fields: Any) -> AnswerPlan:
    """The plan of a chat with a tool."""
    body = {"messages": [USER], "tools": [LOOK], "stream": True, **fields}
    plan = plan_chat(read_chat(json.dumps(body).encode()), CARD, strict_finish=strict_finish)
    return replace(plan, is_resumable=is_resumable)


class AskedChat(Asked):
    """A chat, and what has been written of it."""

    @property
    def events(self) -> list[tuple[str, Any]]:
        """Id and data of each event so far."""
        return identified_events(body_of(self.wire.writes))

    @property
    def deltas(self) -> list[Any]:
        """The delta of each chunk so far."""
        return [data["choices"][0]["delta"] for _, data in self.events if data != "[DONE]"]


def expected_of(asked: AskedChat, units: list[AnswerUnit]) -> Message:
    """The message that an answer adds up to."""
    events = [event for unit in units for event in unit.events]
    return message_of(events, asked.plan.states[0].stream_id)


@given(answer_units(), st.booleans(), st.sampled_from(["1.0", "1.1"]), st.data())
def test_every_division_adds_up_to_one_message(
    units: list[AnswerUnit], is_resumable: bool, version: str, data: st.DataObject
) -> None:
    asked = AskedChat(chat(is_resumable=is_resumable), version=version)
    say(asked, units, data)
    expected = expected_of(asked, units)
    assert accumulated(asked.events) == expected


@given(answer_units(), st.data())
def test_a_whole_message_says_the_same(units: list[AnswerUnit], data: st.DataObject) -> None:
    asked = AskedChat(chat(stream=False))
    say(asked, units, data)
    [choice] = json.loads(body_of(asked.wire.writes))["choices"]
    content, _, calls, _ = expected = expected_of(asked, units)
    answer = ChatCompletion.model_validate(json.loads(body_of(asked.wire.writes)))
    assert shown(answer.choices[0].message, answer.choices[0].finish_reason) == expected
    assert choice["message"]["content"] == (None if calls and not content else content)
    assert ("tool_calls" in choice["message"]) == bool(calls)


@given(answer_units(), st.data())
def test_every_event_id_gets_the_rest(units: list[AnswerUnit], data: st.DataObject) -> None:
    """In the middle of a call, too: its id and name are not said again, nor is the role."""
    asked = AskedChat(chat(is_resumable=True))
    say(asked, units, data)
    expected = expected_of(asked, units)
    events = asked.events
    last = data.draw(st.integers(0, len(events) - 1))
    request = HttpRequest(headers={b"last-event-id": events[last][0].encode()})
    plan = plan_or_resume(request, "chatcmpl", CARD, chat)
    [cursor] = parse_event_id(events[last][0]).cursors
    begins = [
        sum(len(unit.text) for unit in units[:at]) == cursor.num_chars
        and sum(unit.num_tokens for unit in units[:at]) == cursor.num_tokens
        for at in range(len(units) + 1)
    ]
    assert any(begins)  # an id is at a unit
    again = AskedChat(plan)
    say(again, units, data, begins.index(True))
    if last == len(events) - 1:
        assert again.events == events[-1:]
    else:
        assert accumulated(events[: last + 1] + again.events) == expected


def test_the_chunks_of_an_answer() -> None:
    """Kinds are written by the broadcast, and units of several events as one chunk each."""
    asked = AskedChat(chat())
    stream_id = asked.plan.states[0].stream_id
    told: list[tuple[str, int, tuple[AnswerEvent, ...] | None]] = [
        ("<think>", 0, ()),
        ("hm", REASONING, None),
        ("</think>So", 0, (AnswerEvent(CONTENT, "So"),)),
        (" \u2028", CONTENT, None),
        ('<c>look{"', 0, (AnswerEvent(BEGINS, "look", 0), AnswerEvent(ARGUMENTS, '{"', 0))),
        ('a": 1', ARGUMENTS, None),
        (
            "}</c><c>now{",
            0,
            (
                AnswerEvent(ARGUMENTS, "}", 0),
                AnswerEvent(ENDS, "", 0),
                AnswerEvent(BEGINS, "now", 1, "own"),
                AnswerEvent(ARGUMENTS, "{", 1),
            ),
        ),
        ("}", ARGUMENTS | 1 << 8, None),
        ("</c>", 0, (AnswerEvent(ENDS, "", 1),)),
    ]
    num_chars = 0
    for tokens, (text, kind, events) in enumerate(told):
        asked.table.say(Entry(asked.handle, text, num_chars, tokens, [7], None, kind, events))
        num_chars += len(text)
    asked.table.say(Entry(asked.handle, "", num_chars, len(told), [7], End("stop", 10)))
    first = {"index": 0, "id": call_id(stream_id, 0), "type": "function"}
    second = {"index": 1, "id": "own", "type": "function"}
    assert asked.deltas == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm", "reasoning": "hm"},
        {"content": "So"},
        {"content": " \u2028"},
        {"tool_calls": [{**first, "function": {"name": "look", "arguments": '{"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'a": 1'}}]},
        {
            "tool_calls": [
                {"index": 0, "function": {"arguments": "}"}},
                {**second, "function": {"name": "now", "arguments": "{"}},
            ]
        },
        {"tool_calls": [{"index": 1, "function": {"arguments": "}"}}]},
        {},
    ]
    assert asked.events[-2][1]["choices"][0]["finish_reason"] == "tool_calls"


CALL = (AnswerEvent(BEGINS, "f"), AnswerEvent(ARGUMENTS, "{}"), AnswerEvent(ENDS))


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("events", "end", "reason"),
    [
        (CALL, End("stop", 1), "tool_calls"),
        (CALL, End("stop", 1, 7), "tool_calls"),  # the id that ends a call may be a stop id
        (CALL, End("stop", 1, "###"), "stop"),  # the request ended it, and not the model
        (CALL, End("length", 1), "length"),
        (CALL[:2], End("stop", 1), "stop"),  # the call is incomplete
        (CALL[:2], End("length", 1), "length"),
    ],
)
def test_finish_reasons(
    events: tuple[AnswerEvent, ...], end: End, reason: str, is_stream: bool
) -> None:
    asked = AskedChat(chat(stream=is_stream))
    asked.table.say(Entry(asked.handle, "f{}", ids=[1], end=end, events=events))
    body = body_of(asked.wire.writes)
    last = identified_events(body)[-2][1] if is_stream else json.loads(body)
    assert last["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("choice", "end", "reason"),
    [
        (LOOK, End("stop", 1), "stop"),
        (LOOK, End("length", 1), "length"),
        ("required", End("stop", 1), "tool_calls"),
        ("auto", End("stop", 1), "tool_calls"),
    ],
)
def test_a_named_call_finishes_as_openais_do_where_that_is_wanted(
    choice: Any, end: End, reason: str, is_stream: bool
) -> None:
    asked = AskedChat(
        chat(stream=is_stream, is_resumable=is_stream, tool_choice=choice, strict_finish=True)
    )
    asked.table.say(Entry(asked.handle, "f{}", ids=[1], end=end, events=CALL))
    body = body_of(asked.wire.writes)
    if not is_stream:
        assert json.loads(body)["choices"][0]["finish_reason"] == reason
        return
    events = identified_events(body)
    assert events[-2][1]["choices"][0]["finish_reason"] == reason
    request = HttpRequest(headers={b"last-event-id": events[1][0].encode()})  # before the end
    same = partial(chat, tool_choice=choice)  # at a front without the option
    again = AskedChat(plan_or_resume(request, "chatcmpl", CARD, same))
    again.table.say(Entry(again.handle, "", 3, 1, [], end))
    assert again.events[-2][1]["choices"][0]["finish_reason"] == reason


def test_a_model_without_a_format_answers_in_text() -> None:
    """Beside a stream that is read as events in the same messages."""
    table, plans = Table(), [chat(), chat(), plan_completion(read_completion(TEXT), CARD)]
    wires = [Wire() for _ in plans]
    for plan, wire in zip(plans, wires, strict=True):
        wire.exchange = Exchange(HttpRequest(), wire)  # type: ignore[arg-type]
        context = AnswerContext(table, TextsByModel(lambda _: "nowhere"), Limits(), table.broadcast)
        start_answer(plan, wire.exchange, context)
    handles = [plan.states[0].handle for plan in plans]
    for at in range(3):
        table.say(
            Entry(handles[0], "<c>", 3 * at, at, [7]),
            Entry(handles[1], "abc", 3 * at, at, [7], kind=REASONING),
            Entry(handles[2], "def", 3 * at, at, [7]),
        )
    table.say(
        *(Entry(handle, "", 9, 3, [], end=End("stop", 3)) for handle in handles),
    )
    texts = []
    for wire in wires:
        choices = [data["choices"][0] for _, data in identified_events(body_of(wire.writes))[:-1]]
        shown = [each.get("delta", each) for each in choices]
        texts.append([{**each}.get("text", each.get("content")) for each in shown])
        assert choices[-1]["finish_reason"] == "stop"
        assert len(wire.writes) == len(choices) + 2  # head and [DONE]
    assert texts[0] == ["", *["<c>"] * 3, None]
    assert texts[1] == ["", None, None, None, None]
    assert texts[2] == ["def", "def", "def", ""]


TEXT = b'{"prompt": "x", "stream": true}'


TOKENS = [b"h", b"m", b"</t>", b"y", b"e", b"s", b"\xc3", b"\xa9", b"<c>", b'{"', b"<eos>"]
SHOWN = ["h", "m", "</t>", "y", "e", "s", "\\xc3", "\\xa9", "<c>", '{"', "<eos>"]


def columns(ids: Sequence[int]) -> LogprobColumns:
    """Log-probabilities of tokens, each without other candidates."""
    values = [-each for each in ids]
    return LogprobColumns(1, pack_f32(values), pack_u32(ids), pack_u32([1] * len(ids)))


async def asked_for_logprobs(plan: AnswerPlan) -> Asked:
    """An answer of all `TOKENS`, a message for each part."""
    asked = AskedChat(plan)
    for number, (raw, text) in enumerate(zip(TOKENS, SHOWN, strict=True)):
        asked.texts._known[number] = TokenText(text, text, raw, is_added=len(raw) > 2)
    border = (
        AnswerEvent(REASONING, "m", num_tokens=1),
        AnswerEvent(CONTENT, "y", num_tokens=1, num_before=1),
    )
    last = len(TOKENS) - 1
    begin = 0
    for ids, text, kind, events in (
        ([0], "h", REASONING, None),
        ([1, 2, 3], "m</t>y", 0, border),
        ([4, 5], "es", CONTENT, None),
        ([6, 7], "é", CONTENT, None),
        ([8], "", 0, ()),  # a special token that is not shown
        ([9], '{"', ARGUMENTS, None),
        ([last], "", 0, ()),
    ):
        end = End("stop", len(TOKENS)) if ids == [last] else None
        entry = Entry(asked.handle, text, begin, ids[0], ids, end, kind, events)
        asked.table.say(entry, logprobs=columns(ids))
        begin += len(text)
    patience = Patience()
    while asked.exchange.is_open:
        patience.check()
        await asyncio.sleep(0)
    return asked


@pytest.mark.parametrize("scope", ["content", "all", None])
@pytest.mark.parametrize("form", ["stream", "resumable", "whole"])
def test_log_probabilities_are_those_of_content(scope: str | None, form: str) -> None:
    fields: dict[str, Any] = {"stream": form != "whole", "logprobs": True}
    fields |= {} if scope is None else {"logprobs_scope": scope}
    plan = chat(is_resumable=form == "resumable", **fields)
    asked = asyncio.run(asked_for_logprobs(plan))
    body = body_of(asked.wire.writes)
    events = identified_events(body)[:-1] if form != "whole" else [("", json.loads(body))]
    found = [
        entry["token"]
        for _, data in events
        for entry in (data["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert found == (SHOWN if scope == "all" else SHOWN[3:8])
    if form == "resumable":
        ids = [parse_event_id(each) for each, _ in events]
        assert {each.has_all_logprobs for each in ids} == {scope == "all"}
