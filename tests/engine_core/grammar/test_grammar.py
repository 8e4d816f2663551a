"""Grammars over the demo model's vocabulary: what they allow, and what comes of following them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from slipstream.demo_model import MODEL_PATH
from slipstream_core.drafting.step_costs import StepCosts
from slipstream_core.grammar import llguidance_backend
from slipstream_core.grammar.bitmasks import GrammarBitmasks
from slipstream_core.grammar.grammar_drafter import GrammarDrafter
from slipstream_core.grammar.llguidance_backend import (
    GrammarError,
    Vocabulary,
    fill_masks,
    ids_as_mask,
    num_words,
    within_rows,
)
from slipstream_core.grammar.matcher import (
    CallMatcher,
    GrammarBroken,
    GrammarMatcher,
    SharedGrammar,
)
from slipstream_core.grammar.reasoning.reasoning_state import ReasoningState
from slipstream_core.model.tokenizer_file import find_tokenizer
from slipstream_core.scheduler.constraint_columns import (
    TokenConstraints,
    allowed_mask,
    permitted_mask,
)
from slipstream_core.step.limits import NO_ROW
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.messages import Fault, ReasoningIds, StructuredOutputs
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.validation.structured_output import MAX_CHOICES

EOS = (1, 0)
VOCAB_SIZE = 4100  # wider than the tokenizer, as models' logits often are
TOKENIZER = Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))
VOCABULARY = Vocabulary(MODEL_PATH / "tokenizer.json", VOCAB_SIZE, EOS)


def start(outputs: StructuredOutputs, ends: tuple[int, ...] = EOS) -> GrammarMatcher:
    end_mask = ids_as_mask(ends, VOCAB_SIZE)
    grammar = SharedGrammar(lambda: VOCABULARY.compile(outputs), spell=VOCABULARY.spell)
    return GrammarMatcher(grammar, frozenset(ends), end_mask, VOCABULARY.ends)


def allowed(state: GrammarMatcher) -> set[int]:
    masks = np.zeros((1, num_words(VOCAB_SIZE)), np.int32)
    fill_masks([(state.matcher, 0)] if state.matcher is not None else [], masks)
    state.finish(masks[0])
    return set(np.flatnonzero(np.unpackbits(masks.view(np.uint8), bitorder="little")).tolist())


def text_of(ids: list[int]) -> str:
    return TOKENIZER.decode(ids, skip_special_tokens=True)


def walk(outputs: StructuredOutputs, seed: int, most: int = 300) -> tuple[list[int], bool]:
    """Random tokens that the grammar allows, and whether they came to an end.

    Whatever closes something is taken half of the time, lest strings go on for ever.
    """
    rng, state = random.Random(seed), start(outputs)
    ids: list[int] = []
    while len(ids) < most:
        may = allowed(state)
        closing = [i for i in may if i in EOS or TOKENIZER.decode([i]).strip() in ('"', "}", "]")]
        token = rng.choice(sorted(closing if closing and rng.random() < 0.5 else may))
        if token in EOS:
            return ids, True
        state.accept_tokens([token])
        ids.append(token)
    return ids, False


# ---- choices, whose every mask can be worked out by hand ---------------------------------------


def continuations(rest: set[bytes]) -> set[int]:
    """The tokens that some of the texts in `rest` begin with; an end where one of them is empty."""
    found = {i for i, piece in PIECES.items() if any(text.startswith(piece) for text in rest)}
    return found | (set(EOS) if b"" in rest else set())


def byte_pieces() -> dict[int, bytes]:
    from tokenizers import pre_tokenizers

    # GPT-2's alphabet: printable bytes stand for themselves, the others for letters from 256 on
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    others = [byte for byte in range(256) if byte not in plain]
    letters |= {chr(256 + n): byte for n, byte in enumerate(others)}
    assert set(letters) == set(pre_tokenizers.ByteLevel.alphabet())
    special = TOKENIZER.get_added_tokens_decoder()
    return {
        i: bytes(letters[char] for char in piece)
        for piece, i in TOKENIZER.get_vocab().items()
        if i not in special
    }


PIECES = byte_pieces()
WORDS = st.text(st.sampled_from('ab \n"\\é漢[|./'), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(st.lists(WORDS, min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_a_choice_allows_what_goes_on_in_one_of_its_texts(texts: list[str], rng: Any) -> None:
    # where all that is left begins alike, the library allows only the tokens that a tokenizer would
    # make of it: so what is allowed is some of the continuations, and all of one text's own tokens
    for text in texts:
        own = start(StructuredOutputs(choice=tuple(texts)))
        for token in TOKENIZER.encode(text).ids:
            assert token in allowed(own)
            own.accept_tokens([token])
        assert allowed(own) >= set(EOS)
    state = start(StructuredOutputs(choice=tuple(texts)))
    rest = {text.encode() for text in texts}
    written = b""
    while True:
        may = allowed(state)
        assert may
        assert may <= continuations(rest)
        assert may >= set(EOS) or b"" not in rest
        token = rng.choice(sorted(may))
        state.accept_tokens([token])
        if token in EOS:
            break
        written += PIECES[token]
        rest = {text[len(PIECES[token]) :] for text in rest if text.startswith(PIECES[token])}
    assert written.decode() in texts
    assert allowed(state) == set(EOS)  # a step may be in flight already


# ---- schemas and regular expressions -----------------------------------------------------------


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    leaf = st.sampled_from(
        [
            {"type": "boolean"},
            {"type": "null"},
            {"type": "integer", "minimum": -20, "maximum": 300},
            {"type": "string", "maxLength": 12},
            {"enum": ["red", 'gr"een', 3, None]},
            {"const": "so"},
        ]
    )
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abcd"), inner, min_size=1, max_size=3).map(
                lambda fields: {
                    "type": "object",
                    "properties": fields,
                    "required": sorted(fields)[:2],
                    "additionalProperties": False,
                }
            ),
            st.builds(
                lambda of, most: {"type": "array", "items": of, "minItems": 1, "maxItems": most},
                inner,
                st.integers(1, 3),
            ),
            st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        ),
        max_leaves=5,
    )


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value keeps to a schema of the family above."""
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        among = schema.get("enum", [schema.get("const")])
        return any(value == each and type(value) is type(each) for each in among)
    match schema["type"]:
        case "boolean":
            return isinstance(value, bool)
        case "null":
            return value is None
        case "integer":
            return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "array":
            return (
                isinstance(value, list)
                and schema["minItems"] <= len(value) <= schema["maxItems"]
                and all(is_valid(each, schema["items"]) for each in value)
            )
    fields = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(fields)
        and all(is_valid(each, fields[name]) for name, each in value.items())
    )


