"""Chats whose answers have reasoning and tool calls, against a worker that the test plays."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from tests.helpers.answer_units import AnswerUnit, entry_of
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of

from slipstream import (
    AsyncClient,
    BadRequestError,
    Client,
    ContentDelta,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from slipstream.answers.tool_calls import call_id
from slipstream_ipc.messages import (
    AnswerEvent,
    AnswerOptions,
    ChatMessage,
    ChatToolCall,
    EventKind,
    FunctionCall,
    Resume,
    Submit,
)

QUESTION = [{"role": "user", "content": "How warm is it in Oslo?"}]


def unit(text: str, *events: AnswerEvent) -> AnswerUnit:
    return AnswerUnit(text, 1, events)


ANSWER = [
    unit("<think>"),
    unit("Look", AnswerEvent(EventKind.REASONING, "Look")),
    unit(" it up.", AnswerEvent(EventKind.REASONING, " it up.")),
    unit("</think>"),
    unit("Wait.", AnswerEvent(EventKind.CONTENT, "Wait.")),
    unit("<call>"),
    unit(
        'weather{"ci',
        AnswerEvent(EventKind.CALL_BEGINS, "weather"),
        AnswerEvent(EventKind.CALL_ARGUMENTS, '{"ci'),
    ),
    unit('ty": "Oslo"', AnswerEvent(EventKind.CALL_ARGUMENTS, 'ty": "Oslo"')),
    unit("}</call>", AnswerEvent(EventKind.CALL_ARGUMENTS, "}"), AnswerEvent(EventKind.CALL_ENDS)),
]
ARGUMENTS = '{"city": "Oslo"}'


def weather(city: str) -> str:
    """The weather in a city."""
    return f"9 degrees in {city}"


@pytest.fixture
def client(worker: FakeWorker) -> Any:
    with Client(worker.address) as found:
        yield found


def send_units(worker: FakeWorker, handle: int) -> None:
    """The answer, with a message to each unit."""
    for at in range(len(ANSWER)):
        is_last = at == len(ANSWER) - 1
        lists_events = not at % 2
        entry = entry_of(handle, ANSWER, at, at + 1, lists_events=lists_events, is_last=is_last)
        worker.send(deltas(entry))


# ---- what is sent --------------------------------------------------------------------------------


def test_a_chat_asks_for_events_and_describes_its_functions(
    client: Client, worker: FakeWorker
) -> None:
    options: Any = {"parallel_tool_calls": False, "stop_scope": "all"}
    with client.stream(QUESTION, tools=[weather], **options):
        submit = worker.expect(Submit)
    assert submit.answer == AnswerOptions("auto", False, "all")
    [tool] = json.loads(submit.template.tools)
    assert tool["function"]["name"] == "weather"
    assert tool["function"]["parameters"]["properties"] == {"city": {"type": "string"}}


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        (QUESTION, {}, AnswerOptions()),
        (QUESTION, {"tools": [weather], "tool_choice": "none"}, AnswerOptions("none")),
        (QUESTION, {"tool_choice": None, "parallel_tool_calls": None}, AnswerOptions()),
        (QUESTION, {"parse_answer": False}, None),
        (QUESTION, {"detokenize": False}, None),
        ("text", {}, None),
        ([5, 6], {}, None),
    ],
)
def test_which_answers_are_read(
    client: Client, worker: FakeWorker, prompt: Any, options: Any, expected: AnswerOptions | None
) -> None:
    with client.stream(prompt, **options):
        assert worker.expect(Submit).answer == expected


@pytest.mark.parametrize(
    ("prompt", "options", "field", "allowed"),
    [
        (QUESTION, {"tool_choice": "always"}, "tool_choice", '"required"'),
        (QUESTION, {"tool_choice": {"type": "function"}}, "tool_choice", '"auto"'),
        (QUESTION, {"tool_choice": "required", "parse_answer": False}, "parse_answer", "forced"),
        (QUESTION, {"tool_choice": "required", "detokenize": False}, "detokenize", "forced"),
        (QUESTION, {"parallel_tool_calls": 1}, "parallel_tool_calls", "True, False"),
        (QUESTION, {"stop_scope": "text"}, "stop_scope", '"content" or "all"'),
        (QUESTION, {"parse_answer": 0}, "parse_answer", "True or False"),
        (QUESTION, {"tools": [print]}, "tools[0]", "have names"),
        ("text", {"tool_choice": "auto"}, "prompt", "chat messages"),
    ],
)
def test_wrong_options_are_named(
    client: Client, prompt: Any, options: Any, field: str, allowed: str
) -> None:
    with pytest.raises(BadRequestError, match=allowed) as caught:
        client.stream(prompt, **options)
    assert caught.value.field == field


# ---- what is read --------------------------------------------------------------------------------


def test_a_stream_yields_events_and_tells_its_parts(client: Client, worker: FakeWorker) -> None:
    stream = client.stream(QUESTION, tools=[weather])
    handle = worker.expect_and_accept()
    send_units(worker, handle)
    found = list(stream)
    events = [event for delta in found for event in delta.events]
    own_id = call_id(bytes.fromhex(stream.id), 0)
    assert [event for event in events if not isinstance(event, ToolCallArguments)] == [
        ReasoningDelta("Look"),
        ReasoningDelta(" it up."),
        ContentDelta("Wait."),
        ToolCallStart(0, own_id, "weather"),
        ToolCallEnd(0),
    ]
    assert "".join(e.text for e in events if isinstance(e, ToolCallArguments)) == ARGUMENTS
    assert stream.text == "".join(unit.text for unit in ANSWER)
    assert (stream.content, stream.reasoning) == ("Wait.", "Look it up.")
    assert stream.tool_calls == [ToolCall(own_id, "weather", ARGUMENTS)]
    assert stream.message == ChatMessage(
        "assistant",
        "Wait.",
        tool_calls=(ChatToolCall(FunctionCall("weather", ARGUMENTS), own_id, "function"),),
        reasoning_content="Look it up.",
    )


@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_other_kinds_of_output_have_the_same_parts(
    client: Client, worker: FakeWorker, kind: Any
) -> None:
    stream = client.stream(QUESTION, output_kind=kind)
    send_units(worker, worker.expect_and_accept())
    last = list(stream)[-1]
    [call] = last.tool_calls
    assert (call.index, call.name, call.arguments) == (0, "weather", ARGUMENTS)
    assert (last.content, last.reasoning, last.reasoning_content) == (
        "Wait.",
        "Look it up.",
        "Look it up.",
    )
    assert [each.arguments for each in stream.tool_calls] == [ARGUMENTS]


def test_outputs_have_parts_and_the_next_turn_has_them_too(worker: FakeWorker) -> None:
    worker.script = answer_once
    with Client(worker.address) as client:
        output = client.generate(QUESTION, tools=[weather])
        assert (output.content, output.reasoning_content) == ("Wait.", "Look it up.")
        [call] = output.tool_calls
        assert (call.name, call.arguments, call.status) == ("weather", ARGUMENTS, "complete")
        result = {"role": "tool", "tool_call_id": call.id, "content": weather("Oslo")}
        turns: list[Any] = [*QUESTION, output.message, result]
        assert client.generate(turns, tools=[weather]).content == "3: assistant, weather"
        several = client.generate(QUESTION, n=2)
        assert len({each.tool_calls[0].id for each in several.outputs}) == 2
        assert [each.content for each in several.outputs] == ["Wait."] * 2
        together = client.stream_many([QUESTION] * 3)
        assert [delta.content for _, delta in together if delta.content] == ["Wait."] * 3


def test_asyncio_has_the_same(worker: FakeWorker) -> None:
    worker.script = answer_once

    async def run() -> None:
        async with AsyncClient(worker.address) as client:
            output = await client.generate(QUESTION, tools=[weather])
            assert output.tool_calls[0].arguments == ARGUMENTS
            stream = client.stream(QUESTION)
            assert [delta.content async for delta in stream if delta.content] == ["Wait."]
            assert stream.reasoning == "Look it up."

    asyncio.run(run())


def answer_once(worker: FakeWorker, body: Any) -> None:
    """A call in the first turn, text in the next."""
    if not isinstance(body, Submit):
        return
    worker.accept_from_script(body)
    if len(body.messages) == 1:
        entry = entry_of(body.handle, ANSWER, 0, len(ANSWER), lists_events=True, is_last=True)
        worker.post(deltas(entry))
        return
    turn = body.messages[1]
    assert turn.reasoning_content == "Look it up."
    assert turn.tool_calls is not None
    assert body.messages[2].tool_call_id == turn.tool_calls[0].id
    text = f"{len(body.messages)}: {turn.role}, {turn.tool_calls[0].function.name}"
    worker.post(deltas(Entry(body.handle, text, end=end_of(text), kind=EventKind.CONTENT)))


def test_a_reader_goes_on_within_a_call(client: Client, worker: FakeWorker) -> None:
    """After a lost connection it gets what follows; an entry that it has a part of is asked for
    again, from the reader's own position on.
    """
    stream = client.stream(QUESTION)
    handle = worker.expect_and_accept()
    worker.send(deltas(entry_of(handle, ANSWER, 0, 7, lists_events=True)))
    assert next(stream).tool_calls[0].arguments == '{"ci'
    for _ in range(2):
        worker.send(deltas(entry_of(handle, ANSWER, 4, 9, lists_events=True, is_last=True)))
        resume = worker.expect(Resume)
        chars = sum(len(unit.text) for unit in ANSWER[:7])
        assert (resume.num_chars, resume.num_tokens) == (chars, 7)
    worker.send(deltas(entry_of(handle, ANSWER, 7, 9, lists_events=True, is_last=True)))
    [delta] = stream
    [call] = delta.tool_calls
    assert (call.id, call.name, call.arguments) == (None, None, 'ty": "Oslo"}')
    assert stream.tool_calls[0].arguments == ARGUMENTS
    assert stream.content == "Wait."


def test_text_alone_is_content(client: Client, worker: FakeWorker) -> None:
    stream = client.stream(QUESTION)
    handle = worker.expect_and_accept()
    worker.send(deltas(Entry(handle, "a")), deltas(Entry(handle, "b", 1, end=end_of("ab"))))
    assert [delta.events for delta in stream] == [[ContentDelta("a")], [ContentDelta("b")]]
    assert (stream.content, stream.reasoning, stream.tool_calls) == ("ab", None, [])
    assert stream.message == ChatMessage("assistant", "ab")


# ---- histories -----------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    "parts",
    [
        {"tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
        {"reasoning_content": "so"},
    ],
)
def test_a_turn_of_parts_needs_no_content(
    client: Client, worker: FakeWorker, content: dict[str, Any], parts: dict[str, Any]
) -> None:
    with client.stream([*QUESTION, {"role": "assistant", **content, **parts}]):
        turn = worker.expect(Submit).messages[1]
    assert turn.content == ""
    assert turn.reasoning_content == parts.get("reasoning_content")
    assert bool(turn.tool_calls) == ("tool_calls" in parts)


def test_other_turns_need_content(client: Client) -> None:
    for turn in ({"role": "user"}, {"role": "user", "content": None}):
        with pytest.raises(BadRequestError, match="content"):
            client.stream([turn])


def test_reasoning_is_text_that_utf8_can_hold(client: Client) -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "\ud800"}
    with pytest.raises(BadRequestError, match="UTF-8") as caught:
        client.stream([turn])
    assert caught.value.field == "messages[0]"
