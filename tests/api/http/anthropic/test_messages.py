"""POST /v1/messages over HTTP: every process is real, and only the device plays its answers."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.http_front import Answer, Front, Raw
from tests.helpers.message_events import by_number, content_of, named_events
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack

PATH = "/v1/messages"
EVENTS = "Accept: text/event-stream"
LONG = "It is cold 🏔, and windy. " * 40
CALLS = (
    "<think>Two cities: I ask for both.</think>\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich 🏔", "days": 2}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
)
LINES = [
    {"text": "<think>Both are here.</think>\nIt snows in both.", "when": "snow"},
    {
        "text": f'<tool_call>\n{{"name": "note", "arguments": {{"day": 1, "text": "{LONG}"}}}}\n'
        "</tool_call>",
        "when": "Note",
    },
    {"text": CALLS},
]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOLS = [{"name": "weather", "input_schema": SCHEMA}, {"name": "note", "input_schema": {}}]
USER: Any = {"role": "user", "content": "How is the weather in Zürich and Oslo?"}
BODY: dict[str, Any] = {"model": "played", "max_tokens": 400, "messages": [USER], "tools": TOOLS}
NOTE = {**BODY, "max_tokens": 2000, "messages": [{"role": "user", "content": "Note it."}]}
INPUTS = [{"city": "Zürich 🏔", "days": 2}, {"city": "Oslo"}]
FORMATS = {"tool_format": "hermes", "reasoning_format": "qwen3"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = Path(tmp_path_factory.mktemp("answers")) / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    model = f"simulated:step_ms=5,answers={path}"
    options: dict[str, Any] = {"served_model_name": "played", "grace_s": 600.0, **FORMATS}
    with spareless_stack(model, http_port=0, **options) as running:
        yield running


def connect(stack: Stack) -> Raw:
    return Raw(int(stack.http_address.rpartition(":")[2]))


def ask(stack: Stack, body: dict[str, Any], *headers: str, path: str = PATH) -> Answer:
    with connect(stack) as raw:
        raw.post(path, body, *headers)
        return raw.read()


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_tool_loop(stack: Stack, is_stream: bool) -> None:
    answer = ask(stack, {**BODY, "stream": is_stream})
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
    assert inputs == INPUTS
    assert thoughts == ["Two cities: I ask for both."]
    assert len(set(ids)) == 2
    results = [{"type": "tool_result", "tool_use_id": each, "content": "snow"} for each in ids]
    turns = [USER, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    answer = ask(stack, {**BODY, "messages": turns})
    assert answer.json["stop_reason"] == "end_turn"
    assert [block.get("text") for block in answer.json["content"]] == [None, "It snows in both."]


def test_tokens_are_counted_as_they_are_used(stack: Stack) -> None:
    body = {name: each for name, each in BODY.items() if name != "max_tokens"}
    counted = ask(stack, body, path=f"{PATH}/count_tokens")
    assert counted.status == 200, counted.body
    usage = ask(stack, BODY).json["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted.json == {"input_tokens": num_prompt}


def test_stop_sequences_and_limits(stack: Stack) -> None:
    snow = {**BODY, "messages": [{"role": "user", "content": "snow"}]}
    answer = ask(stack, {**snow, "stop_sequences": ["in both"]}).json
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "in both")
    assert answer["content"][-1]["text"] == "It snows "
    answer = ask(stack, {**NOTE, "max_tokens": 60}).json
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][-1]["input"] == {"day": 1}  # what is whole of it
    answer = ask(stack, {**snow, "max_tokens": 1_000_000}).json
    assert answer["stop_reason"] == "end_turn"


def test_a_prompt_that_is_too_long_is_refused_in_anthropics_words(stack: Stack) -> None:
    """Claude Code looks for these words, and then shortens the conversation, or its max_tokens."""
    with connect(stack) as raw:
        [model] = raw.get("/v1/models").json["data"]
    most = model["max_model_len"] - 1

    def asked(num_words: int, path: str = PATH, max_tokens: int = 9) -> Answer:
        turn = {"role": "user", "content": "word " * num_words}
        body = {"model": "played", "max_tokens": max_tokens, "messages": [turn]}
        answer = ask(stack, body, path=path)
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
    counted = ask(stack, {"model": "played", "messages": [turn]}, path=f"{PATH}/count_tokens")
    num = counted.json["input_tokens"]
    begin = f"input length and `max_tokens` exceed context limit: {num} + {most} > {most + 1}"
    assert asked(50, max_tokens=most).json["error"]["message"].startswith(begin)
    assert asked(50, "/v1/chat/completions", most).error["message"].startswith("max_tokens: got ")


def read_into_a_call(stack: Stack, raw: Raw, body: dict[str, Any]) -> bytes:
    """The first events of a stream, to the middle of a tool's input."""
    raw.post(PATH, body, EVENTS)
    raw.read(with_body=False)
    said = b""
    while said.count(b"partial_json") < 12:
        said += raw.read_chunk()
    return said


