"""Chats with reasoning and tool calls, from a scripted worker, as real clients read them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import PATIENCE_S

from slipstream.answers.tool_calls import call_id
from slipstream.http.answers.event_ids import parse_event_id
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import (
    Accepted,
    AnswerEvent,
    AnswerOptions,
    Deltas,
    End,
    EventKind,
    Resume,
    Submit,
)

CONTENT, REASONING, BEGINS, ARGUMENTS, ENDS = EventKind
USER: Any = {"role": "user", "content": "What is the weather in Oslo?"}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
PATH = "/v1/chat/completions"
CHAT = {"messages": [USER], "tools": [WEATHER], "stream": True}

# text, kind, events of each delta; one token each
ANSWER: list[tuple[str, int, tuple[AnswerEvent, ...] | None]] = [
    ("<think>", 0, ()),
    ("Look it", REASONING, None),
    (" up.", REASONING, None),
    ("</think>\n\n", 0, ()),
    ("One moment.", CONTENT, None),
    ("<call>weather(", 0, (AnswerEvent(BEGINS, "weather"), AnswerEvent(ARGUMENTS, "{"))),
    ('"city": "', ARGUMENTS, None),
    ("Os", ARGUMENTS, None),
    ("lo", ARGUMENTS, None),
    ('"})</call>', 0, (AnswerEvent(ARGUMENTS, '"}'), AnswerEvent(ENDS))),
]
BEGINNINGS = [sum(len(each[0]) for each in ANSWER[:at]) for at in range(len(ANSWER) + 1)]


NAMED = {"type": "function", "function": {"name": "weather"}}


def messages(handle: int, begin: int = 0, end: int = len(ANSWER)) -> list[Deltas]:
    """Deltas `begin` to `end` of ANSWER, and the end of the stream behind the last one."""
    found = [
        deltas(Entry(handle, ANSWER[at][0], BEGINNINGS[at], at, [at], None, *ANSWER[at][1:]))
        for at in range(begin, end)
    ]
    if end == len(ANSWER):
        last = End("stop", end, num_reasoning_tokens=2)
        found.append(deltas(Entry(handle, "", BEGINNINGS[end], end, [], last)))
    return found


@pytest.fixture
def client(front: Front) -> Iterator[OpenAI]:
    base_url = f"http://127.0.0.1:{front.port}/v1"
    with OpenAI(base_url=base_url, api_key="x", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def play(played: FakeWorker, future: Future[Any]) -> tuple[Submit, Any]:
    """Answer the next request with ANSWER. Returns it, and what its client has made of that."""
    submit = played.expect(Submit)
    played.send(*messages(played.accept(submit)))
    return submit, future.result(PATIENCE_S)


def check(message: Any, submit: Submit) -> None:
    assert message.role == "assistant"
    assert message.content == "One moment."
    assert message.model_extra["reasoning_content"] == "Look it up."
    assert message.model_extra["reasoning"] == "Look it up."
    [call] = message.tool_calls
    assert (call.type, call.id) == ("function", call_id(submit.stream_id, 0))
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Oslo"}


def test_the_openai_stream_helper_puts_it_together(
    played: FakeWorker, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    def read() -> tuple[list[Any], Any]:
        with client.chat.completions.stream(
            model="fake", messages=[USER], tools=[WEATHER]
        ) as stream:
            return list(stream), stream.get_final_completion()

    submit, (events, completion) = play(played, pool.submit(read))
    assert submit.answer == AnswerOptions()
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    check(choice.message, submit)
    assert choice.message.tool_calls[0].function.parsed_arguments == {"city": "Oslo"}
    kinds = [event.type for event in events if event.type != "chunk"]
    assert list(dict.fromkeys(kinds)) == [
        "content.delta",
        "tool_calls.function.arguments.delta",
        "content.done",
        "tool_calls.function.arguments.done",
    ] or list(dict.fromkeys(kinds)) == [
        "content.delta",
        "content.done",
        "tool_calls.function.arguments.delta",
        "tool_calls.function.arguments.done",
    ]
    assert kinds.count("tool_calls.function.arguments.done") == kinds.count("content.done") == 1
    arguments = "tool_calls.function.arguments.delta"
    pieces = [event.arguments_delta for event in events if event.type == arguments]
    assert "".join(pieces) == '{"city": "Oslo"}'


def test_the_openai_client_gets_the_message(
    played: FakeWorker, client: OpenAI, pool: ThreadPoolExecutor
) -> None:
    def read() -> Any:
        return client.chat.completions.create(
            model="fake", messages=[USER], tools=[WEATHER], tool_choice="auto"
        )

    submit, completion = play(played, pool.submit(read))
    [choice] = completion.choices
    assert choice.finish_reason == "tool_calls"
    check(choice.message, submit)


def test_a_call_goes_on_in_the_middle_of_an_argument(played: FakeWorker, front: Front) -> None:
    """After each event: the rest, once."""
    accept = "Accept: text/event-stream"
    with Raw(front.port) as raw:
        raw.post(PATH, CHAT, accept)
        submit = played.expect(Submit)
        handle = played.accept(submit)
        whole: list[tuple[str, str]] = []
        for at in range(len(ANSWER)):
            played.send(*messages(handle, at, at + 1)[:1])
            if ANSWER[at][2] != ():  # a delimiter alone is not shown
                if not whole:
                    raw.read(with_body=False)
                while not whole or not whole_at(whole, at + 1):
                    whole += blocks(raw.read_chunk())
        played.send(messages(handle, len(ANSWER))[0])
        while whole[-1][1] != "[DONE]":
            whole += blocks(raw.read_chunk())
    assert len(whole) == 1 + 8 + 2
    for number in range(1, 9):
        with Raw(front.port) as raw:
            raw.post(PATH, CHAT, accept, f"Last-Event-ID: {whole[number][0]}")
            resume = played.expect(Resume)
            at = resume.num_tokens
            assert (resume.stream_id, resume.num_chars) == (submit.stream_id, BEGINNINGS[at])
            assert resume.checksum == history_checksum(pack_u32(range(at)), 0)
            played.send(Accepted(resume.handle, pack_u32([1, 2])))
            rest: list[tuple[str, str]] = []
            for each in messages(resume.handle, at):
                played.send(each)
            raw.read(with_body=False)
            while not rest or rest[-1][1] != "[DONE]":
                rest += blocks(raw.read_chunk())
        assert told(whole[: number + 1] + rest) == told(whole)


def whole_at(events: list[tuple[str, str]], num_tokens: int) -> bool:
    """Whether the last event is at this token."""
    return parse_event_id(events[-1][0]).cursors[0].num_tokens == num_tokens


def told(events: list[tuple[str, str]]) -> tuple[list[str], str, str, str]:
    """What events say: fields that are said once, arguments, content, reasoning."""
    fields: list[str] = []
    arguments = content = reasoning = ""
    for _, data in events:
        if data == "[DONE]":
            fields.append(data)
            continue
        [choice] = json.loads(data)["choices"]
        delta = choice["delta"]
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        fields += [each for each in (delta.get("role"), choice["finish_reason"]) if each]
        for call in delta.get("tool_calls", ()):
            assert call["index"] == 0
            fields += [call[name] for name in ("id", "type") if name in call]
            fields += [call["function"]["name"]] if "name" in call["function"] else []
            arguments += call["function"]["arguments"]
    return fields, arguments, content, reasoning


def blocks(body: bytes) -> list[tuple[str, str]]:
    """Id and data of each event."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        first, second = block.split("\n")
        found.append((first.removeprefix("id: "), second.removeprefix("data: ")))
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, AnswerOptions()),
        ({"tool_choice": "auto"}, AnswerOptions()),
        ({"tool_choice": None, "parallel_tool_calls": True}, AnswerOptions()),
        ({"parallel_tool_calls": False}, AnswerOptions(parallel_tool_calls=False)),
        ({"tool_choice": "none"}, AnswerOptions(tool_choice="none")),
        ({"tools": []}, AnswerOptions(tool_choice="none")),
        ({"tools": None}, AnswerOptions(tool_choice="none")),
        ({"stop_scope": "all"}, AnswerOptions(stop_scope="all")),
        ({"tool_choice": "required"}, AnswerOptions("required")),
        (
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
            AnswerOptions("function:weather"),
        ),
    ],
)
def test_the_worker_is_told_how_to_read(
    played: FakeWorker, raw: Raw, fields: dict[str, Any], expected: AnswerOptions
) -> None:
    raw.post(PATH, {**CHAT, **fields})
    submit = played.expect(Submit)
    assert submit.answer == expected
    played.send(*messages(played.accept(submit)))
    assert raw.read().status == 200


