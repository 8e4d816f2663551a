"""POST /v1/messages over HTTP: every process is real but where a worker is asked nothing, and the
device plays its answers. tests/system/streams kills them in the middle of one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tests.helpers.http_front import Answer, Front, Raw
from tests.helpers.message_events import by_number, content_of, named_events, read_into_a_call
from tests.helpers.played_responses import ARGUMENTS, LONG, port_of

from slipstream import Stack

PATH = "/v1/messages"
EVENTS = "Accept: text/event-stream"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"name": "note", "input_schema": {}}]
USER: Any = {"role": "user", "content": "How is the weather in Zürich and Oslo?"}
BODY: dict[str, Any] = {"model": "played", "max_tokens": 400, "messages": [USER], "tools": TOOLS}
NOTE = {**BODY, "max_tokens": 2000, "messages": [{"role": "user", "content": "Note it."}]}


@pytest.fixture
def port(calling_stack: Stack) -> int:
    return port_of(calling_stack)


def ask(port: int, body: dict[str, Any], *headers: str, path: str = PATH) -> Answer:
    with Raw(port) as raw:
        raw.post(path, body, *headers)
        return raw.read()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_tool_loop(port: int, is_stream: bool) -> None:
    answer = ask(port, {**BODY, "stream": is_stream})
    assert answer.status == 200, answer.body
    if is_stream:
        events = named_events(answer.body)
        content, last = content_of(events)
        inputs = [json.loads(text) for kind, text, _, _ in content if kind == "tool_use"]
        ids = [each for _, _, each, _ in content if each]
        thoughts = [text for kind, text, _, _ in content if kind == "thinking"]
        assert last["delta"]["stop_reason"] == "tool_use"
        blocks = [
            {"type": "tool_use", "id": each, "name": "weather", "input": tool_input}
            for each, tool_input in zip(ids, inputs, strict=True)
        ]
    else:
        blocks = [block for block in answer.json["content"] if block["type"] == "tool_use"]
        inputs, ids = [[block[name] for block in blocks] for name in ("input", "id")]
        [thought, *_] = answer.json["content"]
        assert thought["signature"] == ""
        thoughts = [thought["thinking"]]
        assert answer.json["stop_reason"] == "tool_use"
        assert (answer.json["role"], answer.json["type"]) == ("assistant", "message")
    assert inputs == ARGUMENTS
    assert thoughts == ["Two cities: I ask for both."]
    assert len(set(ids)) == 2
    results = [{"type": "tool_result", "tool_use_id": each, "content": "snow"} for each in ids]
    turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    answer = ask(port, {**BODY, "messages": turns})
    assert answer.json["stop_reason"] == "end_turn"
    assert [block.get("text") for block in answer.json["content"]] == [None, "It snows in both."]


def test_tokens_are_counted_as_they_are_used(port: int) -> None:
    body = {name: each for name, each in BODY.items() if name != "max_tokens"}
    counted = ask(port, body, path=f"{PATH}/count_tokens")
    assert counted.status == 200, counted.body
    usage = ask(port, BODY).json["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json == {"input_tokens": num_prompt}


def test_stop_sequences_and_limits(port: int) -> None:
    snow = {**BODY, "messages": [{"role": "user", "content": "snow"}]}
    answer = ask(port, {**snow, "stop_sequences": ["in both"]}).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "in both")
    assert answer["content"][-1]["text"] == "It snows "
    answer = ask(port, {**NOTE, "max_tokens": 60}).json
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {"day": 1}  # what is whole of it
    answer = ask(port, {**snow, "max_tokens": 1_000_000}).json
    assert answer["stop_reason"] == "end_turn"


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(port: int) -> None:
    """Claude Code looks for these words, and then shortens the conversation, or its max_tokens."""
    with Raw(port) as raw:
        [model] = raw.get("/v1/models").json["data"]
    most = model["max_model_len"] - 1

    def asked(num_words: int, path: str = PATH, max_tokens: int = 9) -> Answer:
        turn = {"role": "user", "content": "word " * num_words}
        body = {"model": "played", "max_tokens": max_tokens, "messages": [turn]}
        answer = ask(port, body, path=path)
        assert answer.status == 400, answer.body
        return answer

    for num_words in (most + 1, 100 * most):  # the second is counted in part
        error = asked(num_words).json["error"]
        assert error["type"] == "invalid_request_error"
        found = re.fullmatch(r"prompt is too long: (\d+) tokens > (\d+) maximum", error["message"])
        assert found is not None, error
        assert int(found[1]) > int(found[2]) == most
        theirs = asked(num_words, "/v1/chat/completions").error["message"]
        assert theirs.startswith("messages: got "), theirs
    turn = {"role": "user", "content": "word " * 50}
    counted = ask(port, {"model": "played", "messages": [turn]}, path=f"{PATH}/count_tokens")
    num = counted.json["input_tokens"]
    begin = f"input length and `max_tokens` exceed context limit: {num} + {most} > {most + 1}"
    assert asked(50, max_tokens=most).json["error"]["message"].startswith(begin)
    assert asked(50, "/v1/chat/completions", most).error["message"].startswith("max_tokens: got ")


@pytest.mark.parametrize("way", ["POST", "GET"])
def test_a_call_is_resumed_in_the_middle_of_its_input(port: int, way: str) -> None:
    body = {**NOTE, "stream": True}
    with Raw(port) as raw:
        events = named_events(read_into_a_call(raw, body))
    answer_id, last = events[0][1]["message"]["id"], f"Last-Event-ID: {events[-1][0]}"
    with Raw(port) as raw:
        if way == "POST":
            raw.post(PATH, body, EVENTS, last)
            rest = raw.read()
        else:
            rest = raw.get(f"/v1/streams/{answer_id}", last)
        whole = raw.get(f"/v1/streams/{answer_id}")
    assert rest.status == 200, rest.body
    events += named_events(rest.body)
    content, last_delta = content_of(events)
    [(_, text, _, name)] = content
    assert (json.loads(text), name) == ({"day": 1, "text": LONG}, "note")
    assert last_delta["delta"]["stop_reason"] == "tool_use"
    assert by_number(named_events(whole.body)) == by_number(events)


def test_nothing_is_left_after_the_last_event(port: int) -> None:
    events = named_events(ask(port, {**BODY, "stream": True}, EVENTS).body)
    again = ask(port, {**BODY, "stream": True}, EVENTS, f"Last-Event-ID: {events[-1][0]}")
    assert (again.status, again.body) == (200, b"")


def test_an_event_of_another_request_or_path_is_refused(port: int) -> None:
    body = {**BODY, "stream": True}
    events = named_events(ask(port, body, EVENTS).body)
    last = f"Last-Event-ID: {events[3][0]}"
    assert ask(port, {**body, "max_tokens": 7}, EVENTS, last).status == 409
    chat = {"messages": [USER], "stream": True}
    refused = ask(port, chat, EVENTS, last, path="/v1/chat/completions")
    assert (refused.status, refused.error["param"]) == (400, "last-event-id")


def fields_of(answer: Answer) -> tuple[int, str]:
    """Status and type of an error; asserts that it has Anthropic's shape."""
    assert set(answer.json) == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) - {"details"} == {"type", "message"}
    assert answer.json["request_id"] == answer.headers["request-id"]
    return answer.status, answer.json["error"]["type"]


