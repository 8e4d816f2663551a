"""Grammars that are made to harm: they end a process of their own, and are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_core.grammar.trial_client import GrammarTrial
from slipstream_ipc.messages import FRAMED, SCHEMA_MARK, StructuredOutputs

pytestmark = pytest.mark.process

TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
VOCABULARY = Vocabulary(MODEL_PATH / "tokenizer.json", 4100, (1, 0))
GOOD = StructuredOutputs(regex="[a-z]{3}")
DEPTH = 4000  # the library's recursion takes 2 to 10 KB of stack to a level


def lines(*rules: str) -> str:
    return "\n".join(rules) + "\n"


CHAINS = {
    "lark": StructuredOutputs(
        grammar=lines("start: a0", *(f"a{i}: a{i + 1}" for i in range(DEPTH)), f'a{DEPTH}: "x"')
    ),
    "lark-terminals": StructuredOutputs(
        grammar=lines("start: A0", *(f"A{i}: A{i + 1}" for i in range(DEPTH)), f'A{DEPTH}: "x"')
    ),
    "gbnf": StructuredOutputs(
        grammar=lines(
            "root ::= a0", *(f"a{i} ::= a{i + 1} a0" for i in range(3500)), 'a3500 ::= "x" root'
        )
    ),
    "references": StructuredOutputs(
        json={
            "$ref": "#/$defs/a0",
            "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(DEPTH)}
            | {f"a{DEPTH}": {"type": "null"}},
        }
    ),
}
SLOW = {
    "blank lines": StructuredOutputs(grammar="\n" * 65536),
    "patterns": StructuredOutputs(
        json={
            "allOf": [
                {"type": "string", "pattern": f".*{c}.{{{n}}}.*"}
                for n, c in enumerate("abcdefghijklmnopqrst")
            ]
        },
        strict=True,
    ),
}


@pytest.fixture
def trial() -> Iterator[GrammarTrial]:
    one = GrammarTrial(VOCABULARY)
    yield one
    one.close()


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_longer_than_the_stack_is_refused(trial: GrammarTrial, name: str) -> None:
    with pytest.raises(GrammarError, match="crashes the grammar library"):
        trial.ask(CHAINS[name])
    assert trial.ask(GOOD)


@pytest.mark.parametrize("name", SLOW)
def test_what_takes_too_long_to_compile_is_refused(trial: GrammarTrial, name: str) -> None:
    trial.ask(GOOD)
    with pytest.raises(GrammarError, match="CPU time"):
        trial.ask(SLOW[name])
    assert trial.ask(GOOD)


def test_what_does_not_compile_is_refused_with_the_reason(trial: GrammarTrial) -> None:
    with pytest.raises(GrammarError, match="unclosed group"):
        trial.ask(StructuredOutputs(regex="(a"))
    assert trial.ask(GOOD)


def test_what_it_gives_compiles_here(trial: GrammarTrial) -> None:
    for outputs in (
        GOOD,
        StructuredOutputs(choice=("a", "b")),
        StructuredOutputs(json_object=True),
    ):
        assert not VOCABULARY.compile_text(trial.ask(outputs).text).is_error()


@pytest.mark.parametrize(("num", "is_right"), [(150, True), (200, False)])
def test_an_object_with_too_many_optional_properties_is_refused_before_it_begins(
    trial: GrammarTrial, num: int, is_right: bool
) -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(num)}}
    outputs = StructuredOutputs(json=schema)
    if is_right:
        assert trial.ask(outputs)
    else:
        with pytest.raises(GrammarError, match=r"too complex: .*items"):
            trial.ask(outputs)


@pytest.mark.parametrize("is_framed", [False, True])
def test_a_pattern_that_is_too_complex_where_it_stands_is_left_out(
    trial: GrammarTrial, is_framed: bool
) -> None:
    def made(*, is_strict: bool) -> tuple[StructuredOutputs, str]:
        mark = {"path": "tools.f.x", "strict": is_strict, "bare": True}
        schema = {"type": "string", "pattern": "^(?:[^\\n]{0,3000}\\n)+$", SCHEMA_MARK: mark}
        bare = f"BARE: %json {json.dumps(schema)}\n"
        text = f'"<" TEXT\nTEXT: (BARE /<\\/a>/) & ~/(.|\\n)*<\\/a>(.|\\n)+/\n{bare}'
        if is_framed:
            return GOOD, f"start: {FRAMED} | {text}"
        return StructuredOutputs(grammar=f"start: {text}"), ""

    tried = trial.ask(*made(is_strict=False))
    assert tried.left_out == ("tools.f.x.pattern",)
    matcher = VOCABULARY.compile_text(tried.text)
    ids = TOKENIZER.encode("<a line without an end</a>").ids
    assert matcher.try_consume_tokens(ids) == len(ids)
    with pytest.raises(GrammarError, match="fuel"):
        trial.ask(*made(is_strict=True))


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        (SLOW["patterns"].json, "allOf.19.pattern"),
        ({"patternProperties": {"^(a{1000}){1000}$": {"type": "null"}}}, "patternProperties"),
    ],
)
def test_a_pattern_of_a_schema_that_is_not_strict_and_costs_too_much_is_left_out(
    trial: GrammarTrial, schema: dict[str, object], path: str
) -> None:
    whole = {"type": "object", "properties": {"a": schema, "b": {"type": "null"}}}
    tried = trial.ask(StructuredOutputs(json=json.dumps(whole)))
    assert f"structured_outputs.json.properties.a.{path}" in tried.left_out
    assert all(".properties.a." in each for each in tried.left_out)
    matcher = VOCABULARY.compile_text(tried.text)
    for text, is_right in (('{"b":null}', True), ('{"b":1}', False)):
        ids, one = TOKENIZER.encode(text).ids, matcher.deep_copy()
        is_taken = one.try_consume_tokens(ids) == len(ids) and one.is_accepting()
        assert is_taken is is_right, text
    with pytest.raises(GrammarError):
        trial.ask(StructuredOutputs(json=json.dumps(whole), strict=True))


COMBINED = {"allOf": [{"anyOf": [{"required": [f"{n}{m}"]} for m in "abcde"]} for n in range(9)]}
MANY = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(200)}}
OF_TOOLS = {
    "patterns": (SLOW["patterns"].json, "CPU time", "allOf.19.pattern"),
    "choices": ({"type": "object", "allOf": [COMBINED]}, "too large", ""),
    "properties": (MANY, "too complex", ""),
}


@pytest.mark.parametrize("name", OF_TOOLS)
def test_a_schema_of_a_tool_that_costs_too_much_is_left_out_unless_it_is_strict(
    trial: GrammarTrial, name: str
) -> None:
    schema, why, path = OF_TOOLS[name]
    assert isinstance(schema, dict)

    def made(*, is_strict: bool) -> StructuredOutputs:
        mark = {"path": "tools.f.parameters", "strict": is_strict}
        exact = {"const": 7, SCHEMA_MARK: {"path": "tools.g.parameters", "strict": True}}
        written = [json.dumps(each) for each in ({**schema, SCHEMA_MARK: mark}, exact)]
        return StructuredOutputs(grammar=f"start: %json {written[0]} %json {written[1]}\n")

    tried = trial.ask(made(is_strict=False))
    assert f"tools.f.parameters.{path}".removesuffix(".") in tried.left_out
    assert all(each.startswith("tools.f.parameters") for each in tried.left_out)
    matcher = VOCABULARY.compile_text(tried.text)
    for text, is_right in (('"x"7' if path else '{"x":1}7', True), ('"x"8', False)):
        ids = TOKENIZER.encode(text).ids
        one = matcher.deep_copy()
        is_taken = one.try_consume_tokens(ids) == len(ids) and one.is_accepting()
        assert is_taken is is_right, text
    with pytest.raises(GrammarError, match=why):
        trial.ask(made(is_strict=True))
    assert trial.ask(GOOD)
