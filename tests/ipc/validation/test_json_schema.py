"""Which schemas no finite JSON fits, and what references lead to."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc.validation.json_schema import (
    EndlessSchemaError,
    SchemaDocument,
    check_ends,
)


def ref(name: str = "n") -> dict[str, Any]:
    return {"$ref": f"#/$defs/{name}"}


def node(**more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"n": ref()}, **more}


OPTIONAL = {"anyOf": [{"type": "null"}, ref()]}
REQUIRED = node(required=["n"])
ENDLESS: dict[str, dict[str, Any]] = {
    "a reference to itself": {**ref(), "$defs": {"n": ref()}},
    "two that lead to each other": {
        **ref("a"),
        "$defs": {"a": {"allOf": [ref("b")]}, "b": {"anyOf": [ref("a")]}},
    },
    "an object that requires itself": {**ref(), "$defs": {"n": REQUIRED}},
    "through a list": {
        **ref(),
        "$defs": {"n": {"type": "array", "items": ref(), "minItems": 1}},
    },
    "through the first items": {"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1},
    "through additional properties": {
        "type": "object",
        "additionalProperties": {"$ref": "#"},
        "minProperties": 1,
    },
    "through a required name that is additional": {
        "type": "object",
        "additionalProperties": {"$ref": "#"},
        "required": ["x"],
    },
    "required beside the reference": {
        **ref("m"),
        "$defs": {"n": {"type": "object", "properties": {"n": ref("m")}}}
        | {"m": {**ref(), "required": ["n"]}},
    },
    "required in another part of allOf": {
        "allOf": [node(), {"required": ["n"]}],
        "$defs": {"n": {"allOf": [node(), {"required": ["n"]}]}},
    },
    "every branch": {**ref(), "$defs": {"n": {"oneOf": [REQUIRED, {"$ref": "#"}]}}},
    "the branch that is left by a type": {
        "allOf": [{"type": "object"}, {"$ref": "#/$defs/n"}],
        "$defs": {"n": {"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}}}
        | {"m": True},
        "required": ["n"],
    },
    "fewer other properties than it needs": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"$ref": "#"}, "c": {"$ref": "#"}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "by an anchor": {"$ref": "#x", "$defs": {"n": {"$anchor": "x", "$ref": "#x"}}},
    "in a list of items": {"type": "array", "items": [{"$ref": "#"}], "minItems": 1},
}
FINITE: dict[str, dict[str, Any]] = {
    "a tree": {**ref(), "$defs": {"n": node(properties={"n": OPTIONAL}, required=["n"])}},
    "optional": {**ref(), "$defs": {"n": node()}},
    "an empty list": {"type": "array", "items": {"$ref": "#"}},
    "items behind the first": {
        "type": "array",
        "prefixItems": [True],
        "items": {"$ref": "#"},
        "minItems": 1,
    },
    "another type": {"type": ["object", "null"], "properties": {"n": {"$ref": "#"}}}
    | {"required": ["n"]},
    "a constant": {"const": {"n": {}}, "properties": {"n": {"$ref": "#"}}, "required": ["n"]},
    "enough other properties": {
        "type": "object",
        "properties": {"a": {"type": "null"}, "b": {"type": "null"}, "c": {"$ref": "#"}},
        "minProperties": 2,
        "additionalProperties": {"$ref": "#"},
    },
    "nothing at the reference": {"$ref": "#/nowhere"},
    "a property named as a keyword": {"properties": {"$ref": {"type": "string"}}},
    "a cycle beside another branch": {
        "$ref": "#/$defs/a",
        "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/b"}, {"type": "null"}]}}
        | {"b": {"$ref": "#/$defs/a"}},
    },
}


def copied(schema: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(schema))
    return found


@pytest.mark.parametrize("name", ENDLESS)
def test_a_schema_that_never_ends_is_refused_by_its_reference(name: str) -> None:
    with pytest.raises(EndlessSchemaError, match=r'"\$ref": "#'):
        check_ends(SchemaDocument(copied(ENDLESS[name])))


@pytest.mark.parametrize("name", FINITE)
def test_a_schema_that_may_end_is_taken(name: str) -> None:
    document = SchemaDocument(copied(FINITE[name]))
    assert id(document.root) not in check_ends(document)


def test_an_endless_part_that_nothing_requires_is_found() -> None:
    document = SchemaDocument({"properties": {"x": ref()}, "$defs": {"n": copied(REQUIRED)}})
    found = {".".join(document.places[each].path) for each in check_ends(document)}
    assert found == {"properties.x", "$defs.n", "$defs.n.properties.n"}


def test_references_are_resolved() -> None:
    root = {
        "$id": "https://a.example/root",
        "properties": {
            "pointer": {"$ref": "#/$defs/a~1b%25"},
            "anchor": {"$ref": "#here"},
            "absolute": {"$ref": "https://a.example/root#/$defs/true"},
            "within": {"$ref": "https://b.example/inner"},
            "index": {"$ref": "#/anyOf/1"},
            "unknown place": {"$ref": "#/components/c"},
            "foreign": {"$ref": "https://c.example/x"},
            "dangling": {"$ref": "#/anyOf/2"},
            "no schema": {"$ref": "#/$id"},
        },
        "anyOf": [True, {"title": "one"}],
        "components": {"c": {"title": "c", "properties": {"d": {"$ref": "#/components/c"}}}},
        "$defs": {
            "a/b%": {"title": "ab"},
            "x": {"$anchor": "here", "title": "x"},
            "true": True,
            "in": {"$id": "https://b.example/inner", "properties": {"y": {"$ref": "#"}}},
        },
    }
    document = SchemaDocument(root)
    properties: Any = root["properties"]
    definitions: Any = root["$defs"]
    targets = {name: document.target(each) for name, each in properties.items()}
    assert targets["pointer"] is definitions["a/b%"]
    assert targets["anchor"] is definitions["x"]
    assert targets["absolute"] is True
    assert targets["within"] is definitions["in"]
    assert targets["index"] == {"title": "one"}
    assert targets["unknown place"]["title"] == "c"
    assert document.target(targets["unknown place"]["properties"]["d"]) is targets["unknown place"]
    assert targets["foreign"] is targets["dangling"] is targets["no schema"] is None
    assert document.target(definitions["in"]["properties"]["y"]) is definitions["in"]
    for name in ("pointer", "anchor", "within", "index", "unknown place"):
        again = SchemaDocument({**root, "$ref": document.pointer(targets[name])})
        assert again.target(again.root) is targets[name]


# ---- against an oracle: what fits within a number of levels --------------------------------------

NAMES = ("a", "b", "c")
REFS = st.sampled_from([{"$ref": f"#/$defs/{name}"} for name in NAMES])


def schemas(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    listed = st.lists(inner, min_size=1, max_size=2)
    return st.one_of(
        st.builds(
            lambda found, required, more: {
                "type": "object",
                "properties": dict(zip("xy", found, strict=False)),
                "required": required,
                **more,
            },
            listed,
            st.lists(st.sampled_from("xy"), unique=True, max_size=2),
            st.sampled_from([{}, {"additionalProperties": False}]),
        ),
        st.builds(
            lambda one, least: {"type": "array", "items": one, "minItems": least},
            inner,
            st.integers(0, 1),
        ),
        st.builds(lambda some: {"anyOf": some}, listed),
        st.builds(lambda some: {"allOf": some}, listed),
    )


PARTS = st.recursive(REFS | st.sampled_from([{"type": "null"}, False, True]), schemas, max_leaves=4)


def has_instance(root: dict[str, Any], parts: frozenset[str], depth: int, looks: list[int]) -> bool:
    """Whether some JSON of this depth fits all of these schemas, by trying every way to choose."""
    looks[0] -= 1
    if looks[0] < 0:
        raise RecursionError
    found = [json.loads(each) for each in parts]
    if False in found:
        return False
    for part in found:
        if part is True:
            return has_instance(root, parts - {"true"}, depth, looks)
        rest = frozenset(parts - {json.dumps(part)})
        if "$ref" in part:
            if depth <= 0:
                return False
            target = json.dumps(root["$defs"][part["$ref"][-1]])
            return has_instance(root, rest | {target}, depth - 1, looks)
        if "allOf" in part:
            return has_instance(root, rest | set(map(json.dumps, part["allOf"])), depth, looks)
        if "anyOf" in part:
            return any(
                has_instance(root, rest | {json.dumps(each)}, depth, looks)
                for each in part["anyOf"]
            )
    types = {part["type"] for part in found}
    if len(types) != 1:
        return not types
    if types == {"null"}:
        return True
    if depth <= 0:
        return False
    if types == {"array"}:
        if not any(part["minItems"] for part in found):
            return True
        items = frozenset(json.dumps(part["items"]) for part in found)
        return has_instance(root, items, depth - 1, looks)
    for name in {name for part in found for name in part["required"]}:
        inner = frozenset(
            json.dumps(part["properties"].get(name, part.get("additionalProperties", True)))
            for part in found
        )
        if not has_instance(root, inner, depth - 1, looks):
            return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.tuples(PARTS, PARTS, PARTS))
def test_what_never_ends_is_what_has_no_instance_of_any_depth(parts: tuple[Any, ...]) -> None:
    root = {
        "properties": {"x": {"$ref": "#/$defs/a"}},
        "$defs": dict(zip(NAMES, parts, strict=True)),
    }
    document = SchemaDocument(copied(root))
    endless = check_ends(document)
    target = document.target(document.root["properties"]["x"])
    is_endless = target is False or (isinstance(target, dict) and id(target) in endless)
    try:
        has_one = has_instance(root, frozenset((json.dumps(parts[0]),)), 8, [20_000])
    except RecursionError:  # too many ways to choose: nothing is known
        return
    assert is_endless != has_one
