"""A whole tool loop over HTTP: every process is real, and only the device plays its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI
from tests.helpers.chat_message import accumulated
from tests.helpers.http_answer import identified_events
from tests.helpers.http_front import Raw
from tests.helpers.played_responses import ARGUMENTS, CALLS, openai_client, port_of

from slipstream import Stack

PATCH: Any = {"type": "custom", "custom": {"name": "patch", "description": "Patches."}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
USER: Any = {"role": "user", "content": "How is the weather in Zürich and Oslo?"}


@pytest.fixture
def client(calling_stack: Stack) -> Iterator[OpenAI]:
    with openai_client(calling_stack) as client:
        yield client


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_tool_loop_of_the_openai_client(client: OpenAI, is_stream: bool) -> None:
    messages = [USER]
    options: dict[str, Any] = {"model": "played", "tools": [WEATHER], "max_tokens": 400}
    if is_stream:
        with client.chat.completions.stream(messages=messages, **options) as stream:
            completion: Any = stream.get_final_completion()
    else:
        completion = client.chat.completions.create(messages=messages, **options)
    [choice] = completion.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content or "").strip() == ""
    assert message.model_extra["reasoning_content"] == "Two cities: I ask for both."
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == ARGUMENTS
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        assert call.function.name == "weather"
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "snow"})
    completion = client.chat.completions.create(messages=messages, **options)
    [choice] = completion.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "It snows in both.")
    assert choice.message.tool_calls is None


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_custom_tool_is_called(client: OpenAI, is_stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Patch it."}]
    options: dict[str, Any] = {"model": "played", "tools": [WEATHER, PATCH], "max_tokens": 400}
    if is_stream:
        call: Any = None
        for chunk in client.chat.completions.create(messages=messages, stream=True, **options):
            reason = chunk.choices[0].finish_reason
            for part in chunk.choices[0].delta.tool_calls or ():
                piece: dict[str, Any] = part.model_dump(exclude_unset=True)
                assert piece.pop("index") == 0
                if call is None:
                    call = piece
                else:
                    assert piece.keys() == {"custom"}
                    call["custom"]["input"] += piece["custom"]["input"]
    else:
        [choice] = client.chat.completions.create(messages=messages, **options).choices
        [found] = choice.message.tool_calls or ()
        call, reason = found.model_dump(exclude_unset=True), choice.finish_reason
    call_id = call.pop("id")
    assert call == {"type": "custom", "custom": {"name": "patch", "input": 'a\n"b" 🏔'}}
    assert reason == "tool_calls"
    messages.append({"role": "assistant", "tool_calls": [{"id": call_id, **call}]})
    messages.append({"role": "tool", "tool_call_id": call_id, "content": "snow"})
    [choice] = client.chat.completions.create(messages=messages, **options).choices
    assert choice.message.content == "It snows in both."


def test_without_tools_calls_are_text(client: OpenAI) -> None:
    for options in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        completion: Any = client.chat.completions.create(
            model="played", messages=[USER], max_tokens=400, **options
        )
        [choice] = completion.choices
        assert choice.finish_reason == "stop"
        assert choice.message.content == CALLS.partition("</think>\n")[2]
        assert choice.message.model_extra["reasoning"] == "Two cities: I ask for both."


def test_a_call_is_resumed_in_the_middle_of_an_argument(calling_stack: Stack) -> None:
    """The connection breaks there."""
    body = {"messages": [USER], "tools": [WEATHER], "stream": True, "max_tokens": 400}
    accept, path = "Accept: text/event-stream", "/v1/chat/completions"
    said = b""
    with Raw(port_of(calling_stack)) as raw:
        raw.post(path, body, accept)
        raw.read(with_body=False)
        while b"arguments" not in said:
            said += raw.read_chunk()
    events = identified_events(said)
    with Raw(port_of(calling_stack)) as raw:
        raw.post(path, body, accept, f"Last-Event-ID: {events[-1][0]}")
        answer = raw.read()
    assert answer.status == 200, answer.body
    _, reasoning, calls, reason = accumulated(events + identified_events(answer.body))
    assert (reasoning, reason) == ("Two cities: I ask for both.", "tool_calls")
    assert [json.loads(arguments) for _, _, arguments in calls] == ARGUMENTS
