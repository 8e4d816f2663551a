"""Forced arguments that are not written as JSON: what the grammar allows is read as values that the
schema allows.
"""

from __future__ import annotations

import contextlib
import json
from functools import cache
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.answers import read
from tests.helpers.grammar_walk import model_of, walk

from slipstream_core.grammar.embedded_schemas import with_schemas
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.typed_calls import TYPED_CALL_FORMATS
from slipstream_ipc.messages import LEFT_OUT_MARK, MAX_LEFT_OUT
from slipstream_ipc.messages.answer import EventKind
from slipstream_worker.formats.call_grammar import call_grammar, free_call_grammar
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.property_types import property_types

NAMES = [each.name for each in TYPED_CALL_FORMATS]
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "deepseek_v32", "kimi_k3")
BRACKETED = ("pythonic", "lfm2", "gemma4")
TREE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/Tree"}},
    "required": ["value"],
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "maybe": {"type": ["string", "null"]},
    "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "unit": {"type": "string", "enum": ["C", "F", 'a "b"\nc', "é", "'", "null", "7", ""]},
    "mixed": {"enum": ["a", 1, None, True, 2.5]},
    "always": {"const": "x y"},
    "count": {"type": "integer", "minimum": 0, "maximum": 99},
    "share": {"type": "number", "minimum": 0, "maximum": 1},
    "is_far": {"type": "boolean"},
    "nothing": {"type": "null"},
    "names": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3},
    "flags": {"type": "array", "items": {"type": "boolean"}},
    "one": {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
    "shape": {"enum": [{"k": ["a", None]}, ["\x7f"]]},
    "place": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "is_in": {"type": "boolean"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "tree": {"$ref": "#/$defs/Tree"},
}


def function(names: list[str], required: list[str], **fields: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": {name: PROPERTIES[name] for name in names},
        "required": required,
        "additionalProperties": False,
        "$defs": {"Tree": TREE},
    }
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **fields}}


@cache
def validator(names: tuple[str, ...], required: tuple[str, ...]) -> Any:
    return jsonschema.Draft202012Validator(
        function(list(names), list(required))["function"]["parameters"]
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 2**32), is_strict=st.booleans())
def test_arguments_fit_their_schema(
    name: str, has_tokens: bool, data: st.DataObject, seed: int, is_strict: bool
) -> None:
    names = data.draw(st.lists(st.sampled_from(sorted(PROPERTIES)), max_size=4, unique=True))
    required = [each for each in names if data.draw(st.booleans())]
    tool = function(names, required, strict=is_strict)
    found, model = model_of(name, "", has_tokens)
    grammar = call_grammar(found, model.ids, [tool], "function:f")
    types = {"f": property_types(tool["function"])}
    closers = [f"]<]minimax[>[</{each}>" for each in names]
    items = model.items(walk(model, grammar, seed, closers=closers))
    events = read(compile_format(found, model.ids), items, types)
    kinds = [each.kind for each in events]
    assert kinds[0] == EventKind.CALL_BEGINS, events
    assert kinds[-1] == EventKind.CALL_ENDS, events
    assert {*kinds[1:-1]} <= {EventKind.CALL_ARGUMENTS}
    arguments = json.loads("".join(each.text for each in events[1:-1]))
    validator(tuple(names), tuple(required)).validate(arguments)


def forced(name: str, parameters: Any, **fields: Any) -> str:
    tool = {"function": {"name": "f", "parameters": parameters, **fields}}
    found, model = model_of(name, "", True)
    return call_grammar(found, model.ids, [tool], "required")


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
def test_a_function_whose_schema_says_nothing_takes_anything(name: str) -> None:
    found, model = model_of(name, "", True)
    tool = {"function": {"name": "f", "parameters": {"type": "object"}}}
    grammar = call_grammar(found, model.ids, [tool], "required")
    compiled = compile_format(found, model.ids)
    for seed in range(10):
        events = read(compiled, model.items(walk(model, grammar, seed)), {"f": {}})
        arguments = "".join(
            each.text for each in events if each.kind == EventKind.CALL_ARGUMENTS and not each.call
        )
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"properties": {"x": {"type": "string", "pattern": "^a"}}}, "'pattern'"),
        ({"properties": {"x": {"type": "string", "format": "date"}}}, "'format'"),
        ({"properties": {"x": {"allOf": [{"type": "string"}, {"minLength": 2}]}}}, "'allOf'"),
        ({"properties": {"x": {"$ref": "#/$defs/no"}}}, "the reference"),
        ({"properties": {}, "minProperties": 1}, "'minProperties'"),
        ({"properties": {"x": False}}, "allows nothing"),
    ],
)
def test_what_cannot_be_kept_is_refused_of_a_strict_function(
    name: str, schema: Any, why: str
) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        forced(name, {"type": "object", **schema}, strict=True)
    assert caught.value.field == "tools"