@settings(max_examples=60, deadline=None)
@given(schemas(), st.integers(0, 2**32))
def test_what_a_schema_allows_parses_and_is_valid(schema: dict[str, Any], seed: int) -> None:
    ids, is_over = walk(StructuredOutputs(json=schema), seed)
    assert is_over
    assert is_valid(json.loads(text_of(ids)), schema)


@pytest.mark.parametrize("seed", range(6))
def test_any_object_is_an_object(seed: int) -> None:
    ids, is_over = walk(StructuredOutputs(json_object=True), seed, 1000)
    assert is_over
    assert isinstance(json.loads(text_of(ids)), dict)


def test_white_space_between_jsons_tokens_is_bounded() -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 1}
    state = start(StructuredOutputs(json=schema))
    state.accept_tokens(TOKENIZER.encode("[\n    true, false").ids)
    state = start(StructuredOutputs(json=schema))
    with pytest.raises(GrammarBroken):
        state.accept_tokens(TOKENIZER.encode("[\n\n\n\n\n\n\n\n").ids)


@settings(max_examples=60, deadline=None)
@given(schemas(), st.integers(0, 2**32))
def test_compact_json_has_no_white_space_between_its_tokens(
    schema: dict[str, Any], seed: int
) -> None:
    loose = {**schema, "x-guidance": {"whitespace_pattern": "  "}}
    outputs = StructuredOutputs(json=loose, disable_any_whitespace=True)
    ids, is_over = walk(outputs, seed)
    assert is_over
    text = text_of(ids)
    assert is_valid(json.loads(text), schema)
    between = re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)  # without what its strings say
    assert not re.search(r"\s", between)


@pytest.mark.parametrize("seed", range(3))
def test_any_object_may_be_compact(seed: int) -> None:
    ids, _ = walk(StructuredOutputs(json_object=True, disable_any_whitespace=True), seed, 1000)
    assert not re.search(r"\s", re.sub(r'"(?:[^"\\]|\\.)*"', '""', text_of(ids)))