def test_other_endpoints_answer_in_text(played: FakeWorker, raw: Raw) -> None:
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/generate", {"text": "x"})):
        raw.post(path, body)
        submit = played.expect(Submit)
        assert submit.answer is None
        played.send(deltas(Entry(played.accept(submit), "<think>", ids=[1], end=End("stop", 1))))
        assert raw.read().json["choices"][0]["text"] == "<think>"


@pytest.mark.parametrize(
    ("choice", "shown"),
    [
        ({"type": "allowed_tools"}, "{'type': 'allowed_tools'}"),
        ({"type": "function", "function": {"name": "x" * 257}}, "a function's name of 257"),
        ("sometimes", "'sometimes'"),
    ],
)
def test_unknown_choices_are_refused(raw: Raw, choice: Any, shown: str) -> None:
    raw.post(PATH, {**CHAT, "tool_choice": choice})
    answer = raw.read()
    assert (answer.status, answer.error["param"]) == (400, "tool_choice")
    assert answer.error["message"].startswith(f"tool_choice: got {shown}")


def test_reasoning_effort_goes_to_the_template(played: FakeWorker, raw: Raw) -> None:
    for fields, expected in (
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ):
        raw.post(PATH, {**CHAT, **fields})
        submit = played.expect(Submit)
        assert json.loads(submit.template.kwargs) == expected
        played.send(*messages(played.accept(submit)))
        assert raw.read().status == 200


@pytest.mark.parametrize("strict_finish", [False, True])
def test_the_finish_reason_of_a_named_call(tmp_path: Path, strict_finish: bool) -> None:
    worker = FakeWorker(f"ipc://{tmp_path}/client.sock")
    front = Front(worker.address, strict_finish=strict_finish)
    try:
        with Raw(front.port) as raw:
            raw.post(PATH, {**CHAT, "stream": False, "tool_choice": NAMED})
            submit = worker.expect(Submit)
            worker.accept(submit)
            for message in messages(submit.handle):
                worker.send(message)
            [choice] = raw.read().json["choices"]
        assert choice["finish_reason"] == ("stop" if strict_finish else "tool_calls")
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    finally:
        front.stop()
        worker.stop()
