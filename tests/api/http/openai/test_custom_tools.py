"""The input of a custom tool is read from arguments in any division."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.http.api_errors import ApiError
from slipstream.http.openai.custom_tools import (
    InputReader,
    arguments_of_input,
    function_of_custom,
)

TEXT = st.text(st.sampled_from('ab"\\\n/{}:u é🏔\x01'), max_size=12)
PARTS = ["\\u", "\\ud83d", "\\udfd4", "\\udc0", "\\n", "\\q", *'ab"\\{}:,nudD8c0 ']
WRITTEN = st.lists(st.sampled_from(PARTS), max_size=24).map("".join)
HALVES = st.lists(st.sampled_from(["\\ud83d", "\\udfd4", "\\u00e9", "\\n", "x"]), max_size=6)


def read(pieces: list[str]) -> str:
    reader = InputReader()
    found = "".join([reader.read(piece) for piece in pieces]) + reader.finish()
    assert reader.num_bytes == len("".join(pieces).encode())
    return found


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, None], strict=True)]


@given(TEXT, st.booleans(), st.sampled_from([None, 1]), st.data())
def test_a_text_is_read_back(text: str, is_ascii: bool, indent: Any, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=is_ascii, indent=indent)
    assert read(cut(arguments, data)) == text
    assert read(cut(arguments_of_input(text), data)) == text


@given(WRITTEN, st.sampled_from(['{"input": "', ""]), st.data())
def test_every_division_reads_the_same(written: str, begin: str, data: st.DataObject) -> None:
    assert read(cut(begin + written, data)) == read([begin + written])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0000\\u000:000000\\n", "0000\\u000:000000\n"),
        ("\\n\\q\\t", "\n\\q\t"),
        ("\\ud83d\\udc0x", "\ufffd\\udc0x"),
        ("\\ud83d\\q", "\ufffd\\q"),
        ("\\u00e9\\u12", "\u00e9"),  # the rest may be the beginning of an escape
    ],
)
def test_an_escape_that_json_does_not_have_stays_as_written(written: str, expected: str) -> None:
    whole = '{"input": "' + written
    assert read([whole]) == expected
    assert read(list(whole)) == expected


@given(HALVES, st.data())
def test_half_a_character_is_replaced(halves: list[str], data: st.DataObject) -> None:
    arguments = '{"input": "' + "".join(halves) + '"}'
    found = read(cut(arguments, data))
    expected = json.loads(arguments)["input"].encode("utf-16-le", "surrogatepass")
    assert found == expected.decode("utf-16-le", "replace")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a", "why": "b"}', "a"),
        ('{"why": "b", "input": "a"}', "a"),
        ('{"patch": "a"}', "a"),
        ('{"patch": "' + "a" * 100 + '"}', "a" * 100),
        ("{}", ""),
        ('{"input": 5}', '{"input": 5}'),
        ('{"patch": "a", "why": "b"}', '{"patch": "a", "why": "b"}'),
        ('{"pat', '{"pat'),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a', "a"),
    ],
)
def test_what_counts_as_the_input(arguments: str, expected: str) -> None:
    assert read(list(arguments)) == expected


def test_the_input_comes_while_it_is_written() -> None:
    reader = InputReader()
    pieces = ['{"input"', ': "on', "e\\", 'n"', "}"]
    assert [reader.read(piece) for piece in pieces] == ["", "on", "e", "\n", ""]


def test_the_model_is_told_of_a_function_with_one_text() -> None:
    tool = {"type": "custom", "name": "patch", "description": "Patches."}
    function = function_of_custom(tool, "tools[0]")
    assert (function["name"], function["description"]) == ("patch", "Patches.")
    assert function["parameters"]["required"] == ["input"]
    assert "pattern" not in function["parameters"]["properties"]["input"]


@pytest.mark.parametrize("syntax", ["lark", "regex"])
def test_the_model_is_told_of_a_grammar(syntax: str) -> None:
    definition = {"syntax": syntax, "definition": "[a-z]+"}
    for grammar in (definition, {"grammar": definition}):
        tool = {"type": "custom", "name": "x", "format": {"type": "grammar", **grammar}}
        argument = function_of_custom(tool, "t")["parameters"]["properties"]["input"]
        assert "[a-z]+" in argument["description"]
        assert argument.get("pattern") == ("^(?:[a-z]+)$" if syntax == "regex" else None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"name": None}, "tools[0].name"),
        ({"name": ""}, "tools[0].name"),
        ({"format": {"type": "grammar"}}, "tools[0].format"),
        ({"format": {"type": "grammar", "syntax": "gbnf", "definition": "x"}}, "tools[0].format"),
        ({"format": "text"}, "tools[0].format"),
    ],
)
def test_a_wrong_custom_tool_is_refused(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        function_of_custom({"type": "custom", "name": "x", **fields}, "tools[0]")
    assert caught.value.body.error.param == param
