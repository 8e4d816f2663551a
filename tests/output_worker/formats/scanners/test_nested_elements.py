"""Arguments as elements that nest: values that fit a schema come back, however they are divided."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.scanning import Scanned, cuts, divided, scan

from slipstream_ipc.formats.answer_format import NestedElements
from slipstream_worker.formats.property_types import property_types
from slipstream_worker.formats.scanners.json_scanner import JsonScanner
from slipstream_worker.formats.scanners.nested_elements import NestedElementsScanner
from slipstream_worker.formats.scanners.scanner import MAX_HELD_CHARS, ScanContext, ScanStatus

P = "]<]minimax[>["
ELEMENT = NestedElements(prefix=P, end="invoke")
END = f"{P}</invoke>"
texts = st.text(st.characters(codec="utf-8", exclude_characters="]")) | st.lists(
    st.sampled_from([P, f"{P[:-1]}<", "]", "]<]", "<a>", "</a>", '"', "\\", "1", "null", "\n", "é"])
).map(lambda parts: "".join(parts).replace(P + "<", ""))
names = st.text("abcdef_-.é0 ", min_size=1, max_size=6).filter(lambda name: name.strip())


@st.composite
def typed(draw: st.DrawFn, depth: int = 0) -> tuple[dict[str, Any], Any]:
    """A schema and a value that fits it."""
    kinds = ["string", "integer", "number", "boolean", "null"]
    kind = draw(st.sampled_from([*kinds, "array", "object"] if depth < 3 else kinds))
    match kind:
        case "string":
            return {"type": kind}, draw(texts)
        case "integer":
            return {"type": kind}, draw(st.integers())
        case "number":
            return {"type": kind}, draw(st.floats(allow_nan=False, allow_infinity=False))
        case "boolean":
            return {"type": kind}, draw(st.booleans())
        case "null":
            return {"type": kind}, None
        case "array":
            schema, value = draw(typed(depth=depth + 1))
            return {"type": kind, "items": schema}, [value] * draw(st.integers(0, 3))
    inner = draw(st.dictionaries(names, typed(depth=depth + 1), max_size=3))
    properties = {name: each for name, (each, _) in inner.items()}
    value = {name: each for name, (_, each) in inner.items()}
    return {"type": kind, "properties": properties}, value


objects = st.dictionaries(names, typed(), max_size=4)


def written(name: str, value: object) -> str:
    match value:
        case dict():
            inner = "".join(written(key, each) for key, each in value.items())
        case list():
            inner = "".join(written("item", each) for each in value)
        case str():
            inner = value
        case _:
            inner = json.dumps(value)
    return f"{P}<{name}>{inner}{P}</{name}>"


def rendered(value: dict[str, Any], blank: str = "\n") -> str:
    return "".join(blank + written(key, each) for key, each in value.items()) + blank + END


def scanner(types: dict[str, str] | None) -> NestedElementsScanner:
    tools = None if types is None else {"f": types}
    return NestedElementsScanner(ELEMENT, ScanContext("f", tools))


def read(
    text: str, types: dict[str, str] | None = None, places: list[int] | None = None
) -> Scanned:
    return scan(scanner(types), divided(text, places or []))


@given(made=objects, places=cuts, blank=st.sampled_from(["", "\n", " \n"]))
def test_values_that_fit_the_schema_are_given_back(
    made: dict[str, tuple[dict[str, Any], Any]], places: list[int], blank: str
) -> None:
    properties = {name: schema for name, (schema, _) in made.items()}
    types = property_types({"parameters": {"properties": properties}}, is_nested=True)
    value = {name: each for name, (_, each) in made.items()}
    found = read(rendered(value, blank) + "rest", types, places)
    assert found.status is ScanStatus.DONE
    assert json.loads(found.json) == value
    assert found.rest == "rest"


PARTS = [P, P + "<", P + "</", f"{P}<a>", f"{P}</a>", f"{P}<item>", f"{P}</item>", END, f"{P}<b>"]
PARTS += [f"{P}</b>", "x", " ", "\n", "]", "1", "{", '"', ">", "<", "/", f"{P}<>", f"{P}< >"]
TYPES = [None, {}, {"a": "string", "b": "array"}, {"a": "object", "b": "string|null"}]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=20),
    places=cuts,
    types=st.sampled_from(TYPES),
)
def test_any_text_reads_alike_at_any_division(
    parts: list[str], places: list[int], types: dict[str, str] | None
) -> None:
    text = "".join(parts)
    found = read(text, types, places)
    whole = read(text, types)
    assert found.json == whole.json
    assert found.status == whole.status
    assert found.rest == whole.rest
    status = JsonScanner(objects_only=True).feed(found.json, 0)[1]
    assert status is not ScanStatus.FAILED
    assert (found.status is ScanStatus.DONE) == (status is ScanStatus.DONE)


@given(made=objects, place=st.integers(0))
def test_one_goes_on_from_what_another_saved(
    made: dict[str, tuple[dict[str, Any], Any]], place: int
) -> None:
    properties = {name: schema for name, (schema, _) in made.items()}
    types = property_types({"parameters": {"properties": properties}}, is_nested=True)
    text = rendered({name: each for name, (_, each) in made.items()})
    place %= len(text) + 1
    first = scanner(types)
    begun = scan(first, [text[:place]])
    if not begun.has_begun or first.num_held or begun.status is not ScanStatus.MORE:
        return
    second = scanner(types)
    second.load(first.save())
    assert begun.json + scan(second, [text[place:]]).json == read(text, types).json


@pytest.mark.parametrize(
    ("types", "text", "value"),
    [
        (None, written("a", {"item": "x"}), {"a": {"item": "x"}}),
        (None, written("a", {"b": "x1", "c": 2}), {"a": {"b": "x1", "c": 2}}),
        ({}, f"{P}<a>{P}<b>1{P}</b>{P}<b>y{P}</b>{P}</a>", {"a": {"b": [1, "y"]}}),
        ({"a": "array"}, written("a", ["x", 2]), {"a": ["x", 2]}),
        ({"a": "array"}, f"{P}<a>[1, 2]{P}</a>", {"a": [1, 2]}),
        ({"a": "array"}, f"{P}<a>{P}</a>", {"a": []}),
        ({"a": "object|null"}, f"{P}<a>\n{P}</a>", {"a": {}}),
        ({"a": "string|array"}, f"{P}<a>{P}</a>", {"a": ""}),
        ({"a": "boolean"}, f"{P}<a>True{P}</a>", {"a": True}),
        ({"a": "integer"}, f"{P}<a>many{P}</a>", {"a": "many"}),
        ({"a": "object"}, f"{P}<a>x{P}<b>1{P}</b>{P}</a>", {"a": {"b": 1, "$text": "x"}}),
        ({"a": "string"}, f"{P}<a>{P}<b>1{P}</b>{P}</a>", {"a": f"{P}<b>1{P}</b>"}),
    ],
)
def test_what_a_value_is(types: dict[str, str] | None, text: str, value: object) -> None:
    found = read(text + END, types)
    assert found.status is ScanStatus.DONE
    assert json.loads(found.json) == value


@pytest.mark.parametrize(
    "text",
    [
        f"{P}<a>" + f"{P}<b>" * 100,
        f"{P}<a>{P}<b>1{P}</a>",
        f"{P}<{'n' * 300}>",
        f"{P}<a>{P}<b>{'x' * (MAX_HELD_CHARS + 1)}",
        f"{P}<a>" + f"{P}<b>{P}</b>" * (MAX_HELD_CHARS // 20),
        "x",
    ],
    ids=range(6),
)
def test_what_breaks_the_rules_is_a_fault(text: str) -> None:
    found = read(text)
    assert found.status is ScanStatus.FAILED
    assert found.json in ("", '{"a": ')


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=20),
    places=cuts,
    types=st.sampled_from(TYPES),
)
def test_what_is_broken_off_is_the_beginning_of_an_object(
    parts: list[str], places: list[int], types: dict[str, str] | None
) -> None:
    text = f"{P}<b>" + "".join(parts)
    given_at = []
    for cut in ([], places):
        reader = scanner(types)
        found = scan(reader, divided(text, cut))
        given_at.append(found.json + reader.break_off())
    assert given_at[0] == given_at[1]
    assert JsonScanner(objects_only=True).feed(given_at[0], 0)[1] is not ScanStatus.FAILED


@pytest.mark.parametrize(
    ("text", "begun"),
    [
        (f"{P}<b>{P}<item>1{P}</item>{P}<item>hi", '{"b": [1, "hi'),
        (f"{P}<a>{P}<b>1{P}</b>{P}<c>x{P}</c>{P}<b>tr", '{"a": {"c": "x", "b": [1, tr'),
        (f"{P}<a>{P}<b>1{P}</b>{P}", '{"a": {"b": 1'),
        (f"{P}<a>{P}</a>{P}<nam", '{"a": {}, "nam'),
    ],
)
def test_what_was_read_of_a_value_is_kept(text: str, begun: str) -> None:
    reader = scanner({"a": "object", "b": "array"})
    found = scan(reader, [text])
    assert found.json + reader.break_off() == begun


def test_what_is_no_word_streams_as_a_string() -> None:
    reader = scanner({"a": "string|null"})
    reader.feed(f"{P}<a>", 0)
    reader.take()
    reader.feed("hi", 0)
    assert reader.take() == '"hi'
    reader = scanner(None)
    reader.feed(f"{P}<a>", 0)
    reader.feed("[" * (MAX_HELD_CHARS + 1), 0)
    assert len(reader.take()) > MAX_HELD_CHARS


def test_a_string_streams_as_it_comes() -> None:
    reader = scanner({"a": "string"})
    reader.feed(f"{P}<a>", 0)
    assert reader.take() == '{"a": "'
    assert reader.string_hazards == frozenset('"\\]') | {chr(code) for code in range(32)}
    reader.feed('x"]', 0)
    assert (reader.take(), reader.num_held) == ('x\\"', 1)
