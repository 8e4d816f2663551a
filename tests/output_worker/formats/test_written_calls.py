"""Calls as models write them are read as they were meant: for every format, at random divisions."""

# ruff: noqa: RUF001 - DeepSeek's delimiters have full-width bars

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.helpers.answers import call, content, delimiter_tokens, divide, read, reasoning, to_items

from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages.answer import AnswerEvent
from slipstream_worker.formats.compiled_format import compile_format

Calls = list[tuple[str, str]]  # name, arguments as JSON


def pairs(calls: Calls, arguments: str = "arguments") -> list[str]:
    return [f'{{"name": "{name}", "{arguments}": {text}}}' for name, text in calls]


def array(calls: Calls) -> str:
    return f"[{', '.join(pairs(calls))}]"


def hermes(calls: Calls) -> str:
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in pairs(calls))


def late_name(calls: Calls) -> str:
    texts = [f'{{"arguments": {text}, "name": "{name}"}}' for name, text in calls]
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


def packed(calls: Calls) -> str:
    texts = [f'{{"name": "{name}", "arguments": {json.dumps(text)}}}' for name, text in calls]
    return "".join(f"<tool_call>{text}</tool_call>" for text in texts)


def packed_with_blanks(calls: Calls) -> str:
    """Blanks around the object; nothing at all of an empty one."""
    texts = ["" if text == "{}" else f" {text}\n" for _, text in calls]
    return packed([(name, text) for (name, _), text in zip(calls, texts, strict=True)])


def mistral_with_ids(calls: Calls) -> str:
    texts = [f"[TOOL_CALLS]{name}[CALL_ID]abc[ARGS]{text}" for name, text in calls]
    return "".join(texts)


def mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{text}" for name, text in calls)


def mistral_bare(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}{text}" for name, text in calls)


def deepseek_v3(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for name, text in calls
    ]
    return f"<｜tool▁calls▁begin｜>{chr(10).join(texts)}<｜tool▁calls▁end｜>"


def deepseek_v31(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        for name, text in calls
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(texts)}<｜tool▁calls▁end｜>"


def kimi(calls: Calls) -> str:
    texts = [
        f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{text}"
        "<|tool_call_end|>"
        for number, (name, text) in enumerate(calls)
    ]
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def kimi_without_section(calls: Calls) -> str:
    text = kimi(calls).removeprefix("<|tool_calls_section_begin|>")
    return text.removesuffix("<|tool_calls_section_end|>")


def jamba(calls: Calls) -> str:
    return f"<tool_calls>\n{array(calls)}\n</tool_calls>"


def longcat(calls: Calls) -> str:
    texts = [f"<longcat_tool_call>\n{text}\n</longcat_tool_call>" for text in pairs(calls)]
    return "\n".join(texts)


Render = Callable[[Calls], str]
FORMATS: dict[str, tuple[str, Render]] = {
    "hermes": ("hermes", hermes),
    "hermes, name last": ("hermes", late_name),
    "hermes, arguments as text": ("hermes", packed),
    "hermes, text with blanks": ("hermes", packed_with_blanks),
    "llama3_json": ("llama3_json", lambda calls: "; ".join(pairs(calls, "parameters"))),
    "llama3_json, tag": ("llama3_json", lambda calls: "<|python_tag|>" + ";".join(pairs(calls))),
    "mistral, array": ("mistral", lambda calls: f"[TOOL_CALLS] {array(calls)}"),
    "mistral, ids": ("mistral", mistral_with_ids),
    "mistral": ("mistral", mistral),
    "mistral, bare": ("mistral", mistral_bare),
    "granite": ("granite", lambda calls: f"<|tool_call|>{array(calls)}"),
    "granite, text": ("granite", lambda calls: f"<tool_call> {array(calls)}"),
    "granite-20b-fc": (
        "granite-20b-fc",
        lambda calls: "\n".join(f"<function_call> {text}" for text in pairs(calls)),
    ),
    "jamba": ("jamba", jamba),
    "longcat": ("longcat", longcat),
    "phi4_mini_json": ("phi4_mini_json", lambda calls: f"functools{array(calls)}"),
    "deepseek_v3": ("deepseek_v3", deepseek_v3),
    "deepseek_v31": ("deepseek_v31", deepseek_v31),
    "kimi_k2": ("kimi_k2", kimi),
    "kimi_k2, no section": ("kimi_k2", kimi_without_section),
}
IDS = {
    "mistral, ids": "abc",
    "kimi_k2": "functions.{}:{}",
    "kimi_k2, no section": "functions.{}:{}",
}

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8) | st.sampled_from(["</tool_call>", "<tool_call>", "{", "a\\", '"', "]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)  # fmt: skip
names = st.sampled_from(["f", "get_weather", "a.b-c"])
arguments = st.dictionaries(st.text(max_size=5), values, max_size=4)
calls = st.lists(st.tuples(names, arguments), min_size=1, max_size=3)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
TOOLS: dict[str, dict[str, str]] = {"f": {}, "get_weather": {}, "a.b-c": {}}


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("variant", FORMATS)
@settings(max_examples=25)
@given(
    calls=calls,
    sizes=sizes,
    ascii_only=st.booleans(),
    thought=st.sampled_from(["", "hm"]),
    before=st.sampled_from(["", "Let me see."]),
)
def test_calls_are_read_as_written(
    variant: str,
    with_tokens: bool,
    calls: list[tuple[str, dict[str, Any]]],
    sizes: list[int],
    ascii_only: bool,
    thought: str,
    before: str,
) -> None:
    name, render = FORMATS[variant]
    answer_format = find_format(f"qwen3+{name}")
    tokens = delimiter_tokens(answer_format) if with_tokens else {}
    compiled = compile_format(answer_format, tokens)
    written = [(name, json.dumps(value, ensure_ascii=ascii_only)) for name, value in calls]
    if variant == "llama3_json":
        before = ""
    text = render(written)
    # a model that writes such a token within a string is understood where its format is quotable
    if with_tokens and variant != "hermes":
        assume(not any("tool_call>" in text for _, text in written))
    if before:
        text = f"{before}\n\n{text}"
    if thought:
        text = f"<think>\n{thought}\n</think>\n\n{text}"
    expected: list[AnswerEvent] = []
    earlier: set[str] = set()
    if thought:
        expected.append(reasoning(thought))
    if before:
        expected.append(content(before))
    for number, (function, value) in enumerate(written):
        call_id = IDS.get(variant, "").format(function, number)
        if call_id in earlier:  # no two calls of an answer have one id
            call_id = f"{call_id}__call{number}"
        earlier |= {call_id} - {""}
        expected += call(number, function, value, call_id)
    assert read(compiled, divide(to_items(text, tokens), sizes), TOOLS) == expected