REGEXES = [
    "[a-z]{3}-[0-9]{2}",
    "(yes|no|maybe so)!{1,3}",
    r"\d{4}-(0[1-9]|1[0-2])",
    "[^a-z]{2,4}x",
    "(é|漢|🙂){1,3}",
    "",
]


@pytest.mark.parametrize("regex", REGEXES)
@pytest.mark.parametrize("seed", range(5))
def test_what_a_regex_allows_matches_it(regex: str, seed: int) -> None:
    ids, is_over = walk(StructuredOutputs(regex=regex), seed)
    assert is_over
    assert re.fullmatch(regex, text_of(ids))


@pytest.mark.parametrize(
    "grammar", ['start: "a" | "b" start "c"', 'root ::= "a" | "b" root "c"'], ids=["lark", "gbnf"]
)
@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_goes_where_no_regex_does(grammar: str, seed: int) -> None:
    state, rng, text = start(StructuredOutputs(grammar=grammar)), random.Random(seed), ""
    while (token := rng.choice(sorted(allowed(state)))) not in EOS:
        state.accept_tokens([token])
        text += TOKENIZER.decode([token])
    depth = text.index("a")
    assert text == "b" * depth + "a" + "c" * depth


# the grammars of Lark's own tutorials, and of vLLM's examples
CALCULATOR = r"""
?start: sum
      | NAME "=" sum    -> assign_var
?sum: product
    | sum "+" product   -> add
    | sum "-" product   -> sub
?product: atom
    | product "*" atom  -> mul
?atom: NUMBER           -> number
     | "-" atom         -> neg
     | NAME             -> var
     | "(" sum ")"
%import common.CNAME -> NAME
%import common.NUMBER
"""
JSON_VALUES = r"""
?start: value
?value: object | array | string
      | SIGNED_NUMBER      -> number
      | "true" | "false" | "null"
array  : "[" [value ("," value)*] "]"
object : "{" [pair ("," pair)*] "}"
pair   : string ":" value
string : ESCAPED_STRING
%import common.ESCAPED_STRING
%import common.SIGNED_NUMBER
"""
SQL = """
query: "SELECT " column " from " table
column: "col_1" | "col_2"
table: "table_1" | "table_2"
"""
WITH_PRIORITIES = """
// start ::= is GBNF's
!start.3: WORD ("-" KEY)?
WORD.-1: /[a-z]{2}/
KEY.2: "if" | "of"
"""


@pytest.mark.parametrize(
    ("grammar", "texts", "others"),
    [
        (CALCULATOR, ["x=(1+2)*-y", "7"], ["1+", "=1"]),
        (JSON_VALUES, ['{"a":[1,-2.5,"x"],"b":null}', "[]"], ["[1,]", "{a:1}"]),
        (SQL, ["SELECT col_1 from table_2"], ["SELECT col_1", "col_1"]),
        (WITH_PRIORITIES, ["if-of", "xy", "ab-if"], ["if-xy", "x"]),
        ("// a ::= b\nroot: /[ab]+/", ["ab"], ["c"]),
        ('root ::= x\nx ::= [ab]+ | "start: y"', ["ab", "start: y"], ["c"]),
    ],
    ids=["calculator", "json", "no start", "priorities", "comment", "gbnf"],
)
def test_grammars_as_people_write_them(grammar: str, texts: list[str], others: list[str]) -> None:
    for text, is_whole in [*((each, True) for each in texts), *((each, False) for each in others)]:
        matcher = VOCABULARY.compile(StructuredOutputs(grammar=grammar))
        taken = all(matcher.consume_token(each) for each in TOKENIZER.encode(text).ids)
        assert (taken and matcher.is_accepting()) == is_whole, text


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        (StructuredOutputs(regex="(a"), "unclosed group"),
        (StructuredOutputs(regex="(?=a)b"), "look-around"),
        (StructuredOutputs(json="{"), "property name"),
        (StructuredOutputs(json="[1]"), "schema"),
        (StructuredOutputs(json={"type": "nothing"}, strict=True), "type cannot be enforced"),
        (StructuredOutputs(json={"not": {}}, strict=True), "not cannot be enforced"),
        (StructuredOutputs(grammar='start: "a" | b'), "unknown name"),
        (StructuredOutputs(grammar="root ::= ("), "GBNF"),
        (StructuredOutputs(grammar="what is this"), "GBNF"),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason(
    outputs: StructuredOutputs, why: str
) -> None:
    with pytest.raises(GrammarError, match=re.escape(why)) as caught:
        VOCABULARY.compile(outputs)
    assert 0 < len(str(caught.value)) <= 300


