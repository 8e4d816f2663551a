"""What is left out of schemas, what is refused of strict ones, and what says nothing."""

from __future__ import annotations

import copy
import itertools
import json
import re
from typing import Any
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.grammar import enforceable_schema
from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_ipc.messages import SCHEMA_MARK, StructuredOutputs

VOCABULARY = Vocabulary(MODEL_PATH / "tokenizer.json", 4100, (1, 0))
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def required(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}, "required": ["a"]}


def left_out(schema: object, *, strict: bool = False) -> list[str]:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    found = VOCABULARY.text_of(StructuredOutputs(json=text, strict=strict))
    VOCABULARY.compile_text(found.text)
    return [each.removeprefix("structured_outputs.json.") for each in found.left_out]


def allows(schema: object, text: str, *, strict: bool = True) -> bool:
    given = StructuredOutputs(json=json.dumps(schema), strict=strict, disable_any_whitespace=True)
    matcher = VOCABULARY.compile(given)
    ids = TOKENIZER.encode(text).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


CAT = {"type": "object", "properties": {"t": {"const": "c"}}, "required": ["t"]}
DOG = {"type": "object", "properties": {"t": {"const": "d"}}, "required": ["t"]}
B_NUMBERS, LETTERS = {"^b": {"type": "integer"}}, {"^[a-z]+$": {"type": ["integer", "string"]}}
PATTERNS = {"^a": {"type": "integer"}, "b$": {"type": "null"}}
UNENFORCED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "uniqueItems": (required(type="array", uniqueItems=True), ["properties.a.uniqueItems"]),
    "look-ahead": (required(type="string", pattern="^(?!x).*$"), ["properties.a.pattern"]),
    "word boundary": (required(type="string", pattern=r"\bx\b"), ["properties.a.pattern"]),
    "broken pattern": (required(type="string", pattern="("), ["properties.a.pattern"]),
    "oneOf that may overlap": (
        required(oneOf=[{"type": "integer"}, {"type": "number"}]),
        ["properties.a.oneOf"],
    ),
    "if, then, else": (
        {"if": {"required": ["a"]}, "then": True, "else": False},
        ["if", "then", "else"],
    ),
    "not": (required(**{"not": {"type": "null"}}), ["properties.a.not"]),
    "contains": (
        required(type="array", contains={"const": 1}, minContains=2),
        ["properties.a.contains", "properties.a.minContains"],
    ),
    "propertyNames": (required(propertyNames={"pattern": "^x"}), ["properties.a.propertyNames"]),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, ["dependentRequired"]),
    "dependencies": ({"dependencies": {"a": ["b"]}}, ["dependencies"]),
    "unevaluatedProperties": (
        {"allOf": [{"properties": {"a": True}}], "unevaluatedProperties": False},
        ["unevaluatedProperties"],
    ),
    "dynamicRef": ({"$dynamicRef": "#x"}, ["$dynamicRef"]),
    "patterns that overlap": (
        {"patternProperties": PATTERNS, "additionalProperties": False},
        ["patternProperties", "additionalProperties"],
    ),
    "pattern of names": ({"patternProperties": {"^a(?=b)": {}}}, ["patternProperties"]),
    "foreign reference": (required(**{"$ref": "https://a.example/x"}), ["properties.a.$ref"]),
    "dangling reference": (required(**{"$ref": "#/$defs/x"}), ["properties.a.$ref"]),
    "multipleOf": (required(type="integer", multipleOf=2**40), ["properties.a.multipleOf"]),
    "minProperties": (
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        ["minProperties"],
    ),
    "no such type": (required(type="any"), ["properties.a.type"]),
    "patterns that meet in allOf": (
        {"allOf": [{"patternProperties": B_NUMBERS}, {"patternProperties": LETTERS}]},
        ["allOf.1.patternProperties"],
    ),
    "closed patterns that meet": (
        {
            "allOf": [
                {"patternProperties": B_NUMBERS, "additionalProperties": False},
                {"patternProperties": LETTERS, "additionalProperties": False},
            ]
        },
        ["allOf.1.patternProperties", "allOf.1.additionalProperties"],
    ),
    "patterns that meet beside anyOf": (
        {
            "patternProperties": B_NUMBERS,
            "anyOf": [{"patternProperties": LETTERS}, {"type": "null"}],
        },
        ["anyOf.0.patternProperties"],
    ),
    "patterns that meet behind references": (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {"a": {"patternProperties": B_NUMBERS}, "b": {"patternProperties": LETTERS}},
        },
        ["$defs.b.patternProperties"],
    ),
    "patterns that meet in items": (
        {
            "allOf": [
                {"items": {"patternProperties": B_NUMBERS}},
                {"items": {"patternProperties": LETTERS}},
            ]
        },
        ["allOf.1.items.patternProperties"],
    ),
    "patterns that all meet": (
        {
            "allOf": [
                {"patternProperties": B_NUMBERS},
                {"patternProperties": LETTERS},
                {"patternProperties": {"[0-9]$": {}}},
            ]
        },
        ["allOf.1.patternProperties", "allOf.2.patternProperties"],
    ),
    "patterns that meet beside large numbers": (
        {
            "allOf": [{"patternProperties": B_NUMBERS}, {"patternProperties": LETTERS}],
            "properties": {"x": {"const": 2**60}},
        },
        ["allOf.1.patternProperties", "properties.x.const"],
    ),
    "circle with something beside it": (
        {
            "$ref": "#/$defs/n",
            "$defs": {"n": required(**{"$ref": "#/$defs/n", "required": ["b"]}) | {"required": []}},
        },
        ["$defs.n.properties.a.$ref"],
    ),
    "circles together": (
        {
            "$ref": "#/$defs/n",
            "$defs": {
                "n": {
                    "properties": {"a": {"allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}]}}
                },
                "m": {
                    "properties": {"a": {"allOf": [{"$ref": "#/$defs/n"}, {"$ref": "#/$defs/m"}]}}
                },
            },
        },
        ["$defs.n.properties.a.allOf.1.$ref"],
    ),
    "two of multipleOf": (
        {"allOf": [{"type": "integer", "multipleOf": 99991}, {"multipleOf": 99989}]},
        ["allOf.1.multipleOf"],
    ),
    "bounds far apart": (
        required(type="number", minimum=1e-300, maximum=1e300),
        ["properties.a.maximum", "properties.a.minimum"],
    ),
    "in a definition": (
        {"$ref": "#/$defs/x", "$defs": {"x": {"type": "array", "uniqueItems": True}}},
        ["$defs.x.uniqueItems"],
    ),
    "in a branch": (
        {"anyOf": [{"type": "array", "uniqueItems": True}, {"type": "null"}]},
        ["anyOf.0.uniqueItems"],
    ),
    "in what only a reference finds": (
        {"$ref": "#/components/x", "components": {"x": {"type": "array", "uniqueItems": True}}},
        ["components.x.uniqueItems"],
    ),
}
SAYS_NOTHING: dict[str, dict[str, Any]] = {
    "a record of zod": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "any names": {"propertyNames": {"description": "a name"}},
    "format": required(type="string", format="path"),
    "format of several types": required(type=["string", "null"], format="int64"),
    "uniqueItems": required(type="array", uniqueItems=False),
    "unique item": required(type="array", uniqueItems=True, maxItems=1),
    "not false": {"not": False},
    "then without if": {"then": {"required": ["a"]}, "else": False},
    "if alone": {"if": {"required": ["a"]}},
    "minContains alone": {"type": "array", "minContains": 2},
    "no fewer": {"type": "array", "contains": {"const": 1}, "minContains": 0},
    "unevaluated": {"allOf": [CAT], "unevaluatedProperties": True, "unevaluatedItems": {}},
    "empty": {"dependentRequired": {}, "dependentSchemas": {}, "patternProperties": {}},
    "few properties": {**CAT, "minProperties": 1},
    "many properties": {
        "type": "object",
        "properties": {"a": {}},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "float counts": {"type": "string", "minLength": 1.0, "maxLength": 3.0},
    "version": {"$schema": "https://a.example/mine", "type": "null"},
    "version of links": {"$schema": "http://json-schema.org/hyper-schema#", "type": "null"},
    "latest version": {"$schema": "http://json-schema.org/schema", "type": "null"},
    "names": {"$id": "b", "$anchor": "c", "$dynamicAnchor": "d", "type": "null"},
    "unknown words": {"nullable": True, "discriminator": {"propertyName": "t"}, "x-y": 1},
    "annotations": {"contentMediaType": "a/b", "contentSchema": {"not": {}}, "deprecated": True},
}


@pytest.mark.parametrize("name", UNENFORCED)
def test_a_keyword_that_cannot_be_enforced_is_left_out_and_named(name: str) -> None:
    schema, names = UNENFORCED[name]
    assert left_out(schema) == names
    with pytest.raises(GrammarError) as caught:
        left_out(schema, strict=True)
    assert str(caught.value).startswith(f"{names[0]} cannot be enforced, and the schema is strict")


@pytest.mark.parametrize("name", SAYS_NOTHING)
def test_what_says_nothing_is_taken_of_a_strict_schema_too(name: str) -> None:
    assert left_out(SAYS_NOTHING[name], strict=True) == []


def test_the_rest_of_a_schema_is_kept() -> None:
    schema = required(type="array", items={"type": "null"}, uniqueItems=True)
    assert allows(schema, '{"a":[null,null]}', strict=False)
    assert not allows(schema, '{"a":[1]}', strict=False)


def test_what_stands_beside_patterns_that_meet_is_kept() -> None:
    schema = {
        "allOf": [{"patternProperties": B_NUMBERS}, {"patternProperties": LETTERS}],
        "type": "object",
        "properties": {"a": {"type": "null"}},
        "required": ["a"],
    }
    for text, is_right in (
        ('{"a":null,"b":1,"c":true}', True),
        ('{"a":null,"b":"x"}', False),
        ('{"a":1}', False),
        ('{"b":1}', False),
    ):
        assert allows(schema, text, strict=False) is is_right, text


DISJOINT: list[list[Any]] = [
    [{"type": "integer"}, {"type": "string"}],
    [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
    [{"const": 1}, {"enum": [2, True]}],
    [{"anyOf": [CAT, {"type": "null"}]}, DOG],
    [{"allOf": [CAT]}, {"allOf": [DOG, {"title": "x"}]}],
    [CAT, {"type": "object", "properties": {}, "additionalProperties": False}],
]
OVERLAPPING: list[list[Any]] = [
    [{"type": "integer"}, {"type": "number"}],
    [{"const": 1}, {"const": 1.0}],
    [CAT, {"type": "object"}],
    [{"properties": {"t": {"const": 1}}}, {"properties": {"t": {"const": 2}}}],
    [CAT, {"type": "object", "properties": {"t": {"const": "d"}}, "required": ["u"]}, CAT],
    [True, {"type": "null"}],
]


@pytest.mark.parametrize("branches", DISJOINT)
def test_one_of_disjoint_schemas_is_enforced(branches: list[Any]) -> None:
    schema = {"oneOf": branches, "$defs": {"cat": CAT, "dog": DOG}}
    assert left_out(schema, strict=True) == []


@pytest.mark.parametrize("branches", OVERLAPPING)
def test_one_of_schemas_that_share_a_value_is_not(branches: list[Any]) -> None:
    assert left_out({"oneOf": branches}) == ["oneOf"]


def test_what_is_unevaluated_is_enforced_where_it_is_what_is_additional() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert not allows({**schema, "unevaluatedProperties": False}, '{"b":1}')
    assert allows({**schema, "unevaluatedProperties": False}, '{"a":null}')
    items = {"type": "array", "prefixItems": [{"type": "null"}], "unevaluatedItems": False}
    assert allows(items, "[null]")
    assert not allows(items, "[null,1]")


def test_what_never_ends_is_never_begun() -> None:
    loop = {"$ref": "#/$defs/l"}
    inner = {"me": loop, "ok": {"type": "null"}}
    definition = {"type": "object", "required": ["me"], "properties": inner}
    schema = {
        "type": "object",
        "properties": {"x": loop, "y": {"$ref": "#/$defs/l/properties/ok"}, "z": loop},
        "required": ["y"],
        "$defs": {"l": definition},
    }
    assert allows(schema, '{"y":null}')
    assert not allows(schema, '{"x":{"me"')
    assert not allows(schema, '{"y":1}')
    branches = {"anyOf": [loop, {"type": "null"}], "$defs": {"l": loop}}
    assert allows(branches, "null")
    with pytest.raises(GrammarError, match=r'"\$ref": "#/\$defs/l" refers to'):
        left_out({**loop, "$defs": {"l": definition}})


def test_booleans_are_schemas_and_other_values_are_not() -> None:
    assert left_out(True) == []
    with pytest.raises(GrammarError, match="schema is false"):
        left_out(False)
    for text in ("[]", '"x"', "1", "null"):
        with pytest.raises(GrammarError, match="an object or a boolean"):
            left_out(text)
    for text in ('{"const": NaN}', '{"const": "\\ud800"}', "{"):
        with pytest.raises(GrammarError):
            left_out(text)


def test_a_long_path_is_cut_and_a_strange_name_is_shown() -> None:
    (name,) = left_out({"properties": {"x" * 5000: {"type": "array", "uniqueItems": True}}})
    assert len(name) < 200
    assert name.endswith("x.uniqueItems")


def test_schemas_in_a_made_grammar_are_enforced_and_named_by_their_path() -> None:
    def rule(path: str, strict: bool, **schema: Any) -> str:
        return "%json " + json.dumps({**schema, SCHEMA_MARK: {"path": path, "strict": strict}})

    grammar = "\n".join(
        [
            'start: "%json {" (one | two | three)',
            f"one: {rule('tools.f', False, type='array', uniqueItems=True)}",
            f"two: {rule('tools.g', False, const=2**53 + 1)} // %json {{",
            'three: /%json \\{"/',
        ]
    )
    found = VOCABULARY.text_of(StructuredOutputs(grammar=grammar))
    assert found.left_out == ("tools.f.uniqueItems",)
    for text, is_allowed in ((f"%json {{{2**53 + 1}", True), (f"%json {{{2**53}", False)):
        matcher = VOCABULARY.compile_text(found.text)
        ids = TOKENIZER.encode(text).ids
        assert (matcher.try_consume_tokens(ids) == len(ids)) == is_allowed
    strict = grammar.replace('"strict": false', '"strict": true')
    with pytest.raises(GrammarError, match=r"tools\.f: uniqueItems cannot be enforced"):
        VOCABULARY.text_of(StructuredOutputs(grammar=strict))
    own = 'start: %json {"type": "array", "uniqueItems": true}'
    assert VOCABULARY.text_of(StructuredOutputs(grammar=own)).left_out == ()


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"pattern": "^a/[/b]+$"}, ["a/b", "a//"], ["a/", "b", "a/b "]),
        ({"pattern": "^(?:a\\/|b\n\\\\)$"}, ["a/", "b\n\\"], ["a", "b\n"]),
        ({"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 3}, ["ab", "abc"], ["a", "abcd"]),
        ({"pattern": "^[a-z]+$", "minLength": 2}, ["ab", "abcde"], ["a", "A"]),
        ({"pattern": "^(?=a)$", "maxLength": 2}, ["", "x\n"], ["abc"]),
    ],
)
def test_a_bare_schema_is_a_terminal(schema: Any, good: list[str], bad: list[str]) -> None:
    mark = {"path": "tools.f.x", "strict": False, "bare": True}
    written = json.dumps({"type": "string", **schema, SCHEMA_MARK: mark})
    grammar = f'start: "<" TEXT\nTEXT: (BARE />/) & ~/(.|\\n)*>(.|\\n)+/\nBARE: %json {written}\n'
    found = VOCABULARY.text_of(StructuredOutputs(grammar=grammar))
    is_lacking = "(?=" in schema["pattern"]
    assert found.left_out == (("tools.f.x.pattern",) if is_lacking else ())
    matcher = VOCABULARY.compile_text(found.text)
    for text in (*good, *bad):
        one, ids = matcher.deep_copy(), TOKENIZER.encode(f"<{text}>").ids
        is_allowed = one.try_consume_tokens(ids) == len(ids) and one.is_accepting()
        assert is_allowed is (text in good), text
    if is_lacking:
        strict = grammar.replace('"strict": false', '"strict": true')
        with pytest.raises(GrammarError, match=r"tools\.f\.x: pattern cannot be enforced"):
            VOCABULARY.text_of(StructuredOutputs(grammar=strict))


INTEGER = {"type": "integer"}
OPEN = {"type": "object", "properties": {"a": INTEGER, "é\n": INTEGER}}
IN_A_LIST = {"type": "array", "items": OPEN}


@pytest.mark.parametrize(
    ("schema", "frame"),
    [
        (OPEN, "{}"),
        ({**OPEN, "additionalProperties": True}, "{}"),
        ({**OPEN, "additionalProperties": {}}, "{}"),
        ({**OPEN, "additionalProperties": {"title": "any"}}, "{}"),
        ({"type": "object", "required": ["a"]}, "{}"),
        (IN_A_LIST, "[{}]"),
        ({"anyOf": [IN_A_LIST, OPEN]}, "{}"),
        ({"$ref": "#/$defs/x", "$defs": {"x": OPEN}}, "{}"),
        ({"allOf": [OPEN, {"type": "object", "properties": {"c": INTEGER}}]}, "{}"),
    ],
)
def test_a_known_name_is_not_spelled_anew(schema: Any, frame: str) -> None:
    """It would parse to the same name: JSON of the schema would no longer fit it."""
    for strict in (True, False):
        for good in ('{"a":1,"b":"x"}', '{"a":1,"é\\"\\\\ /":"x"}', '{"a":1,"":{"a":2}}'):
            assert allows(schema, frame.replace("{}", good), strict=strict)
        for bad in (r'{"a":1,"\u0061":"x"}', r'{"a":1,"\u0061b":"x"}', '{"a":1,"a":"x"}'):
            assert not allows(schema, frame.replace("{}", bad), strict=strict)
    if schema is OPEN:
        assert allows(schema, r'{"a":1,"é\n":2}')
        for other in (r"\u00e9\n", r"é\u000a", r"\u00E9\u000A"):
            assert not allows(schema, f'{{"a":1,"{other}":"x"}}')


STRINGS = {"type": "string"}
TYPED = {**OPEN, "additionalProperties": STRINGS}
NUMBERED = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
BY_BEGINNING = {**OPEN, "patternProperties": {"^x-": INTEGER}}


@pytest.mark.parametrize(
    ("schema", "frame"),
    [
        (TYPED, "{}"),
        ({**TYPED, "required": ["a"]}, "{}"),
        ({**TYPED, "properties": {"a": INTEGER, "": INTEGER, "aa": INTEGER}}, "{}"),
        ({"type": "array", "items": TYPED}, "[{}]"),
        ({"anyOf": [{"type": "integer"}, TYPED]}, "{}"),
        ({"$ref": "#/$defs/x", "$defs": {"x": TYPED}}, "{}"),
        ({**NUMBERED, "minProperties": 2}, "{}"),
        ({**NUMBERED, "minProperties": 2, "additionalProperties": STRINGS}, "{}"),
        ({**NUMBERED, "maxProperties": 3}, "{}"),
        ({**NUMBERED, "maxProperties": 3, "additionalProperties": STRINGS}, "{}"),
        (BY_BEGINNING, "{}"),
        ({**BY_BEGINNING, "additionalProperties": STRINGS}, "{}"),
        ({"type": "array", "prefixItems": [BY_BEGINNING], "items": TYPED}, "[{}]"),
        ({"type": "array", "prefixItems": [TYPED], "items": {"minProperties": 1}}, "[{}]"),
        ({**TYPED, "patternProperties": {"^x-": INTEGER, "^y$": INTEGER}}, "{}"),
        ({**OPEN, "patternProperties": {"^.*$": True}}, "{}"),
        ({"allOf": [TYPED, {"type": "object", "properties": {"c": STRINGS}}]}, "{}"),
        ({"allOf": [OPEN, {"type": "object", "patternProperties": {"^x-": INTEGER}}]}, "{}"),
        ({"allOf": [OPEN, {"type": "object", "patternProperties": {"^a": True}}]}, "{}"),
        (
            {
                "$ref": "#/$defs/x",
                "maxProperties": 3,
                "$defs": {"x": {**NUMBERED, "additionalProperties": STRINGS}},
            },
            "{}",
        ),
        ({"$ref": "#/$defs/x", **BY_BEGINNING, "$defs": {"x": OPEN}}, "{}"),
    ],
)
def test_a_known_name_is_not_spelled_anew_beside_typed_names_patterns_and_bounds(
    schema: Any, frame: str
) -> None:
    for strict in (True, False):
        for good in ('{"a":1,"b":"x"}', '{"a":1,"é\\"\\\\ /":"x"}', '{"a":1,"ab":"x"}'):
            assert allows(schema, frame.replace("{}", good), strict=strict), good
        for bad in (r'{"a":1,"\u0061":"x"}', r'{"a":1,"\u0061b":"x"}', '{"a":1,"a":"x"}'):
            assert not allows(schema, frame.replace("{}", bad), strict=strict), bad
    if "^x-" in json.dumps(schema):
        assert allows(schema, frame.replace("{}", '{"a":1,"x-y":2}'))
        assert not allows(schema, frame.replace("{}", '{"a":1,"x-y":"x"}'))
        for other in (r"\u0078-y", r"x\u002dy", r"x-\u0079"):
            assert not allows(schema, frame.replace("{}", f'{{"a":1,"{other}":"x"}}')), other


LETTERS = {"patternProperties": {"^[b-y]+$": STRINGS}}
OF_A_KIND = {**OPEN, **LETTERS}


@pytest.mark.parametrize(
    ("schema", "frame"),
    [
        (OF_A_KIND, "{}"),
        ({**OF_A_KIND, "required": ["a"]}, "{}"),
        ({**OF_A_KIND, "additionalProperties": INTEGER}, "{}"),
        ({**OF_A_KIND, "patternProperties": {"^[b-y]+$": STRINGS, "^[0-9]": INTEGER}}, "{}"),
        ({**OF_A_KIND, "patternProperties": {"^[b-y]+$": STRINGS, "^x-": INTEGER}}, "{}"),
        ({"type": "array", "items": OF_A_KIND}, "[{}]"),
        ({"anyOf": [{"type": "integer"}, OF_A_KIND]}, "{}"),
        ({"$ref": "#/$defs/x", "$defs": {"x": OF_A_KIND}}, "{}"),
        ({"type": "array", "prefixItems": [OF_A_KIND], "items": TYPED}, "[{}]"),
        ({"allOf": [OPEN, {"type": "object", **LETTERS}]}, "{}"),
        ({"$ref": "#/$defs/x", **OF_A_KIND, "$defs": {"x": OPEN}}, "{}"),
    ],
)
def test_no_name_is_spelled_anew_beside_patterns(schema: Any, frame: str) -> None:
    for strict in (True, False):
        for good in (
            '{"a":1}',
            '{"a":1,"b":"x"}',
            '{"a":1,"b":"x","C":1}',
        ):
            assert allows(schema, frame.replace("{}", good), strict=strict), good
        for bad in (
            *('{"a":1,"b":1}', '{"a":1,"bd":1}', '{"a":1,"a":"x"}', '{"a":"x"}'),
            *(r'{"a":1,"\u0061":"x"}', r'{"\u0061":"x"}', r'{"\u0061":1}'),
            *(r'{"a":1,"\u0062":1}', r'{"a":1,"b\u0063":1}', r'{"a":1,"\u0062":"x"}'),
        ):
            assert not allows(schema, frame.replace("{}", bad), strict=strict), bad


@pytest.mark.parametrize("pattern", ["^(?i)b$", r"^\p{Lu}", "^(b{40}|c{60}){9}$"])
def test_a_pattern_without_a_complement_is_left_out_where_others_may_stand(pattern: str) -> None:
    known = {
        "type": "object",
        "properties": {"a": INTEGER},
        "patternProperties": {pattern: STRINGS},
    }
    assert left_out(known) == ["patternProperties"]
    with pytest.raises(GrammarError, match="patternProperties cannot be enforced"):
        left_out(known, strict=True)
    assert not allows(known, r'{"a":1,"\u0061":"x"}', strict=False)
    both = {"allOf": [OPEN, {"patternProperties": {pattern: STRINGS}}]}
    assert left_out(both) == ["allOf.1.patternProperties"]
    assert not allows(both, r'{"a":1,"\u0061":"x"}', strict=False)
    closed = {**known, "additionalProperties": False}
    assert left_out(closed, strict=True) == []
    assert not allows(closed, r'{"a":1,"\u0061":"x"}')


def test_a_name_with_control_characters_is_not_spelled_anew_by_a_pattern() -> None:
    """A pattern takes each spelling of a control character, of a known name's, too."""
    for pattern, more in (("^[^x]*$", False), ("^a", False), ("^a", True)):
        whole = {
            "type": "object",
            "properties": {"a\n": INTEGER},
            "patternProperties": {pattern: True},
            "additionalProperties": more,
        }
        assert left_out(whole)[0] == "patternProperties"
        assert not allows(whole, r'{"a\u000a":"x"}', strict=False)
        assert allows(whole, r'{"a\n":1}', strict=False)
    whole["patternProperties"] = {"^b$": True}
    assert left_out(whole, strict=True) == []
    assert not allows(whole, r'{"a\u000a":"x"}')


def test_many_names_are_told_from_typed_others() -> None:
    names = {f"name_of_a_property_{n}": INTEGER for n in range(60)}
    whole = {"type": "object", "properties": names, "additionalProperties": STRINGS}
    assert left_out(whole, strict=True) == []
    assert allows(whole, '{"name_of_a_property_7":1,"name_of_a_property":"x"}')
    assert not allows(whole, '{"name_of_a_property_59":"x"}')


@pytest.mark.parametrize("inner", [OPEN, TYPED, BY_BEGINNING, OF_A_KIND])
def test_a_known_name_is_not_spelled_anew_beside_large_numbers(inner: Any) -> None:
    large = {"type": "integer", "minimum": 2**53 + 1}
    whole = {"type": "object", "properties": {"n": large, "o": inner}, "required": ["n", "o"]}
    number = str(2**53 + 1)
    assert allows(whole, f'{{"n":{number},"o":{{"a":1,"b":"x"}}}}')
    assert not allows(whole, f'{{"n":{2**53},"o":{{"a":1,"b":"x"}}}}')
    assert not allows(whole, rf'{{"n":{number},"o":{{"a":1,"\u0061":"x"}}}}')
    assert not allows(whole, rf'{{"n":{number},"o":{{"a":1}},"\u006e":1}}')


def test_a_typed_name_may_be_longer_or_shorter_than_a_known_one() -> None:
    schema = {**TYPED, "properties": {"name": INTEGER, "names": INTEGER, "é]^-": INTEGER}}
    for good in ("nam", "namess", "nbme", "", "N", "é", "é]^", "é]^-x", "^", "-", "]"):
        assert allows(schema, json.dumps({good: "x"}, ensure_ascii=False, separators=(",", ":")))
    for known in ("name", "names", "é]^-"):
        text = json.dumps({known: "x"}, ensure_ascii=False, separators=(",", ":"))
        assert not allows(schema, text)
        assert allows(schema, text.replace('"x"', "3"))


@settings(max_examples=200)
@given(
    st.lists(st.text("ab]é", max_size=3), max_size=4),
    st.lists(st.text("ab]é", min_size=1, max_size=3), max_size=2),
    st.text("ab]éc", max_size=4),
)
def test_other_names_are_all_but_the_known(
    names: list[str], prefixes: list[str], name: str
) -> None:
    pattern = re.sub(
        r"\\x\{(\w+)\}",
        lambda found: rf"\u{int(found[1], 16):04x}",
        enforceable_schema.other_names(dict.fromkeys(names, True) | dict.fromkeys(prefixes, False)),
    )
    is_other = name not in {*names} - {*prefixes} and not name.startswith(tuple(prefixes))
    assert bool(re.fullmatch(pattern, name)) is is_other


def test_what_typed_names_refer_to_is_reached_where_it_moves() -> None:
    tree = {"type": "object", "properties": {"a": INTEGER}, "required": ["a"]}
    whole = {**tree, "additionalProperties": {"$ref": "#"}}
    assert allows(whole, '{"a":1,"b":{"a":2,"c":{"a":3}}}')
    assert not allows(whole, r'{"a":1,"\u0061":{"a":2}}')
    inner = {"type": "object", "properties": {"s": STRINGS}, "required": ["s"]}
    for where in ("", "/properties/s"):
        whole = {
            "type": "object",
            "properties": {"a": {"$ref": f"#/additionalProperties{where}"}},
            "additionalProperties": copy.deepcopy(inner),
        }
        value = '"x"' if where else '{"s":"x"}'
        assert allows(whole, f'{{"a":{value},"b":{{"s":"y"}}}}')
        assert not allows(whole, rf'{{"a":{value},"\u0061":{{"s":"y"}}}}')
        assert not allows(whole, '{"b":1}')


def test_what_other_properties_refer_to_stays_in_its_place() -> None:
    whole = {**OPEN, "additionalProperties": {"title": "any"}}
    whole["properties"] = {"a": {"$ref": "#/additionalProperties"}}
    assert allows(whole, '{"a":"x"}')


def test_values_of_one_name_know_of_the_names_of_all() -> None:
    """The library knows them by itself; our spelling of names keeps that, beside equal patterns."""
    starts = {"^a": True}
    inner = {"type": "object", "properties": {"a": INTEGER, "b": INTEGER}}
    whole = {
        "type": "object",
        "properties": {"a": {"type": "object", "patternProperties": starts}},
        "allOf": [{"type": "object", "properties": {"a": inner | {"patternProperties": starts}}}],
    }
    assert allows(whole, '{"a":{"a":1,"b":2,"c":"x"}}')
    assert not allows(whole, '{"a":{"\\u0061":"x"}}')
    assert not allows(whole, '{"a":{"b":"x"}}')


NAMES = st.sampled_from(["a", "b", "c", "d é", '"\\'])
VALUES = st.recursive(
    st.sampled_from([1, "x", None, True]),
    lambda inner: st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@st.composite
def objects(draw: st.DrawFn, depth: int = 0) -> dict[str, Any]:
    """A schema of objects, most of them open."""
    inner = st.sampled_from([INTEGER, {"type": "string"}, True, {"type": ["string", "null"]}])
    values = inner if depth > 1 else st.one_of(inner, objects(depth + 1))
    found: dict[str, Any] = {
        "type": "object",
        "properties": draw(st.dictionaries(st.sampled_from("abc"), values, max_size=3)),
    }
    if draw(st.booleans()):
        found["required"] = sorted(draw(st.sets(st.sampled_from("abcd"), max_size=2)))
    more = draw(st.sampled_from([None, None, True, {}, False, INTEGER, {"type": "string"}]))
    if more is not None:
        found["additionalProperties"] = copy.deepcopy(more)
    if draw(st.integers(0, 3)) == 0:
        found["patternProperties"] = {draw(st.sampled_from(["^a", "^d ", "^b", "c$"])): True}
    if draw(st.integers(0, 3)) == 0:
        found["maxProperties"] = draw(st.integers(0, 3))
    if depth < 2 and draw(st.integers(0, 3)) == 0:
        found["allOf"] = [draw(objects(depth + 1))]
    return found


# a pattern of one schema takes a name that another has itself, beside strings for all others
NAMED_AND_TAKEN = {
    "type": "object",
    "properties": {"a": INTEGER, "b": INTEGER, "c": INTEGER},
    "additionalProperties": {"type": "string"},
}


@settings(max_examples=60)
@example(
    {
        "type": "object",
        "required": ["c"],
        "allOf": [{**NAMED_AND_TAKEN, "allOf": [{"patternProperties": {"c$": True}}]}],
    },
    {"c": 1, "dc": "x"},
)
@example({**NAMED_AND_TAKEN, "allOf": [{"patternProperties": {"^b": True}}]}, {"b": 1, "bc": "x"})
@example({**NAMED_AND_TAKEN, "allOf": [{"patternProperties": {".*": True}}]}, {"b": 1, "d": "x"})
@example({**NAMED_AND_TAKEN, "allOf": [{"patternProperties": {"^c": INTEGER}}]}, {"c": 1, "d": "x"})
@example(
    {
        **NAMED_AND_TAKEN,
        "allOf": [{"patternProperties": {"c$": True}, "additionalProperties": False}],
    },
    {"c": 1},
)
@given(objects(), st.dictionaries(NAMES, VALUES, max_size=4))
def test_open_objects_allow_what_the_library_does(
    schema: dict[str, Any], value: dict[str, Any]
) -> None:
    """In any order: the library takes members in the schema's own alone."""
    plain = copy.deepcopy(schema)
    texts = [
        json.dumps(dict(each), ensure_ascii=False, separators=(",", ":"))
        for each in itertools.permutations(value.items())
    ]
    with mock.patch.object(enforceable_schema, "_spell_names_once"):
        before = [allows_or_not(plain, text) for text in texts]
    assert [allows_or_not(schema, text) for text in texts] == before


def allows_or_not(schema: dict[str, Any], text: str) -> bool | None:
    """None: the library does not take the schema."""
    try:
        return allows(schema, text)
    except GrammarError:
        return None
