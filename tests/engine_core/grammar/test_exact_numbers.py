"""Regular expressions of numbers between bounds, and schemas with integers beyond a float's."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.grammar.exact_numbers import decimal_pattern, integer_pattern
from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_ipc.messages import StructuredOutputs

VOCABULARY = Vocabulary(MODEL_PATH / "tokenizer.json", 4100, (1, 0))
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
N = 2**53 + 1
BOUND = st.one_of(
    st.none(),
    st.integers(-25, 25),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**63 - 1, -(2**63), 10**19, 999, 1000, -1000]),
)


@st.composite
def near(draw: st.DrawFn, bounds: tuple[int | None, int | None]) -> int:
    given = [each for each in bounds if each is not None] or [0]
    return draw(st.sampled_from(given)) + draw(
        st.integers(-12, 12) | st.integers(-(10**9), 10**9) | st.integers(-(2**64), 2**64)
    )


@settings(max_examples=300, deadline=None)
@given(BOUND, BOUND, st.data())
def test_a_pattern_of_integers_is_of_those_between_its_bounds(
    least: int | None, most: int | None, data: st.DataObject
) -> None:
    if least is not None and most is not None and least > most:
        with pytest.raises(ValueError, match="between"):
            integer_pattern(least, most)
        return
    pattern = integer_pattern(least, most)
    value = data.draw(near((least, most)))
    fits = (least is None or least <= value) and (most is None or value <= most)
    assert bool(re.fullmatch(pattern, str(value))) == fits
    assert not re.fullmatch(pattern, f"0{value}")
    assert not re.fullmatch(pattern, "-0")


@settings(max_examples=400, deadline=None)
@given(BOUND, BOUND, st.booleans(), st.booleans(), st.data())
def test_a_pattern_of_decimals_is_of_those_between_its_bounds(
    least: int | None, most: int | None, above: bool, below: bool, data: st.DataObject
) -> None:
    is_empty = least is not None and most is not None and (least, above or below) >= (most, True)
    assume(not is_empty)
    assume(least is None or most is None or least <= most)
    pattern = decimal_pattern(least, most, above=above, below=below)
    whole = data.draw(near((least, most)))
    text = f"{whole}{data.draw(st.sampled_from(['', '.0', '.00', '.5', '.001', '.9999']))}"
    value = Decimal(text)
    fits = least is None or value > least or (value == least and not above)
    fits = fits and (most is None or value < most or (value == most and not below))
    assert bool(re.fullmatch(pattern, text)) == fits


def allows(schema: dict[str, Any], text: str, **options: Any) -> bool:
    outputs = StructuredOutputs(json=schema, strict=True, **options)
    matcher = VOCABULARY.compile(outputs)
    ids = TOKENIZER.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def required(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


TREE = {
    "$ref": "#/$defs/n",
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "id": {"const": N},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
            },
            "required": ["id"],
            "additionalProperties": False,
        }
    },
}
MIXED = {
    "type": "object",
    "properties": {"a": {"enum": [N, 1]}, "b/": {"$ref": "#/$defs/s"}, "c": {"type": "null"}},
    "required": ["b/"],
    "$defs": {"s": {"type": "array", "items": {"$ref": "#/$defs/t"}}, "t": {"type": "boolean"}},
}
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    ({"const": N}, [str(N)], [str(N - 1), f"{N}.0"]),
    (
        {"enum": [123456789012345678, 1, "x"]},
        ["123456789012345678", "1", '"x"'],
        ["12345678901234568"],
    ),
    ({"enum": [N, "x", 1.5], "type": ["integer", "string"]}, [str(N), '"x"'], ["1.5"]),
    ({"const": {"a": [N]}}, [f'{{"a":[{N}]}}'], [f'{{"a":[{N - 1}]}}']),
    ({"const": -N}, [str(-N)], [str(1 - N), str(N)]),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [str(2**63 - 1), str(-(2**63)), "0", "-17"],
        [str(2**63), str(-(2**63) - 1), "1.5"],
    ),
    (
        {"type": "integer", "exclusiveMinimum": N - 1, "exclusiveMaximum": N + 1},
        [str(N)],
        [str(N - 1)],
    ),
    ({"type": "integer", "minimum": N, "exclusiveMinimum": True}, [str(N + 1)], [str(N)]),
    ({"minimum": N}, [str(N), f"{N}.5", '"x"', "null", "{}"], [str(N - 1), f"{N - 1}.5"]),
    (
        {"type": "number", "minimum": -3.4e38, "maximum": 3.4e38},
        ["1.5", "-7", "34" + "0" * 37, "-34" + "0" * 37],
        ["34" + "0" * 36 + "1", "34" + "0" * 37 + ".5"],
    ),
    (
        required(type="integer", maximum=2**64),
        ['{"a":18446744073709551616}', '{"a":3,"b":"x"}'],
        ['{"a":18446744073709551617}', '{"a":3,"a":4}', "{}"],
    ),
    (
        required(type=["integer", "null"], minimum=N),
        ['{"a":null}', f'{{"a":{N}}}'],
        [f'{{"a":{N - 1}}}'],
    ),
    (
        {"type": "array", "items": {"enum": [N, 2]}, "minItems": 1, "maxItems": 2},
        ["[2]", f"[2,{N}]"],
        ["[]", "[2,2,2]", f"[{N - 1}]"],
    ),
    (
        TREE,
        [f'{{"id":{N},"next":{{"id":{N}}}}}', f'{{"id":{N},"next":null}}'],
        [f'{{"id":{N},"next":{{"id":{N - 1}}}}}', "{}"],
    ),
    (
        {
            "type": "object",
            "properties": {"\x7f": {"enum": [N, "\x7f"]}, "\t": {"type": "null"}},
            "required": ["\x7f"],
        },
        [f'{{"\x7f":{N}}}', '{"\x7f":"\x7f","\\t":null}', f'{{"\x7f":{N},"a":1}}'],
        [f'{{"\x7f":{N - 1}}}', f'{{"\x7f":{N},"\x7f":1}}', f'{{"\x7f":{N},"\\t":1}}'],
    ),
    (
        MIXED,
        [f'{{"a":{N},"b/":[true],"c":null,"d":1}}', '{"b/":[]}', '{"b/":[],"e":{"f":1}}'],
        [
            f'{{"a":{N - 1},"b/":[]}}',
            '{"b/":[1]}',
            f'{{"b/":[],"a":{N}}}',
            '{"b/":[],"b/":[]}',
            "{}",
        ],
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CASES)
def test_integers_beyond_a_float_are_exact(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    for text in right:
        assert allows(schema, text, disable_any_whitespace=True), text
    for text in wrong:
        assert not allows(schema, text, disable_any_whitespace=True), text


def test_blanks_are_those_of_other_schemas() -> None:
    assert allows(MIXED, f'{{\n  "a": {N},\n  "b/": [ true ],\n  "z": 1\n}}')
    assert not allows(MIXED, '{  "b/": []}')
    assert not allows(MIXED, '{ "b/": []}', disable_any_whitespace=True)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ({"allOf": [{"type": "integer"}, {"minimum": N}]}, "allOf.1.minimum"),
        ({"type": "integer", "minimum": N, "multipleOf": 2}, "minimum"),
        (
            {"type": "object", "patternProperties": {"^a": {"const": N}}},
            r"patternProperties.\^a.const",
        ),
        ({"type": "number", "minimum": 0.5, "maximum": 1e20}, "maximum"),
    ],
)
def test_where_they_cannot_be_exact_they_are_refused_or_left_out(
    schema: dict[str, Any], name: str
) -> None:
    with pytest.raises(GrammarError, match=f"{name} cannot be enforced"):
        VOCABULARY.text_of(StructuredOutputs(json=schema, strict=True))
    _, left_out = VOCABULARY.text_of(StructuredOutputs(json=schema))
    assert left_out
    assert all(each.startswith("structured_outputs.json.") for each in left_out)