# ---- states ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(schemas(), st.integers(0, 2**32), st.data())
def test_a_state_is_a_function_of_the_outputs(
    schema: dict[str, Any], seed: int, data: st.DataObject
) -> None:
    outputs = StructuredOutputs(json=schema)
    ids, _ = walk(outputs, seed)
    one = start(outputs)
    for i, token in enumerate(ids):
        if data.draw(st.booleans()):
            cut, other = data.draw(st.integers(0, i)), start(outputs)
            other.accept_tokens(ids[:cut])
            other.accept_tokens(ids[cut:i])
            assert allowed(other) == allowed(one)
        one.accept_tokens([token])
    assert one.num_taken == len(ids)


def test_the_streams_own_ends_are_what_ends_it() -> None:
    yes = TOKENIZER.encode("yes").ids
    for ends in ((1, 0), (1,), (3, 500), (4099,)):
        state = start(StructuredOutputs(regex="yes"), ends)
        assert not allowed(state) & {*EOS, 3, 4099}
        state.accept_tokens(yes)
        assert allowed(state) == set(ends)
        state.accept_tokens([ends[-1]])
        assert allowed(state) == set(ends)


def test_a_named_end_that_is_text_may_be_written_where_the_grammar_wants_it() -> None:
    (brace,) = TOKENIZER.encode("}").ids
    state = start(StructuredOutputs(regex="x}y"), (brace,))
    state.accept_tokens(TOKENIZER.encode("x").ids)
    assert brace in allowed(state)


def test_what_the_grammar_does_not_allow_is_said_without_quoting_it() -> None:
    state = start(StructuredOutputs(regex="yes"))
    with pytest.raises(GrammarBroken, match="output token 1 ") as caught:
        state.accept_tokens([*TOKENIZER.encode("y").ids, *TOKENIZER.encode("secret").ids])
    assert "secret" not in str(caught.value)


def test_a_grammar_beyond_the_librarys_limits_is_named_as_such() -> None:
    fields = {f"f{i}": {"type": "integer"} for i in range(3000)}  # any of them may come first
    state = start(StructuredOutputs(json={"type": "object", "properties": fields}))
    with pytest.raises(GrammarBroken, match=r"too complex: .* items"):
        state.accept_tokens(TOKENIZER.encode("{").ids)


AMBIGUOUS = {
    "nullable": 'start: e\ne: e e e e e | e e e e | e e e | e e | /[a-z]/ | ""',
    "pairs": "start: e\ne: e e | /[a-z ]/",
    "narrow": 'start: e\ne: e e e e e e e e e | e e e e | e e e | e e | "Qx7"',
}
WIDE = (
    "start: ("
    + " | ".join(f"r{i}" for i in range(150))
    + ")+\n"
    + "\n".join(f"r{i}: /[a-z]/ r{(i * 7 + 1) % 150} | /[a-z ]/" for i in range(150))
)


def test_what_is_too_complex_at_once_is_refused() -> None:
    with pytest.raises(GrammarError, match="Too many items"):
        VOCABULARY.compile(StructuredOutputs(grammar=WIDE))


def first_tokens(outputs: StructuredOutputs, most: int) -> tuple[list[int], str]:
    """The lowest ids that a grammar allows, and why there are no more of them."""
    state = start(outputs)
    ids: list[int] = []
    try:
        while len(ids) < most:
            token = min(allowed(state) - {*EOS})
            state.accept_tokens([token])
            ids.append(token)
    except GrammarBroken as error:
        return ids, str(error)
    return ids, ""


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_an_ambiguous_grammar_ends_by_the_librarys_counts(name: str) -> None:
    # not by a clock: twice the same, and long before a row is so long that it takes seconds
    outputs = StructuredOutputs(grammar=AMBIGUOUS[name])
    ids, why = first_tokens(outputs, 200)
    assert "too complex" in why
    assert "items" in why
    assert first_tokens(outputs, 200) == (ids, why)


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                "under": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
}


