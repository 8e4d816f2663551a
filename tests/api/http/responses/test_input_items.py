"""Items of a response's input become turns of a chat."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.api_errors import ApiError
from slipstream.http.openai.chat_turns import chat_of_turns
from slipstream.http.responses.input_items import InputItem, check_items, input_items, turns_of
from slipstream.http.responses.responses_request import read_response_request

USER = {"role": "user", "content": "x"}
REASONING = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
    "encrypted_content": None,
    "status": "completed",
}
MESSAGE = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": []}],
}


def call(number: int) -> dict[str, Any]:
    return {
        "type": "function_call",
        "id": f"fc_{number}",
        "call_id": f"call_{number}",
        "name": "f",
        "arguments": '{"a": 1}',
        "status": "completed",
    }


def output(number: int) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"call_{number}", "output": "12"}


def turns(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    """The turns as a chat template gets them."""
    body = read_response_request(json.dumps({"input": list(items)}).encode())
    found = input_items(body.input or ())
    check_items(found)
    return msgspec.json.decode(
        msgspec.json.encode(chat_of_turns(turns_of(found, instructions), None)[0].messages)
    )


def test_text_is_a_users_message() -> None:
    assert turns_of(input_items("hi"), "Be brief.")[0].role == "system"
    [turn] = turns_of(input_items("hi"))
    assert (turn.role, turn.content) == ("user", "hi")


def test_what_an_answer_consists_of_is_one_turn() -> None:
    function = {"name": "f", "arguments": '{"a": 1}'}
    calls = [{"function": function, "id": f"call_{n}", "type": "function"} for n in (1, 2)]
    assert turns(USER, REASONING, MESSAGE, call(1), call(2), output(1), output(2)) == [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "So", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "12", "tool_call_id": "call_1"},
        {"role": "tool", "content": "12", "tool_call_id": "call_2"},
    ]


def test_turns_that_follow_one_another_stay_apart() -> None:
    texts = [(turn["role"], turn["content"]) for turn in turns(USER, USER, MESSAGE, MESSAGE)]
    assert texts == [("user", "x"), ("user", "x"), ("assistant", "So"), ("assistant", "So")]
    after_a_call = turns(USER, call(1), MESSAGE, REASONING, call(2))
    assert [len(turn.get("tool_calls", ())) for turn in after_a_call] == [0, 1, 0, 1]
    assert [turn.get("reasoning_content") for turn in after_a_call] == [None, None, None, "hm"]


def test_an_item_that_only_has_an_id_is_a_reference() -> None:
    """As in openai's `ItemReference`, whose type may be left out."""
    found = input_items(
        read_response_request(b'{"input": [{"id": "msg_1"}, {"type": null, "id": "rs_1"}]}').input
        or ()
    )
    assert [item.kind for item in found] == ["item_reference"] * 2


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}], "ab"),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
        ([], ""),
    ],
)
def test_content_is_text_or_parts(content: Any, text: str) -> None:
    [turn] = turns({"role": "assistant", "content": content})
    assert turn["content"] == text
    [turn] = turns({"type": "function_call_output", "call_id": "c", "output": content})
    assert turn["content"] == text


def test_a_summary_stands_for_reasoning_without_its_text() -> None:
    summary = [{"type": "summary_text", "text": "in short"}]
    [_, turn] = turns(
        USER,
        {"type": "reasoning", "id": "rs_1", "summary": summary},
    )
    assert turn["reasoning_content"] == "in short"


@pytest.mark.parametrize(
    ("item", "field"),
    [
        ({"role": "robot", "content": "x"}, "input[1].role"),
        ({"content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call", "name": "f"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "c"}, "input[1].output"),
        ({"type": "item_reference"}, "input[1].id"),
        ({"type": "telepathy_call", "id": "x"}, "input[1].type"),
        (
            {"role": "user", "content": [{"type": "input_file", "file_id": "f"}]},
            "input[1].content[0].type",
        ),
    ],
)
def test_what_is_refused_is_named(item: dict[str, Any], field: str) -> None:
    with pytest.raises(ApiError) as raised:
        turns(USER, item)
    assert raised.value.body.error.param == field
    assert raised.value.status == 400
    is_no_text = "content" in item and field.endswith("content[0].type")
    assert ("the model is served as text" in str(raised.value)) == is_no_text


ITEMS = st.lists(
    st.sampled_from([USER, REASONING, MESSAGE, call(1), output(1)]), min_size=1, max_size=8
)


@given(ITEMS)
def test_nothing_is_lost_or_reordered(items: list[dict[str, Any]]) -> None:
    found: list[str] = []
    for turn in turns(*items):
        if turn["role"] != "assistant":
            found.append(turn["role"])
            continue
        found += ["reasoning"] * (len(turn.get("reasoning_content", "")) // 2)
        found += ["assistant"] * bool(turn["content"])
        found += ["call"] * len(turn.get("tool_calls", ()))
    names = {"function_call": "call", "function_call_output": "tool", "reasoning": "reasoning"}
    assert found == [names.get(item.get("type", ""), item.get("role", "")) for item in items]


def test_items_are_checked_before_they_are_turns() -> None:
    with pytest.raises(ApiError):
        check_items([InputItem(type="telepathy_call")])
