"""Arguments written as tagged parameters: what is given back, at any division."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.helpers.scanning import cuts, divided, scan

from slipstream_ipc.formats.answer_format import (
    Delimiter,
    LiteralText,
    TagAttribute,
    TaggedParameters,
)
from slipstream_worker.formats.scanners.scanner import ScanContext, ScanStatus
from slipstream_worker.formats.scanners.tagged_parameters import TaggedParametersScanner


class Spelling(NamedTuple):
    """An element, and a template of one parameter: `{k}` is the key, `{v}` the value, `{s}` whether
    it is a string.
    """

    element: TaggedParameters
    parameter: str
    end: str
    is_python: bool = False


LINES = Spelling(
    TaggedParameters(
        LiteralText("<parameter="),
        LiteralText(">"),
        LiteralText("</parameter>"),
        LiteralText("</function>"),
        trims_newline=True,
        writes_python=True,
    ),
    "<parameter={k}>\n{v}\n</parameter>\n",
    "</function>",
    True,
)
PAIRS = Spelling(
    TaggedParameters(
        Delimiter("<arg_key>"),
        Delimiter("</arg_key>"),
        Delimiter("</arg_value>"),
        Delimiter("</tool_call>"),
        value_opening=Delimiter("<arg_value>"),
    ),
    "\n<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>",
    "\n</tool_call>",
)
ATTRIBUTES = Spelling(
    TaggedParameters(
        LiteralText('<parameter name="'),
        LiteralText('"'),
        LiteralText("</parameter>"),
        LiteralText("</invoke>"),
        attribute=TagAttribute("string", "true", ("false",)),
    ),
    '<parameter name="{k}" string="{s}">{v}</parameter>\n',
    "</invoke>",
)
SPELLINGS = [LINES, PAIRS, ATTRIBUTES]
PAIR_IDS = frozenset({"<arg_key>", "</arg_key>", "</arg_value>", "</tool_call>", "<arg_value>"})

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_ -]{0,8}", fullmatch=True)
texts = st.text(st.characters(codec="utf-8"), max_size=30) | st.text(
    '\n <>/parmetg"\\{[1', max_size=30
)
plain_texts = texts.filter(
    lambda text: not any(tag in text for tag in ("</parameter>", "</arg_value>"))
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | plain_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(names, values, max_size=4)


def scanner_of(
    element: TaggedParameters,
    types: dict[str, str] | None = None,
    tokens: frozenset[str] = frozenset(),
) -> TaggedParametersScanner:
    tools = None if types is None else {"f": types}
    return TaggedParametersScanner(element, ScanContext("f", tools, tokens, tokens))


def rendered(spelling: Spelling, value: dict[str, Any]) -> str:
    parts = []
    for key, item in value.items():
        text = (
            item
            if isinstance(item, str)
            else repr(item)
            if spelling.is_python
            else json.dumps(item)
        )
        is_string = json.dumps(isinstance(item, str))
        parts.append(spelling.parameter.format(k=key, v=text, s=is_string))
    return "".join(parts) + spelling.end


def types_of(value: dict[str, Any]) -> dict[str, str]:
    names = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object"}
    return {key: names.get(type(item), "array|null") for key, item in value.items()}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(value=arguments, places=cuts)
def test_values_are_given_back(
    spelling: Spelling, value: dict[str, Any], places: list[int]
) -> None:
    text = rendered(spelling, value)
    for types in (types_of(value), None) if spelling is ATTRIBUTES else (types_of(value),):
        scanner = scanner_of(spelling.element, types)
        scanned = scan(scanner, divided(text + "tail", places))
        assert scanned == (scanned.json, "tail", ScanStatus.DONE, True)
        assert json.loads(scanned.json) == value


@given(arguments, cuts)
def test_values_are_given_back_where_tags_are_tokens(
    value: dict[str, Any], places: list[int]
) -> None:
    value |= {"code": "x </arg_value> y"}
    parts = []
    for part in re.split(f"({'|'.join(PAIR_IDS)})", rendered(PAIRS, {**value, "code": "@code@"})):
        if part in PAIR_IDS:
            parts.append(part)
        else:
            pieces = divided(part.replace("@code@", value["code"]), places)
            assume(PAIR_IDS.isdisjoint(pieces))  # else one is a token
            parts += pieces
    scanner = scanner_of(PAIRS.element, types_of(value), PAIR_IDS)
    scanned = scan(scanner, parts, PAIR_IDS)
    assert scanned.status is ScanStatus.DONE
    assert json.loads(scanned.json) == value


ALPHABET = [
    "<parameter=",
    "</parameter>",
    "</function>",
    ">",
    "a",
    "\n",
    '"',
    "{",
    "1",
    "True",
    "<",
    "\\",
]


@given(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join), cuts, st.integers(0, 60))
def test_any_text_at_any_division_gives_the_same_json(
    text: str, places: list[int], cut: int
) -> None:
    for types in (None, {"a": "string"}, {"a": "object"}, {"a": "string|null|integer"}):
        whole = scan(scanner_of(LINES.element, types), [text])
        assert scan(scanner_of(LINES.element, types), divided(text, places)) == whole
        part = scan(scanner_of(LINES.element, types), [text[:cut]])
        assert whole.json.startswith(part.json)
        if whole.status is ScanStatus.DONE:
            json.loads(whole.json)


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        ("string", "12", "12"),
        ("string", "None", "None"),
        ("integer", "12", 12),
        ("integer", "twelve", "twelve"),
        ("integer", " 12 ", 12),
        ("boolean", "True", True),
        ("boolean", "TRUE", "TRUE"),
        ("number", "1e5", 1e5),
        ("number", "nan", "nan"),
        ("object", "{'a': [True, None, 'x']}", {"a": [True, None, "x"]}),
        ("object", '{"a": NaN}', '{"a": NaN}'),
        ("array", "[1, 2", "[1, 2"),
        ("array", "[" * 65 + "]" * 65, "[" * 65 + "]" * 65),
        ("string|null", "null", None),
        ("string|null", "nullable", "nullable"),
        ("string|null", "5", "5"),
        ("string|integer", "5", 5),
        ("string|integer", "5.5", "5.5"),
        ("string|object", '{"a": 1}', {"a": 1}),
        ("string|object", '"quoted"', '"quoted"'),
        ("", "12", 12),
        ("", "word", "word"),
        ("", '"quoted"', '"quoted"'),
        ("array", '"quoted"', "quoted"),
        ("integer", "", ""),
    ],
)
def test_types_decide_what_a_value_is(types: str, text: str, value: object) -> None:
    for spelled in (f"<parameter=k>\n{text}\n</parameter>", f"<parameter=k>{text}</parameter>"):
        scanner = scanner_of(LINES.element, {"k": types})
        scanned = scan(scanner, list(spelled + "</function>"))
        assert scanned.status is ScanStatus.DONE
        assert json.loads(scanned.json) == {"k": value}


def test_strings_leave_as_they_come() -> None:
    scanner = scanner_of(LINES.element, {"k": "string"})
    assert scan(scanner, ["<parameter=k>\nab"]).json == '{"k": "ab'
    assert scanner.num_held == 0
    assert scanner.string_hazards is not None
    assert scanner.string_hazards.isdisjoint("c d")
    assert scan(scanner, ["cd\n"]).json == "cd"
    assert scanner.num_held == 1
    assert scan(scanner, ["</para"]).json == ""
    assert scanner.num_held == 7
    assert scan(scanner, ["graph>"]).json == "\\n</paragraph>"
    assert scanner.num_held == 0


@given(st.text('ab\n<\\" ', max_size=20), plain_texts)
def test_a_string_goes_on_from_what_was_saved(before: str, text: str) -> None:
    scanner = scanner_of(LINES.element, {"k": "string"})
    scan(scanner, ["<parameter=k>", before + "x"])
    assert scanner.num_held == 0
    again = scanner_of(LINES.element, {"k": "string"})
    again.load(json.loads(json.dumps(scanner.save())))
    rest = [text, "\n</parameter></function>"]
    assert scan(again, rest)[:3] == scan(scanner, rest)[:3]


def test_text_without_hazards_passes_as_it_stands() -> None:
    scanner = scanner_of(LINES.element, {"k": "string"})
    scan(scanner, ["<parameter=k>x"])
    for code in range(0x300):
        if chr(code) not in (scanner.string_hazards or ""):
            assert scan(scanner, [chr(code)]).json == chr(code)


@pytest.mark.parametrize(
    ("text", "emitted"),
    [
        ("what", ""),
        ("<parameter=" + "k" * 1025 + ">", ""),
        ("<parameter=k>1</parameter> and", '{"k": 1'),
        ("<parameter=k>1</parameter><parameter k", '{"k": 1'),
    ],
)
def test_a_fault_ends_the_reading_and_keeps_what_came_before(text: str, emitted: str) -> None:
    for parts in ([text], list(text)):
        scanned = scan(scanner_of(LINES.element), parts)
        assert scanned.status is ScanStatus.FAILED
        assert scanned.json == emitted


def test_a_function_without_parameters() -> None:
    assert scan(scanner_of(LINES.element), ["\n</function>"]).json == "{}"
