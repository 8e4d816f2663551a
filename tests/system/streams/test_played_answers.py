"""Answers of a file, played through core and worker, with the core dying in their middle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.helpers.mini_stack import MODEL, MiniStack, Received

MakeStack = Callable[..., MiniStack]

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🏔"}}\n</tool_call>'
LINES = [
    {"text": "Ask me about the weather.\n" * 3},
    {"text": CALL, "when": "weather"},
    {"text": "It is 4 degrees.", "when": "degrees"},
]
TEXTS = {
    "Who are you?": LINES[0]["text"],
    "What is the weather?": CALL,
    "The weather: 4 degrees": LINES[2]["text"],
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return f"{MODEL},answers={path}"


def ask(stack: MiniStack) -> list[Received]:
    client = stack.client()
    return [client.submit(prompt, max_tokens=400) for prompt in TEXTS]


def check(streams: list[Received]) -> None:
    assert [stream.text for stream in streams] == list(TEXTS.values())
    for stream in streams:
        assert stream.end is not None
        assert stream.end.reason == "stop"


def test_every_prompt_gets_its_answer_and_the_stream_stops(
    make_stack: MakeStack, model: str
) -> None:
    stack = make_stack(model)
    streams = ask(stack)
    stack.until(lambda: all(stream.is_over for stream in streams))
    check(streams)


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_a_successor_plays_on_where_the_core_died(
    make_stack: MakeStack, model: str, num_tokens: int
) -> None:
    stack = make_stack(model, max_num_batched_tokens=8)  # prompts are computed in chunks
    streams = ask(stack)
    stack.until(lambda: len(streams[1].token_ids) >= num_tokens)
    stack.kill_core()
    stack.start_core()
    stack.until(lambda: all(stream.is_over for stream in streams))
    check(streams)
