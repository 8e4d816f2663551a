"""Forced calls of a model whose format of calls is not known: a grammar of JSON, and its reader."""

from __future__ import annotations

import pytest
from tests.helpers.chat_templates import ANY_ROLE, tokenizer_with

from slipstream_ipc.formats.table import CALLS, REASONING, compose, find_format, forced_format
from slipstream_ipc.formats.tool_types import decode_tool_types
from slipstream_ipc.messages import AnswerOptions, ChatMessage, Render, Rendered, TokenizerReady
from slipstream_ipc.messages.answer import AnswerEvent, EventKind
from slipstream_ipc.validation.chat_template import template_options
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.tokenizer.process import chat_traits
from slipstream_worker.tokenizer.prompt_rendering import render

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
    for name in ("look", "read")
]
ONE, OTHER = '{"name": "look", "parameters": {"city": "x"}}', '{"name": "read", "parameters": {}}'


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_with(ANY_ROLE)


def rendered(tokenizer, choice: str, *, parallel: bool = True, format_name: str = "") -> Rendered:
    traits = chat_traits(tokenizer, TokenizerReady("", "", answer_format=format_name))
    request = Render(
        1,
        messages=(ChatMessage("user", "hi"),),
        template=template_options(TOOLS),
        answer=AnswerOptions(choice, parallel),
    )
    answer = render(tokenizer, request, traits)
    assert answer.fault is None, answer.fault
    return answer


def events(answer: Rendered, text: str) -> list[AnswerEvent]:
    assert answer.answer is not None
    found = find_format(answer.answer.format)
    assert found is not None
    settings = answer.answer
    compiled = compile_format(found, {})
    reader = compiled.reader(decode_tool_types(settings.tools), settings.options, settings.start)
    pieces = [each.event for char in text for each in reader.feed(char)]
    return [*pieces, *(each.event for each in reader.finish())]


def calls_of(found: list[AnswerEvent]) -> list[tuple[str, str]]:
    names = [each.text for each in found if each.kind == EventKind.CALL_BEGINS]
    return [
        (
            name,
            "".join(
                [
                    each.text
                    for each in found
                    if each.kind == EventKind.CALL_ARGUMENTS and each.call == index
                ]
            ),
        )
        for index, name in enumerate(names)
    ]


@pytest.mark.parametrize("choice", ["required", "function:look"])
def test_a_forced_call_is_an_array_of_json(tokenizer, choice):
    answer = rendered(tokenizer, choice)
    assert answer.call_grammar
    found = events(answer, f"[{ONE}]")
    assert calls_of(found) == [("look", '{"city": "x"}')]
    assert not any(each.kind == EventKind.CONTENT for each in found)


def test_several_calls_are_read_where_any_is_required(tokenizer):
    found = events(rendered(tokenizer, "required"), f"[{ONE}, {OTHER}]")
    assert [name for name, _ in calls_of(found)] == ["look", "read"]
    assert not any(each.kind == EventKind.CONTENT for each in found)


def test_the_form_of_an_answer_that_is_not_forced_stays_unknown(tokenizer):
    for choice in ("auto", "none"):
        answer = rendered(tokenizer, choice)
        assert answer.answer is None
        assert not answer.call_grammar


def test_behind_reasoning_that_is_known(tokenizer):
    answer = rendered(tokenizer, "required", format_name="qwen3+none")
    assert answer.answer is not None
    assert answer.answer.format == "qwen3+json"
    found = events(answer, f"<think>\nI look.\n</think>\n\n[{ONE}]")
    assert calls_of(found) == [("look", '{"city": "x"}')]
    reasoning = [each.text for each in found if each.kind == EventKind.REASONING]
    assert "I look." in "".join(reasoning)


def test_a_format_that_has_calls_is_not_replaced():
    for calls in CALLS.values():
        assert forced_format(compose(None, calls)) is None
    assert forced_format(None) == find_format("none+json")
    for reasoning in REASONING.values():
        assert forced_format(compose(reasoning, None)) == find_format(f"{reasoning.name}+json")