@pytest.mark.parametrize(
    "outputs",
    [
        StructuredOutputs(json=TREE),
        StructuredOutputs(json={"properties": {f"f{i}": {"type": "integer"} for i in range(150)}}),
        StructuredOutputs(
            json={
                "type": "array",
                "items": {
                    "anyOf": [
                        {"properties": {f"k{i}": {"const": i}}, "required": [f"k{i}"]}
                        for i in range(100)
                    ]
                },
            }
        ),
        StructuredOutputs(
            grammar='start: e\ne: t (("+" | "-") t)*\nt: f (("*" | "/") f)*\n'
            'f: /[0-9]+/ | "(" e ")"'
        ),
    ],
    ids=["recursive", "optional", "alternatives", "arithmetic"],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_is_not_ambiguous_stays_far_from_the_limits(
    outputs: StructuredOutputs, seed: int
) -> None:
    ids, is_over = walk(outputs, seed, 300)
    assert ids
    assert is_over or len(ids) == 300


def test_as_many_choices_as_a_request_may_have_can_be_followed() -> None:
    texts = tuple(f"{i * 7919}" for i in range(MAX_CHOICES))
    outputs = StructuredOutputs(choice=texts)
    for seed in range(5):
        ids, is_over = walk(outputs, seed)
        assert is_over
        assert text_of(ids) in texts


def test_threads_fill_the_same_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    import llguidance

    words = StructuredOutputs(regex="([a-z]{1,9} )*")
    states = [start(words) for _ in range(9)]
    for i, state in enumerate(states):
        state.accept_tokens(TOKENIZER.encode("a word or two " * i).ids[: 2 * i])
    masks = [np.zeros((len(states), num_words(VOCAB_SIZE)), np.int32) for _ in range(2)]
    for executor, filled in zip((None, llguidance.LLExecutor(2)), masks, strict=True):
        monkeypatch.setattr(llguidance_backend, "_executor", lambda executor=executor: executor)
        fill_masks([(state.matcher, i) for i, state in enumerate(states)], filled)
    assert np.array_equal(*masks)
    assert masks[0].any(axis=1).all()


def test_rows_follow_their_histories_and_fail_alone() -> None:
    tokens = TokenLog()
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    yes, no = TOKENIZER.encode("yes").ids, TOKENIZER.encode("no").ids
    prompt = [7, 8, 9]
    for row, outputs in ((2, yes[:1]), (5, yes), (6, no)):
        tokens.open(row)
        tokens.extend(row, np.array(prompt + outputs, np.uint32))
        rows.add(row, start(StructuredOutputs(regex="yes")), len(prompt))
    masks, broken = rows.masks(np.array([5, NO_ROW, 6, 2, 4]))
    bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
    assert [row for row, _ in broken] == [6, 4]
    assert set(np.flatnonzero(bits[0]).tolist()) == set(EOS)
    assert bits[1].all()
    assert bits[2].all()
    expected = start(StructuredOutputs(regex="yes"))
    expected.accept_tokens(yes[:1])
    assert set(np.flatnonzero(bits[3]).tolist()) == allowed(expected)
    rows.drop(5)
    rows.drop(5)
    assert len(rows) == 2


@pytest.mark.parametrize("has_words", [False, True])
def test_constraints_that_leave_nothing_of_a_grammar_are_the_requests_own_fault(
    has_words: bool,
) -> None:
    tokens = TokenLog()
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    first = min(allowed(start(StructuredOutputs(regex="yes"))))
    constraints = [
        TokenConstraints(allowed=allowed_mask([first, 5])),  # leaves one
        TokenConstraints(allowed=allowed_mask([0])),
        TokenConstraints(banned_ids=np.arange(VOCAB_SIZE)),
    ]
    for row, own in enumerate(constraints):
        tokens.open(row)
        tokens.extend(row, np.array([7], np.uint32))
        permitted = permitted_mask(own, VOCAB_SIZE)
        rows.add(row, start(StructuredOutputs(regex="yes")), 1, permitted=permitted)
    no = TOKENIZER.encode("no").ids  # as a word of several tokens was to be kept from
    tokens.open(3)
    tokens.extend(3, np.array([7, *no], np.uint32))
    rows.add(3, start(StructuredOutputs(regex="yes")), 1, has_words=has_words)
    _, broken = rows.masks(np.arange(4))
    codes = {row: (fault.code, fault.field) for row, fault in broken}
    own_fault = "bad_request", "structured_outputs"
    assert codes.pop(3) == (own_fault if has_words else ("engine", None))
    assert codes == {1: own_fault, 2: own_fault}


@given(st.sets(st.integers(0, 99), min_size=1) | st.none(), st.sets(st.integers(0, 120)))
def test_what_constraints_permit(allowed_ids: set[int] | None, banned: set[int]) -> None:
    own = TokenConstraints(
        allowed=None if allowed_ids is None else allowed_mask(sorted(allowed_ids)),
        banned_ids=np.array(sorted(banned), np.int64),
    )
    mask = permitted_mask(own, 100)
    left = (set(range(100)) if allowed_ids is None else allowed_ids) - banned
    if mask is None:
        assert left == set(range(100))
    else:
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:100]
        assert set(np.flatnonzero(bits).tolist()) == left


