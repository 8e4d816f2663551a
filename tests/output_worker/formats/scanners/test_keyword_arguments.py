"""Arguments written as key and value pairs: what is given back, at any division."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.scanning import Scanned, cuts, divided, scan

from slipstream_ipc.formats.answer_format import Delimiter, KeywordArguments
from slipstream_worker.formats.scanners.keyword_arguments import (
    KeywordArgumentsScanner,
    number_as_json,
    python_container_as_json,
)
from slipstream_worker.formats.scanners.scanner import ScanContext, ScanStatus

PYTHON = KeywordArguments()
GEMMA = KeywordArguments("{", ":", Delimiter("<escape>"))

texts = st.text(st.characters(codec="utf-8"), max_size=30)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)


def _nested(keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    return st.recursive(
        scalars,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def render_python(value: dict[str, Any]) -> str:
    return ", ".join(f"{key}={item!r}" for key, item in value.items()) + ")"


def render_json_in_python(value: dict[str, Any]) -> str:
    return ",".join(f"{key}={json.dumps(item)}" for key, item in value.items()) + ")"


def render_gemma(value: Any, top: bool = True) -> str:
    match value:
        case dict():
            inner = ",".join(f"{key}:{render_gemma(item, False)}" for key, item in value.items())
            return inner + "}" if top else "{" + inner + "}"
        case list():
            return "[" + ",".join(render_gemma(item, False) for item in value) + "]"
        case str():
            return f"<escape>{value}<escape>"
        case bool():
            return "true" if value else "false"
        case _:
            return str(value)


def read(element: KeywordArguments, parts: list[str]) -> Scanned:
    return scan(KeywordArgumentsScanner(element, ScanContext("f", None)), parts)


@given(st.dictionaries(names, _nested(texts), max_size=4), cuts)
def test_python_arguments_are_given_back(arguments: dict[str, Any], places: list[int]) -> None:
    for text in (render_python(arguments), render_json_in_python(arguments)):
        scanned = read(PYTHON, divided(text + "tail", places))
        assert scanned == (scanned.json, "tail", ScanStatus.DONE, True)
        assert json.loads(scanned.json) == arguments


plain_texts = texts.filter(lambda text: "<" not in text)


@given(
    st.dictionaries(
        names,
        st.recursive(
            st.none() | st.booleans() | st.integers() | plain_texts,
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
            max_leaves=6,
        ),
        max_size=4,
    ),
    cuts,
)
def test_gemma_arguments_are_given_back(arguments: dict[str, Any], places: list[int]) -> None:
    scanned = read(GEMMA, divided(render_gemma(arguments) + "tail", places))
    assert scanned == (scanned.json, "tail", ScanStatus.DONE, True)
    assert json.loads(scanned.json) == arguments


@given(st.text("ab1=:,()[]{}'\"\\ \n.-<escap>Tru", max_size=40), cuts)
def test_any_text_at_any_division_gives_the_same_json(text: str, places: list[int]) -> None:
    for element in (PYTHON, GEMMA):
        whole = read(element, [text])
        assert read(element, divided(text, places)) == whole
        if whole.status is ScanStatus.DONE:
            json.loads(whole.json)


@given(st.text("a1=:,()[]{}'\"\\ux3d8\n", max_size=40), st.integers(0, 40))
def test_what_was_emitted_stays_a_prefix(text: str, cut: int) -> None:
    assert read(PYTHON, [text]).json.startswith(read(PYTHON, [text[:cut]]).json)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a='it's here')", {"a": "it's here"}),
        ("a='''x'y''', b=\"\"\"q\"\"\")", {"a": "x'y", "b": "q"}),
        ("a='', b=\"\",)", {"a": "", "b": ""}),
        (r"a='\x41\u00e9\101\q\/\ud83d\ude00')", {"a": "AéA\\q/😀"}),
        (
            "a=1_000, b=+.5, c=1., d=1e5, e=-007)",
            {"a": 1000, "b": 0.5, "c": 1.0, "d": 1e5, "e": -7},
        ),
        ("a=[1,], b={'k': None,}, c=null )", {"a": [1], "b": {"k": None}, "c": None}),
        (")", {}),
    ],
)
def test_python_that_models_write(text: str, value: dict[str, Any]) -> None:
    scanned = read(PYTHON, list(text))
    assert scanned.status is ScanStatus.DONE
    assert json.loads(scanned.json) == value


@pytest.mark.parametrize(
    ("text", "emitted"),
    [
        ("1)", ""),
        ("a=)", '{"a": '),
        ("a=1+2)", '{"a": '),
        ("a=f(x))", '{"a": '),
        ("a=[1)", '{"a": [1'),
        ("a=nan)", '{"a": '),
        ("a" * 1025 + "=1)", ""),
        ("a=" + "[" * 64, '{"a": ' + "[" * 63),
    ],
)
def test_a_fault_ends_the_reading_and_keeps_what_came_before(text: str, emitted: str) -> None:
    scanned = read(PYTHON, [text])
    assert scanned.status is ScanStatus.FAILED
    assert scanned.json == emitted
    assert scanned.has_begun == bool(emitted)
    assert text.endswith(scanned.rest)


def test_gemma_strings_may_be_bare_and_keys_quoted() -> None:
    text = 'unit:celsius,n:-3,<escape>k y<escape>:<escape>a"<b\\<escape>,city:New York}'
    scanned = read(GEMMA, list(text))
    assert scanned.status is ScanStatus.DONE
    assert json.loads(scanned.json) == {
        "unit": "celsius",
        "n": -3,
        "k y": 'a"<b\\',
        "city": "New York",
    }


def test_a_delimiter_that_is_a_token_is_not_read_from_text() -> None:
    ids = frozenset({"<escape>", "<other>"})
    parts = ["k:", "<escape>", "a<esca", "pe>b", "<other>", "<escape>", "}"]
    context = ScanContext("f", None, ids, frozenset({"<escape>"}))
    scanned = scan(KeywordArgumentsScanner(GEMMA, context), parts, ids)
    assert scanned.status is ScanStatus.DONE
    assert json.loads(scanned.json) == {"k": "a<escape>b<other>"}


@given(_nested(texts).filter(lambda value: isinstance(value, list | dict)))
def test_a_printed_container_is_given_back(value: object) -> None:
    text = python_container_as_json(repr(value))
    assert text is not None
    assert json.loads(text) == value
    assert python_container_as_json(repr(value) + ", 1") is None


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers())
def test_numbers_keep_their_value(number: float) -> None:
    text = number_as_json(repr(number))
    assert text is not None
    assert json.loads(text) == number
