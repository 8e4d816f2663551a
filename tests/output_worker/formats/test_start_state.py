"""Answers that begin within the prompt."""

from __future__ import annotations

import pytest
from tests.helpers.answers import call, content, delimiter_tokens, read, reasoning, to_items

from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.start_state import MAX_STATE_BYTES, start_state


def events(name: str, prompt: str, answer: str, with_tokens: bool) -> list[AnswerEvent]:
    answer_format = find_format(name)
    tokens = delimiter_tokens(answer_format) if with_tokens else {}
    compiled = compile_format(answer_format, tokens)
    literals = {token: literal for literal, token in tokens.items()}
    pieces = [
        (item, literals[item]) if isinstance(item, int) else (7, item)
        for item in to_items(prompt, tokens)
    ]
    state = start_state(compiled, pieces)
    assert len(state) <= MAX_STATE_BYTES
    assert compiled.reader(None, AnswerOptions(), state).num_fed == 0
    return read(compiled, to_items(answer, tokens), state=state)


HARMONY = "<|start|>assistant"
ANSWER = f"<|channel|>analysis<|message|>a<|end|>{HARMONY}<|channel|>final<|message|>b<|return|>"
CASES = [
    ("qwen3+hermes", "<think>\n", "hm\n</think>\n\nYes", [reasoning("hm"), content("Yes")]),
    ("qwen3+hermes", "<think>\n\n</think>\n\n", "Yes", [content("Yes")]),
    ("qwen3+hermes", "</think>", "Yes", [content("Yes")]),
    ("qwen3+hermes", "\n", "<think>a</think>b", [reasoning("a"), content("b")]),
    ("qwen3+hermes", "", " \nYes\n", [content(" \nYes\n")]),
    ("qwen3+hermes", "The answer ", "is <x>", [content("is <x>")]),
    ("qwen3+hermes", "The answer ", '\n<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ("qwen3+hermes", "<think>\nso ", "far</think>!", [reasoning("far"), content("!")]),
    ("none+hermes", '<tool_call>\n{"name": "f", ', '"arguments": {}}\n</tool_call>',
     call(0, "f", "{}")),
    ("none+hermes", '<tool_call>\n{"name": "', 'g"}\n</tool_call> x',
     [*call(0, "g", "{}"), content("x")]),
    ("none+hermes", '<tool_call>\n{"name": "', "junk", [content("junk")]),
    ("none+hermes", '<tool_call>\n{"name": "f", "arguments": {"a": "b', 'c"}}\n</tool_call>',
     call(0, "f", '{"a": "bc"}')),
    ("none+hermes", '<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "g"}</tool_call>',
     call(0, "g", "{}")),
    ("harmony", HARMONY, ANSWER, [reasoning("a"), content("b")]),
    ("harmony", HARMONY + "<|channel|>final<|message|>So", " b", [content(" b")]),
    ("harmony", HARMONY, "<|chan", [content("<|chan")]),
    ("harmony", HARMONY + " to=functions.f", "<|channel|>commentary<|message|>{}<|call|>",
     call(0, "f", "{}")),
]  # fmt: skip


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(("name", "prompt", "answer", "expected"), CASES)
def test_the_answer_goes_on_where_the_prompt_ends(
    name: str, prompt: str, answer: str, expected: list[AnswerEvent], with_tokens: bool
) -> None:
    assert events(name, prompt, answer, with_tokens) == expected


@pytest.mark.parametrize("with_tokens", [False, True])
def test_a_call_that_is_too_long_for_a_state_is_forgotten(with_tokens: bool) -> None:
    prompt = '<tool_call>{"name": "f", "arguments": {"a": "' + "x" * 5000
    assert events("none+hermes", prompt, 'y"}}', with_tokens) == [content('y"}}')]