WIDE_LEXER = StructuredOutputs(regex="(a|b|[c-z ])*a(a|b|[c-z ]){60}")


def test_a_full_lexer_is_no_other_streams_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # its states are shared by all streams of a grammar, and never given back
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", 3000)
    grammar = SharedGrammar(lambda: VOCABULARY.compile(WIDE_LEXER), spell=VOCABULARY.spell)
    end_mask = ids_as_mask(EOS, VOCAB_SIZE)
    tokens, generations = TokenLog(), set()
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    for row in range(8):
        rng = random.Random(row)
        state = GrammarMatcher(grammar, frozenset(EOS), end_mask, VOCABULARY.ends)
        tokens.open(row)
        tokens.extend(row, np.array([7, 8, 9], np.uint32))
        rows.add(row, state, 3)
        for _ in range(12):
            masks, broken = rows.masks(np.array([row]))
            assert not broken
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
            may = set(np.flatnonzero(bits).tolist()) - {*EOS}
            tokens.extend(row, np.array([rng.choice(sorted(may))], np.uint32))
        generations.add(state._generation)
    assert len(generations) > 1, "it was never full: a test of nothing"


def test_an_answer_that_fills_lexers_by_itself_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llguidance_backend, "_MAX_LEXER_STATES", 300)
    tokens = TokenLog()
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    tokens.open(0)
    rows.add(0, start(WIDE_LEXER), 0)
    broken: list[tuple[int, Fault]] = []
    (token,) = TOKENIZER.encode("a").ids
    for _ in range(100):
        _, broken = rows.masks(np.array([0]))
        if broken:
            break
        tokens.extend(0, np.array([token], np.uint32))
    [(row, fault)] = broken
    assert row == 0
    assert "too complex: lexer error: too many states" in fault.message
    assert fault.code == "bad_request"  # it is the grammar's fault, and asking again is no use


# ---- where the vocabulary comes from -----------------------------------------------------------


def test_the_tokenizer_is_found(tmp_path: Any) -> None:
    assert find_tokenizer(str(MODEL_PATH)) == MODEL_PATH / "tokenizer.json"
    simulated = f"simulated:tokenizer={MODEL_PATH},step_ms=1"
    assert find_tokenizer(simulated) == MODEL_PATH / "tokenizer.json"
    for model in ("simulated:step_ms=1", str(tmp_path), "nobody/has-this-model"):
        with pytest.raises(ValueError):
            find_tokenizer(model)


@pytest.mark.parametrize("vocab_size", [4095, 4000, 300])
def test_a_tokenizer_with_more_ids_than_the_model_has_rows(vocab_size: int) -> None:
    """As Gemma 3 1B has; the masks are those of the whole vocabulary, as far as there are rows."""
    whole, fewer = VOCABULARY, Vocabulary(MODEL_PATH / "tokenizer.json", vocab_size, EOS)
    wanted = StructuredOutputs(regex="[a-z ]{3,9}")
    states = [each.compile(wanted) for each in (whole, fewer)]
    for _ in range(3):
        masks = [
            np.unpackbits(np.frombuffer(each.compute_bitmask(), np.uint8), bitorder="little")
            for each in states
        ]
        assert masks[1].any()
        assert np.array_equal(masks[0][:vocab_size], masks[1][:vocab_size])
        assert not masks[1][vocab_size:].any()
        token_id = int(np.flatnonzero(masks[1])[-1])
        for each in states:
            assert each.consume_token(token_id)