def of(**schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
@pytest.mark.parametrize(
    ("parameters", "path"),
    [
        (of(type="string", minLength=3, maxLength=1), ""),
        (of(enum=[]), ""),
        (of(type="integer", enum=["a"]), ""),
        ({"type": "object", "properties": {"x": False}}, ""),
        (of(**{"$ref": "#/$defs/no"}), ".properties.x.$ref"),
        (of(**{"$ref": "https://a.example/b"}), ".properties.x.$ref"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_left_out_and_named_unless_it_is_strict(
    name: str, parameters: Any, path: str
) -> None:
    found, model = model_of(name, "", True)
    with pytest.raises(BadRequest) as caught:
        forced(name, parameters, strict=True)
    assert caught.value.field == "tools"
    grammar = forced(name, parameters)
    _, names = with_schemas(grammar, lambda _schema: "")
    assert names == (f"tools.f.parameters{path}",)
    if name == "lfm2":
        return  # its calls may be JSON, too, whose schema the core leaves out
    compiled = compile_format(found, model.ids)
    for seed in range(3):
        events = read(compiled, model.items(walk(model, grammar, seed)), {"f": {}})
        arguments = "".join(
            each.text for each in events if each.kind == EventKind.CALL_ARGUMENTS and not each.call
        )
        assert isinstance(json.loads(arguments), dict)


def left_out(grammar: str) -> list[str]:
    """The paths that a grammar names, as the core reads them."""
    text, found = with_schemas(grammar, lambda _schema: "")
    assert LEFT_OUT_MARK not in text or found
    return [each.removeprefix("tools.f.parameters.") for each in found]


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"properties": {"x": {"type": "string", "pattern": "^a"}}}, ["properties.x.pattern"]),
        ({"properties": {"x": {"type": "string", "format": "date"}}}, ["properties.x.format"]),
        ({"properties": {"x": {"type": "string", "pattern": "^a|b$"}}}, ["properties.x.pattern"]),
        ({"properties": {"x": {"type": "string", "pattern": "^a\\$"}}}, ["properties.x.pattern"]),
        ({"properties": {"x": {"type": "string", "pattern": "^a\nb$"}}}, ["properties.x.pattern"]),
        (
            {"properties": {"x": {"type": "string", "pattern": "^(?x)a$"}}},
            ["properties.x.pattern"],
        ),
        ({"properties": {"x": {"type": "string", "pattern": "^[a|]{2}(b|c)[]|]?$"}}}, []),
        ({"properties": {"x": {"type": "string", "format": "path"}}}, []),
        ({"properties": {}, "minProperties": 1}, ["minProperties"]),
        (
            {
                "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/a"}},
                "$defs": {"a": {"type": "string", "minLength": 2, "pattern": "^a"}},
            },
            ["$defs.a.pattern"],
        ),
        ({"properties": {"x": {"type": "string", "title": "t", "maxLength": 4}}}, []),
    ],
)
def test_what_is_left_out_is_named(name: str, schema: Any, expected: list[str]) -> None:
    for strict in ({}, {"strict": False}):
        grammar = forced(name, {"type": "object", **schema}, **strict)
        assert left_out(grammar) == expected
        as_compiled, _ = with_schemas(grammar, lambda _schema: "")
        assert walk(model_of(name, "", True)[1], as_compiled, 1)
    if not expected:
        assert left_out(forced(name, {"type": "object", **schema}, strict=True)) == []


@pytest.mark.parametrize("name", BRACKETED)
def test_what_is_left_out_within_values_is_named(name: str) -> None:
    item = {"type": ["string", "null"], "minLength": 2, "pattern": "^a"}
    schema = {"properties": {"x": {"type": "array", "items": item, "uniqueItems": True}}}
    found = left_out(forced(name, schema))
    assert sorted(found) == ["properties.x.items.pattern", "properties.x.uniqueItems"]
    many = {str(number): {"type": "string", "pattern": "^a"} for number in range(200)}
    kept = {f"a{each}": value for each, value in many.items()}
    assert len(left_out(forced(name, {"properties": kept}))) == MAX_LEFT_OUT


@pytest.mark.parametrize("name", BRACKETED)
def test_keywords_of_other_types_say_nothing(name: str) -> None:
    item = {"type": ["string", "null"], "minLength": 2}
    assert forced(name, {"properties": {"x": item}}, strict=True)


@pytest.mark.parametrize("name", [each for each in (*TAGGED, "pythonic") if each != "kimi_k3"])
def test_names_that_would_end_their_tag_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="the name"):
        forced(name, {"properties": {'a">=': {"type": "string"}}})


