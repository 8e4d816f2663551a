"""Custom tools of chats: offered as functions, answered as calls of custom tools."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.api_errors import ApiError
from slipstream.http.openai.answer_parts import parts_of
from slipstream.http.openai.chat_tools import functions_of, with_functions
from slipstream.http.openai.chat_turns import chat_of_turns
from slipstream.http.openai.custom_tools import CustomCalls
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.request_bodies import ChatRequest
from slipstream.http.planning.chat import read_chat
from slipstream_ipc.messages import AnswerEvent, EventKind

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
WEATHER: Any = {"type": "function", "function": {"name": "weather"}}
USER: Any = {"role": "user", "content": "x"}
BEGINS, ARGUMENTS, ENDS = EventKind.CALL_BEGINS, EventKind.CALL_ARGUMENTS, EventKind.CALL_ENDS


def chat(ignored: IgnoredFields | None = None, **fields: Any) -> ChatRequest:
    return read_chat(msgspec.json.encode({"messages": [USER], **fields}), ignored)


def grammar(syntax: str) -> Any:
    form = {"type": "grammar", "grammar": {"syntax": syntax, "definition": "[a-z]+"}}
    return {"type": "custom", "custom": {"name": "x", "format": form}}


def test_a_custom_tool_is_offered_as_a_function() -> None:
    body, names = with_functions(chat(tools=[WEATHER, PATCH]))
    assert body.tools is not None
    weather, patch = body.tools
    assert (weather, names) == (WEATHER, {"patch"})
    assert (patch["type"], patch["function"]["name"]) == ("function", "patch")
    assert patch["function"]["parameters"]["required"] == ["input"]
    assert with_functions(body)[0] == body
    plain = chat(tools=[WEATHER])
    assert with_functions(plain) == (plain, frozenset())


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            {"type": "custom", "custom": {"name": "patch"}},
            {"type": "function", "function": {"name": "patch"}},
        ),
        ("required", "required"),
        (None, None),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [PATCH, WEATHER]}},
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "auto",
                    "tools": [{"type": "function", "function": {"name": "patch"}}, WEATHER],
                },
            },
        ),
    ],
)
def test_a_choice_names_the_function(choice: Any, expected: Any) -> None:
    assert with_functions(chat(tools=[PATCH], tool_choice=choice))[0].tool_choice == expected


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "custom"}], "tools[0].custom"),
        ([WEATHER, {"type": "custom", "custom": {}}], "tools[1].custom.name"),
        ([PATCH, PATCH], "tools[0].custom.name"),
        (
            [{"type": "function", "function": {"name": "patch"}}, PATCH],
            "tools[1].custom.name",
        ),
        ([grammar("gbnf")], "tools[0].custom.format"),
    ],
)
def test_a_wrong_tool_is_refused(tools: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        with_functions(chat(IgnoredFields(), tools=tools))
    assert caught.value.body.error.param == param


@pytest.mark.parametrize(
    ("syntax", "choice", "is_named"),
    [
        ("lark", None, True),
        ("lark", "required", True),
        ("regex", None, False),
        ("regex", "required", False),
        ("regex", {"type": "custom", "custom": {"name": "x"}}, False),
        ("regex", {"type": "allowed_tools", "allowed_tools": {"mode": "auto"}}, False),
        ("regex", {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}, False),
    ],
)
def test_formats_that_are_no_patterns_are_named(syntax: str, choice: Any, is_named: bool) -> None:
    ignored = IgnoredFields()
    tools = [grammar(syntax)]
    chat(ignored, tools=tools, tool_choice=choice)
    assert str(ignored) == ("tools.custom.format" if is_named else "")
    if is_named:  # --strict-fields
        with pytest.raises(ApiError):
            chat(None, tools=tools, tool_choice=choice)


def test_histories_are_read() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'a\n"b"'}}
    turns = [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    _, turn, _ = chat_of_turns(chat(messages=turns).messages, None)[0].messages
    assert turn.tool_calls is not None
    [found] = turn.tool_calls
    assert (found.id, found.type, found.function.name) == ("c", "function", "patch")
    assert json.loads(found.function.arguments) == {"input": 'a\n"b"'}


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_call_of_nothing_is_refused(kind: str) -> None:
    turns = [USER, {"role": "assistant", "tool_calls": [{"id": "c", "type": kind}]}]
    with pytest.raises(ApiError, match=r"messages\[1\].tool_calls\[0\].") as caught:
        chat_of_turns(chat(messages=turns).messages, None)
    assert caught.value.body.error.param == f"messages[1].tool_calls[0].{kind}"


def test_tools_of_other_forms_stay_as_they_are() -> None:
    assert functions_of([WEATHER, {"type": "x"}, {}]) == (WEATHER, {"type": "x"}, {})


def call_events(number: int, name: str, arguments: str, *, ends: bool) -> list[AnswerEvent]:
    found = [AnswerEvent(BEGINS, name, number, f"call_{number}")]
    found += [AnswerEvent(ARGUMENTS, sign, number) for sign in arguments]
    return found + ([AnswerEvent(ENDS, "", number)] if ends else [])


@given(st.text('ab"\\\né🏔', max_size=8), st.booleans(), st.data())
def test_chunks_add_up_to_the_message(text: str, ends: bool, data: st.DataObject) -> None:
    events = call_events(0, "weather", '{"a": 1}', ends=True)
    events += call_events(1, "patch", json.dumps({"input": text}), ends=True)
    events += call_events(2, "patch", json.dumps({"why": 1, "input": text}), ends=ends)
    whole = parts_of(events, CustomCalls(("patch",)), is_last=True).message()
    assert not isinstance(whole.tool_calls, msgspec.UnsetType)
    weather, first, second = json.loads(msgspec.json.encode(whole.tool_calls))
    assert weather["function"] == {"name": "weather", "arguments": '{"a": 1}'}
    assert first == {
        "id": "call_1",
        "type": "custom",
        "custom": {"name": "patch", "input": text},
    }
    assert second["custom"]["input"] == text

    places = sorted(data.draw(st.sets(st.integers(0, len(events)), max_size=6)))
    customs = CustomCalls(("patch",))
    found: dict[int, dict[str, Any]] = {}
    cuts = list(zip([0, *places], [*places, len(events)], strict=True))
    for begin, end in cuts:
        is_last = (begin, end) == cuts[-1]
        delta = parts_of(events[begin:end], customs, is_last=is_last).delta()
        for call in json.loads(msgspec.json.encode(delta)).get("tool_calls", ()):
            at = call.pop("index")
            if at not in found:
                found[at] = call
                continue
            assert call.keys() <= {"custom", "function"}
            for kind, part in call.items():
                field = "input" if kind == "custom" else "arguments"
                found[at][kind][field] += part[field]
    assert list(found.values()) == [weather, first, second]