def test_what_has_no_row_is_left_out_of_every_kind_of_tokenizer() -> None:
    added = [{"id": 2, "content": "<a>"}, {"id": 5, "content": "<b>"}]
    unigram = {"added_tokens": added, "model": {"vocab": [["x", -1.0]] * 6}}
    kept = json.loads(within_rows(json.dumps(unigram), 4) or "")
    assert kept == {"added_tokens": added[:1], "model": {"vocab": [["x", -1.0]] * 4}}
    merges = ["a b", "ab a", "a ba"]
    bpe = {"added_tokens": [], "model": {"vocab": {"a": 0, "b": 1, "ab": 2, "aba": 3}}}
    bpe["model"]["merges"] = merges  # type: ignore[index]
    kept = json.loads(within_rows(json.dumps(bpe), 3) or "")
    assert kept["model"] == {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    assert within_rows(json.dumps(bpe), 4) is None


# ---- masks behind drafts -----------------------------------------------------------------------

FORCING = [
    StructuredOutputs(
        json={
            "type": "object",
            "properties": {"title": {"type": "string"}, "number": {"type": "integer"}},
            "required": ["title", "number"],
            "additionalProperties": False,
        },
        disable_any_whitespace=True,
    ),
    StructuredOutputs(choice=("one thing", "one thing more", "neither of these two")),
    StructuredOutputs(regex="(ab|ba|[0-9]{2}){3,9}"),
]


def one_row(outputs: StructuredOutputs, ids: list[int]) -> tuple[GrammarBitmasks, TokenLog]:
    tokens = TokenLog()
    tokens.open(0)
    tokens.extend(0, np.array([5, 6, *ids], np.uint32))
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    rows.add(0, start(outputs), 2)
    return rows, tokens


@settings(max_examples=60, deadline=None)
@given(outputs=st.sampled_from(FORCING), seed=st.integers(0, 2**32), data=st.data())
def test_masks_behind_drafts_are_those_behind_the_same_outputs(
    outputs: StructuredOutputs, seed: int, data: st.DataObject
) -> None:
    ids, _ = walk(outputs, seed, 30)
    begin = data.draw(st.integers(0, len(ids)))
    drafts = ids[begin : begin + data.draw(st.integers(1, 6))]
    if drafts and data.draw(st.booleans()):
        drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(st.integers(0, 4000))
    wanted, num_allowed = [], 0
    for num in range(1 + len(drafts)):
        alone, _ = one_row(outputs, ids[:begin])
        state = alone._matcher_up_to_date(0)
        assert state is not None
        try:
            state.accept_tokens(drafts[:num])
        except GrammarBroken:
            break
        if EOS[0] not in drafts[:num] and EOS[1] not in drafts[:num]:
            num_allowed = num
            wanted.append(allowed(state))
    rows, tokens = one_row(outputs, ids[:begin])
    num = rows.foresee(0, drafts)
    assert num == num_allowed
    masks, broken = rows.masks(np.zeros(1 + num, np.int64))
    assert not broken
    got = [
        set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        for mask in masks
    ]
    assert got == wanted
    # some of them were right: what was foreseen has moved nothing
    kept = drafts[: data.draw(st.integers(0, num))]
    tokens.extend(0, np.array([*kept, max(wanted[len(kept)])], np.uint32))
    again, _ = one_row(outputs, [*ids[:begin], *kept, max(wanted[len(kept)])])
    every = rows.masks(np.zeros(1, np.int64)), again.masks(np.zeros(1, np.int64))
    assert np.array_equal(every[0][0], every[1][0])


END_OF_REASONING, FREE = 4, 9  # ids that no grammar here begins with


def followed_row(
    kind: str, outputs: StructuredOutputs, ids: list[int]
) -> tuple[GrammarBitmasks, ReasoningState]:
    """A row whose grammar is that of these ids, behind reasoning or in a call."""
    if kind == "reasoning":
        asked = ReasoningIds("reasoning", (), (END_OF_REASONING,))
        state = ReasoningState(asked, 50, has_grammar=True)
        said, matcher = [FREE, END_OF_REASONING, *ids], start(outputs)
    else:
        asked = ReasoningIds("content", (), (), triggers=(ids[0],))
        calls = CallMatcher(lambda: start(outputs))
        state = ReasoningState(asked, None, has_grammar=False, calls=calls)
        said, matcher = [FREE, FREE, *ids], None
    tokens = TokenLog()
    tokens.open(0)
    tokens.extend(0, np.array([5, 6, *said], np.uint32))
    state.take_all(np.array(said, np.uint32))
    rows = GrammarBitmasks(tokens, VOCAB_SIZE)
    rows.add(0, matcher, 2, state)
    return rows, state


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["reasoning", "call"]),
    outputs=st.sampled_from(FORCING),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_so_they_are_behind_reasoning_and_in_calls(
    kind: str, outputs: StructuredOutputs, seed: int, data: st.DataObject
) -> None:
    """Up to what completes a call: another mask follows that."""
    ids, _ = walk(outputs, seed, 30)
    ids = [each for each in ids if each not in EOS]
    assume(ids)
    begin = data.draw(st.integers(1, len(ids)))
    drafts = ids[begin : begin + data.draw(st.integers(1, 6))]
    if drafts and data.draw(st.booleans()):
        drafts[data.draw(st.integers(0, len(drafts) - 1))] = data.draw(st.integers(0, 4000))
    rows, state = followed_row(kind, outputs, ids[:begin])
    assume(state.follows_grammar)
    assert rows.decides(0)
    wanted = []
    for num in range(1 + len(drafts)):
        again, state = followed_row(kind, outputs, [*ids[:begin], *drafts[:num]])
        masks, broken = again.masks(np.zeros(1, np.int64))
        if broken or not state.follows_grammar or not {*EOS}.isdisjoint(drafts[:num]):
            break
        wanted.append(masks[0])
    assert rows.foresee(0, drafts) == max(len(wanted) - 1, 0)
    if wanted:
        masks, broken = rows.masks(np.zeros(len(wanted), np.int64))
        assert not broken
        assert np.array_equal(masks, np.stack(wanted))