def test_a_name_with_quotes_is_escaped_where_the_format_does() -> None:
    """And read as it is: Kimi K3."""
    found, model = model_of("kimi_k3", "", True)
    schema = {"properties": {'a&">=': {"const": "x"}}, "required": ['a&">=']}
    tool = {"function": {"name": "f", "parameters": schema}}
    grammar = call_grammar(found, model.ids, [tool], "required", is_parallel=False)
    events = read(compile_format(found, model.ids), model.items(walk(model, grammar, 1)), None)
    arguments = "".join(each.text for each in events if each.kind == EventKind.CALL_ARGUMENTS)
    assert json.loads(arguments) == {'a&">=': "x"}


@pytest.mark.parametrize("name", BRACKETED)
def test_schemas_are_bounded_in_depth(name: str) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(900):
        schema = {"type": "array", "items": schema}
    with pytest.raises(BadRequest, match="levels deep"):
        forced(name, {"properties": {"x": schema}})


@pytest.mark.parametrize("name", TAGGED)
def test_other_parameters_of_a_strict_function_are_not_of_any_type(name: str) -> None:
    schema = {"type": "object", "additionalProperties": {"type": "integer"}}
    with pytest.raises(BadRequest, match="'additionalProperties'"):
        forced(name, schema, strict=True)
    assert forced(name, schema)


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
def test_types_named_twice_do_not_double_with_each_level(name: str, has_tokens: bool) -> None:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(15):
        schema = {"type": ["array"] * 4, "items": schema}
    parameters = {"type": "object", "properties": {"x": schema}}
    found, model = model_of(name, "", has_tokens)
    tool = {"function": {"name": "f", "parameters": parameters}}
    assert len(call_grammar(found, model.ids, [tool], "required")) < 10_000


@pytest.mark.parametrize("name", [*TAGGED, *BRACKETED])
@pytest.mark.parametrize("word", ["anyOf", "oneOf", "type", "enum", "items", "properties"])
@pytest.mark.parametrize("value", [5, None, True, {"a": 1}, [{"type": []}], [[5]]])
def test_words_of_a_wrong_form_are_refused_or_left_out(name: str, word: str, value: Any) -> None:
    for others in ({}, {"type": "string"}, {"const": "a"}):
        with contextlib.suppress(BadRequest):
            forced(name, {"properties": {"x": {**others, word: value}}})


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45"])
@pytest.mark.parametrize("seed", range(3))
def test_a_value_with_the_text_that_ends_it_is_read_back(name: str, seed: int) -> None:
    value = {"k": "</parameter></arg_value>"}
    parameters = {"properties": {"x": {"enum": [value]}}, "required": ["x"]}
    function = {"name": "f", "parameters": parameters}
    found, model = model_of(name, "", False)
    grammar = call_grammar(found, model.ids, [{"function": function}], "required")
    types = {"f": property_types(function)}
    taken = walk(model, grammar, seed, is_short=True)
    events = read(compile_format(found, model.ids), model.items(taken), types)
    arguments = [each.text for each in events if each.kind == EventKind.CALL_ARGUMENTS]
    assert json.loads("".join(arguments[:1])) == {"x": value}


DSML = (
    "deepseek_v32",
    """<|DSML|function_calls>
<|DSML|invoke name="f">
<|DSML|parameter name="{key}" string="false">{value}</|DSML|parameter>
</|DSML|invoke>
</|DSML|function_calls>""".replace("|", "\uff5c"),
)
CODER = (
    "qwen3_coder",
    """<tool_call>
<function=f>
<parameter={key}>
{value}
</parameter>
</function>
</tool_call>""",
)
GLM = (
    "glm45",
    """<tool_call>f
<arg_key>{key}</arg_key>
<arg_value>{value}</arg_value>
</tool_call>""",
)


@pytest.mark.parametrize(("name", "call"), [DSML, CODER, GLM])
def test_a_parameter_without_a_type_may_be_a_number(name: str, call: str) -> None:
    found, model = model_of(name, "", False)
    tool = {"function": {"name": "f", "parameters": {"properties": {"x": {"title": "X"}}}}}
    matcher = model.matcher(call_grammar(found, model.ids, [tool], "required"))
    token_ids = model.encoded(call.format(key="x", value="7"))
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)


@pytest.mark.parametrize(("name", "call"), [DSML, CODER, GLM])
@pytest.mark.parametrize("key", ["$filter", "max age", "größe", "@type", "1st"])
def test_other_functions_than_strict_ones_keep_their_parameters(
    name: str, call: str, key: str
) -> None:
    found, model = model_of(name, "", False)
    properties = {key: {"type": "integer"}}
    tools = [
        {"function": {"name": "f", "parameters": {"properties": properties}}},
        {"function": {"name": "g", "parameters": {"properties": {}}, "strict": True}},
    ]
    grammar, _ = free_call_grammar(found, model.spellings(found), tools, is_parallel=True)
    token_ids = model.encoded(call.format(key=key, value="7"))
    matcher = model.matcher(grammar)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()