@pytest.mark.parametrize("way", ["POST", "GET"])
def test_a_call_is_resumed_in_the_middle_of_its_input(stack: Stack, way: str) -> None:
    body = {**NOTE, "stream": True}
    with connect(stack) as raw:
        events = named_events(read_into_a_call(stack, raw, body))
    answer_id, last = events[0][1]["message"]["id"], f"Last-Event-ID: {events[-1][0]}"
    with connect(stack) as raw:
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


def test_nothing_is_left_after_the_last_event(stack: Stack) -> None:
    events = named_events(ask(stack, {**BODY, "stream": True}, EVENTS).body)
    again = ask(stack, {**BODY, "stream": True}, EVENTS, f"Last-Event-ID: {events[-1][0]}")
    assert (again.status, again.body) == (200, b"")


def test_an_event_of_another_request_or_path_is_refused(stack: Stack) -> None:
    body = {**BODY, "stream": True}
    events = named_events(ask(stack, body, EVENTS).body)
    last = f"Last-Event-ID: {events[3][0]}"
    assert ask(stack, {**body, "max_tokens": 7}, EVENTS, last).status == 409
    chat = {"messages": [USER], "stream": True}
    refused = ask(stack, chat, EVENTS, last, path="/v1/chat/completions")
    assert (refused.status, refused.error["param"]) == (400, "last-event-id")


@pytest.mark.process
@pytest.mark.parametrize("dead", [["worker"], ["core"], ["http"], ["http", "worker", "core"]])
def test_deaths_in_the_middle_of_an_input_change_nothing(stack: Stack, dead: list[str]) -> None:
    body = {**NOTE, "stream": True}
    with connect(stack) as raw:
        said = read_into_a_call(stack, raw, body)
        pids = dict(stack.pids)
        for name in dead:
            os.kill(pids[name], signal.SIGKILL)
        if "http" not in dead:
            while chunk := raw.read_chunk():
                said += chunk
    events = named_events(said)
    if "http" in dead:
        patience = Patience()
        answer = None
        while answer is None or answer.status == 503:
            patience.wait(answer and answer.body)
            if stack.pids.get("http") in (None, pids["http"]):
                continue
            answer = ask(stack, body, EVENTS, f"Last-Event-ID: {events[-1][0]}")
        assert answer.status == 200, answer.body
        events += named_events(answer.body)
    content, _ = content_of(events)
    [(_, text, _, _)] = content
    assert json.loads(text) == {"day": 1, "text": LONG}
    assert list(by_number(events)) == list(range(len(by_number(events))))


def fields_of(answer: Answer) -> tuple[int, str]:
    """Status and type of an error; asserts that it has Anthropic's shape."""
    assert set(answer.json) == {"type", "error", "request_id"}
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) - {"details"} == {"type", "message"}
    assert answer.json["request_id"] == answer.headers["request-id"]
    return answer.status, answer.json["error"]["type"]


def test_errors_have_anthropics_shape(stack: Stack) -> None:
    with connect(stack) as raw:
        found = fields_of(raw.get(PATH))
    assert found == (405, "invalid_request_error")
    with connect(stack) as raw:
        found = fields_of(raw.get(f"{PATH}/nothing"))
    assert found == (404, "not_found_error")
    assert fields_of(ask(stack, {**BODY, "model": "other"})) == (404, "not_found_error")
    assert fields_of(ask(stack, {**BODY, "max_tokens": 0})) == (400, "invalid_request_error")
    counted = ask(stack, {**BODY, "model": "other"}, path=f"{PATH}/count_tokens")
    assert fields_of(counted) == (404, "not_found_error")
    with connect(stack) as raw:
        raw.send(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n\r\n")
        assert fields_of(raw.read()) == (415, "invalid_request_error")
    with connect(stack) as raw:
        raw.send(
            f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            "Content-Length: 99999999999\r\n\r\n"
        )
        assert fields_of(raw.read()) == (413, "request_too_large")


def test_unknown_fields_are_named(stack: Stack) -> None:
    answer = ask(stack, {**BODY, "nonsense": 1})
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