def test_errors_have_anthropics_shape(front: Front) -> None:
    port = front.port
    with Raw(port) as raw:
        found = fields_of(raw.get(PATH))
    assert found == (405, "invalid_request_error")
    with Raw(port) as raw:
        found = fields_of(raw.get(f"{PATH}/nothing"))
    assert found == (404, "not_found_error")
    assert fields_of(ask(port, {**BODY, "model": "other"})) == (404, "not_found_error")
    limitless = {**BODY, "model": "fake", "max_tokens": 0}
    assert fields_of(ask(port, limitless)) == (400, "invalid_request_error")
    counted = ask(port, {**BODY, "model": "other"}, path=f"{PATH}/count_tokens")
    assert fields_of(counted) == (404, "not_found_error")
    with Raw(port) as raw:
        raw.send(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\n")
        assert fields_of(raw.read()) == (415, "invalid_request_error")
    with Raw(port) as raw:
        raw.send(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 99999999999\r\n\r\n"
        )
        assert fields_of(raw.read()) == (413, "request_too_large")


def test_unknown_fields_are_named(port: int) -> None:
    answer = ask(port, {**BODY, "nonsense": 1})
    assert answer.status == 200
    assert answer.headers["x-slipstream-ignored-fields"] == "nonsense"


def test_keys_are_taken_from_either_header(played: Any) -> None:
    front = Front(played.address, api_keys=("right",), strict_fields=True)
    try:
        for header, status in (
            ("x-api-key: right", 400),
            ("Authorization: Bearer right", 400),
            ("x-api-key: wrong", 401),
            ("X-Nothing: right", 401),
        ):
            with Raw(front.port) as raw:
                raw.post(PATH, {**BODY, "nonsense": 1}, header, "anthropic-version: 2023-06-01")
                answer = raw.read()
            kind = "invalid_request_error" if status == 400 else "authentication_error"
            assert fields_of(answer) == (status, kind)
    finally:
        front.stop()
