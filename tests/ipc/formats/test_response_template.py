"""Formats that a tokenizer's `response_template` tells, against transformers' own parser of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.answers import read
from transformers.utils.chat_parsing import parse_response

from slipstream_ipc.formats.choose import choose_format
from slipstream_ipc.messages.answer import EventKind
from slipstream_worker.formats.compiled_format import compile_format

CONTENT = {"content": {"content": "text"}}
THINKING = {"thinking": {"open": "<think>", "close": "</think>", "content": "text"}}
PLAIN_CALL = {"type": "function", "function": "{content}"}
KEYED_CALL = {
    "type": "function",
    "function": {"name": "{content.name}", "arguments": "{content.parameters}"},
}
LISTED_CALL = {"type": "function", "function": {"name": "{tool_name}", "arguments": "{parameters}"}}


def calls(begin: str | list[str], end: str, **fields: Any) -> dict[str, Any]:
    field = {"open": begin, "close": end, "content": "json", "repeats": True, **fields}
    return {"tool_calls": field}


def template(*fields: dict[str, Any]) -> dict[str, Any]:
    merged = {name: field for each in fields for name, field in each.items()}
    return {"start_anchor": "<|assistant|>", "fields": merged}


HERMES = calls("<tool_call>", "</tool_call>", transform=PLAIN_CALL)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ((THINKING, HERMES, CONTENT), "deepseek_r1+hermes"),
        ((THINKING, CONTENT), "deepseek_r1+none"),
        ((HERMES,), "none+hermes"),
        ((calls(["<tool_call>"], "</tool_call>", transform=KEYED_CALL),), "none+hermes"),
        (
            (
                calls(
                    "<|START_ACTION|>",
                    "<|END_ACTION|>",
                    transform=LISTED_CALL,
                    transform_each=True,
                    repeats=False,
                ),
            ),
            "none+cohere_command3",
        ),
        (({"thinking": {"open": "<seed:think>", "close": "</seed:think>"}},), "seed_oss+none"),
        # what the table does not have
        ((CONTENT,), None),
        (({"thinking": {"open": "<mull>", "close": "</mull>"}},), None),
        (({"thinking": {"open_pattern": "<think>", "close": "</think>"}},), None),
        ((calls("<tool_call>", "</tool_call>", transform={"name": "{content}"}),), None),
        ((calls("<tool_call>", "</tool_call>", content="kv-lines", transform=PLAIN_CALL),), None),
        ((calls("<tool_call>", "</tool_call>", content_args={"unquoted_keys": True}),), None),
        ((calls("<tool_call>", "</call>", transform=PLAIN_CALL),), None),
    ],
)
def test_a_template_that_the_table_has_is_found(
    fields: tuple[dict[str, Any], ...], name: str | None
) -> None:
    parse_response("", template(*fields), prefix="")  # transformers takes it
    found = choose_format("x", (), response_template=template(*fields)).format
    assert (None if found is None else found.name) == name


@pytest.mark.parametrize(
    "given_", [None, 1, "x", {}, {"fields": []}, {"fields": {"thinking": 3}}, {"version": 2}]
)
def test_what_is_no_template_says_nothing(given_: object) -> None:
    assert choose_format("x", (), response_template=given_).format is None
    newer = {**template(THINKING), "version": 2}
    assert choose_format("x", (), response_template=newer).format is None


def test_signatures_and_options_come_first() -> None:
    known = '<tool_call> </tool_call> "arguments"'
    listed = calls("<TOOLCALL>", "</TOOLCALL>", transform=PLAIN_CALL, transform_each=True)
    found = choose_format(known, (), response_template=template(THINKING, listed))
    assert found.format is not None
    assert found.format.name == "deepseek_r1+hermes"
    assert "response_template" in found.reasoning
    assert "response_template" not in found.calls
    named = choose_format(
        "x", (), reasoning_format="none", response_template=template(THINKING, HERMES)
    )
    assert named.format is not None
    assert named.format.name == "none+hermes"


words = st.text("ab é\n", min_size=1, max_size=9).map(str.strip).filter(bool)
values = st.dictionaries(st.text("ab", min_size=1, max_size=3), st.integers() | words, max_size=3)


@given(thought=words | st.just(""), said=words, arguments=st.lists(values, max_size=2))
def test_answers_are_read_as_transformers_reads_them(
    thought: str, said: str, arguments: list[dict[str, Any]]
) -> None:
    known = template(THINKING, HERMES, CONTENT)
    called = [{"name": "f", "arguments": each} for each in arguments]
    text = f"<think>{thought}</think>" if thought else ""
    text += said + "".join(f"<tool_call>\n{json.dumps(it)}\n</tool_call>" for it in called)
    theirs = parse_response(text, known, prefix="")
    found = choose_format("x", (), response_template=known).format
    assert found is not None
    events = read(compile_format(found, {}), [text], {"f": {}})

    def texts(kind: EventKind) -> list[str]:
        return [each.text for each in events if each.kind is kind]

    assert "".join(texts(EventKind.REASONING)) == theirs.get("thinking", "")
    assert "".join(texts(EventKind.CONTENT)) == theirs["content"]
    ours = [json.loads(each) for each in texts(EventKind.CALL_ARGUMENTS)]
    assert ours == [each["function"]["arguments"] for each in theirs.get("tool_calls", [])]