def test_a_grammar_decides_once_it_has_begun() -> None:
    rows, _ = one_row(FORCING[0], [])
    assert rows.decides(0)
    assert not rows.decides(1)
    asked = ReasoningIds("reasoning", (), (END_OF_REASONING,))
    state = ReasoningState(asked, None, has_grammar=True)
    rows.add(0, start(FORCING[0]), 2, state)
    assert not rows.decides(0)
    state.take(FREE, 0)
    assert not rows.decides(0)
    state.take(END_OF_REASONING, 1)
    assert rows.decides(0)


def test_a_forced_text_may_pay_where_one_token_of_it_does_not() -> None:
    rows, tokens = one_row(FORCING[0], [])
    costs = StepCosts([(1, 0.005), (2, 0.012), (8, 0.012)])
    assert costs.num_worthwhile(1, np.ones(1)) == 0
    drafter = GrammarDrafter(Silent(), rows, num_speculative_tokens=8, costs=costs)
    drafter.open(0, b"", 2, np.empty(0, np.uint32))
    ids = np.array(TOKENIZER.encode("{").ids, np.uint32)
    tokens.extend(0, ids)
    everything = RowSet(np.zeros(1, np.int64))
    drafter.observe(everything, ids, np.ones(1, np.int64), tokens)
    assert drafter.awaits_tokens
    assert drafter.propose(everything, np.full(1, 9), 0) is not None


class Silent:
    """A drafter that foresees nothing."""

    awaits_tokens = False

    def open(
        self, row: int, root: bytes, prompt_len: int, prediction: npt.NDArray[np.uint32]
    ) -> None:
        pass

    def close(self, rows: Any) -> None:
        pass

    def observe(self, rows: Any, ids: Any, counts: Any, tokens: Any) -> None:
        pass

    def propose(self, rows: Any, most: Any, num_beside: int) -> None:
        return None


def test_what_is_forced_is_drafted_until_it_is_spelled_otherwise() -> None:
    rows, tokens = one_row(FORCING[0], [])
    drafter = GrammarDrafter(Silent(), rows, num_speculative_tokens=8, costs=StepCosts())
    drafter.open(0, b"", 2, np.empty(0, np.uint32))
    everything, most = RowSet(np.zeros(1, np.int64)), np.full(1, 9)

    def arrive(text: str) -> None:
        ids = np.array(TOKENIZER.encode(text).ids, np.uint32)
        tokens.extend(0, ids)
        drafter.observe(everything, ids, np.array([len(ids)]), tokens)

    arrive("{")
    assert drafter.awaits_tokens
    drafts = drafter.propose(everything, most, 0)
    assert drafts is not None
    assert TOKENIZER.decode(drafts.token_ids.tolist()) == '"title":"'
    assert drafter.propose(everything, np.ones(1, np.int64), 0).lens.tolist() == [1]  # type: ignore[union-attr]
    arrive('"title":"')
    assert not drafter.awaits_tokens  # any string
    assert drafter.propose(everything, most, 0) is None
    for _ in range(60):
        drafter._compare([1], np.array([2], np.uint32))
    arrive('",')
    assert drafter._forced
    assert not drafter.awaits_tokens
    assert drafter.propose(everything, most, 0) is None
    drafter.close(np.zeros(1, np.int64))
    assert not drafter._forced
