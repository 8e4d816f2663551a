"""Responses of a stack that plays its answers, as the official client and raw HTTP see them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel
from tests.helpers.http_front import Raw
from tests.helpers.played_responses import (
    ACCEPT,
    ARGUMENTS,
    BODY,
    PATH,
    USER,
    WEATHER,
    openai_client,
    port_of,
)
from tests.helpers.response_events import response_events, with_joined_deltas

from slipstream import Stack


class Weather(BaseModel):
    """What an answer in JSON holds."""

    city: str
    degrees: int


@pytest.fixture
def client(calling_stack: Stack) -> Iterator[OpenAI]:
    with openai_client(calling_stack) as client:
        yield client


@pytest.fixture
def raw(calling_stack: Stack) -> Iterator[Raw]:
    with Raw(port_of(calling_stack)) as connection:
        yield connection


def asked(client: OpenAI, *, is_stream: bool, **options: Any) -> Any:
    """The response of the client, streamed or whole."""
    if not is_stream:
        return client.responses.create(model="played", **options)
    with client.responses.stream(model="played", **options) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_tool_loop_of_the_openai_client(client: OpenAI, is_stream: bool) -> None:
    options: dict[str, Any] = {"tools": [WEATHER], "max_output_tokens": 400, "store": False}
    items: list[Any] = [USER]
    response = asked(client, is_stream=is_stream, input=items, **options)
    reasoning, *calls = response.output
    assert response.status == "completed"
    assert reasoning.content[0].text == "Two cities: I ask for both."
    assert [json.loads(call.arguments) for call in calls] == ARGUMENTS
    assert {call.status for call in calls} == {"completed"}
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    items += response.output
    for call in calls:
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "snow"}
        items.append(output)
    response = asked(client, is_stream=is_stream, input=items, **options)
    assert response.output_text == "It snows in both."
    assert [item.type for item in response.output] == ["reasoning", "message"]


def test_the_parse_helper(client: OpenAI) -> None:
    response = client.responses.parse(model="played", input="as JSON", text_format=Weather)
    assert response.output_parsed == Weather(city="Oslo", degrees=-3)


def test_a_streamed_response_is_the_whole_one(raw: Raw) -> None:
    raw.post(PATH, {**BODY, "stream": True})
    events = [data for _, data in response_events(raw.read().body)]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == 0
    streamed = events[-1]["response"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == streamed["output"]
    raw.post(PATH, BODY)
    whole = raw.read().json
    assert set(whole) == set(streamed)
    for name in ("status", "usage", "tools", "temperature"):
        assert whole[name] == streamed[name] or name == "usage", name
    for ours, theirs in zip(whole["output"], streamed["output"], strict=True):
        for item in (ours, theirs):
            item.pop("id"), item.pop("call_id", None)
        assert ours == theirs


def test_a_limit_makes_it_incomplete(client: OpenAI) -> None:
    response = client.responses.create(model="played", input="snow", max_output_tokens=5)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("is_stream", [True, False])
def test_log_probabilities_are_those_of_the_text(client: OpenAI, is_stream: bool) -> None:
    response = asked(
        client,
        is_stream=is_stream,
        input="snow",
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    [part] = response.output[-1].content
    shown = "".join([token.token for token in part.logprobs])
    assert part.text in shown
    assert {len(token.top_logprobs) for token in part.logprobs} <= {2, 3}


def test_a_response_with_log_probabilities_has_no_event_ids(raw: Raw) -> None:
    raw.post(PATH, {**BODY, "input": "snow", "stream": True, "top_logprobs": 1}, ACCEPT)
    events = response_events(raw.read().body)
    assert {event_id for event_id, _ in events} == {""}
    [done] = [data for _, data in events if data["type"] == "response.output_text.done"]
    assert done["logprobs"] == events[-1][1]["response"]["output"][-1]["content"][0]["logprobs"]
    assert done["logprobs"]


def test_an_answer_goes_on_after_each_event(calling_stack: Stack, raw: Raw) -> None:
    """By Last-Event-ID, in the middle of reasoning and of arguments too."""
    raw.post(PATH, {**BODY, "stream": True}, ACCEPT)
    events = response_events(raw.read().body)
    whole = with_joined_deltas(events)
    for number in range(0, len(events) - 1, 7):
        with Raw(port_of(calling_stack)) as again:
            again.post(
                PATH, {**BODY, "stream": True}, ACCEPT, f"Last-Event-ID: {events[number][0]}"
            )
            rest = response_events(again.read().body)
        assert with_joined_deltas(events[: number + 1] + rest) == whole


def test_what_is_not_supported_is_said(client: OpenAI) -> None:
    for options in (
        {"tools": [WEATHER], "tool_choice": {"type": "web_search"}},
        {"conversation": "conv_1"},
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        {"background": True, "store": False},
    ):
        given: Any = {"input": "x", **options}
        with pytest.raises(BadRequestError):
            client.responses.create(model="played", **given)
    with pytest.raises(NotFoundError):
        client.responses.create(model="other", input="x")


def test_many_tools_that_are_allowed_take_no_front_along(raw: Raw) -> None:
    tools = [{"type": "function", "name": f"f{number}"} for number in range(15_000)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": tools[::-1]}
    raw.post(PATH, {**BODY, "tools": tools, "tool_choice": choice})
    answer = raw.read()
    assert (answer.status, answer.error["param"]) == (400, "tools")
    assert "allowed: at most" in answer.error["message"]


def test_unknown_fields_are_named(raw: Raw) -> None:
    raw.post(PATH, {**BODY, "max_tokens": 5})
    answer = raw.read()
    assert answer.status == 200
    assert "max_tokens" in answer.headers["x-slipstream-ignored-fields"]
