"""Forced calls: what the grammar of a format allows is read as whole calls of known functions."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.answers import read
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from slipstream_bench.formats.rendering import RENDERINGS, SampleCall, format_of, render
from slipstream_core.reasoning import ReasoningState
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.table import CALLS, REASONING, WHOLE, compose
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_worker.formats.call_grammar import Opened, call_grammar, free_call_grammar
from slipstream_worker.formats.compiled_format import compile_format
from slipstream_worker.formats.reasoning_ids import call_beginnings, reasoning_ids
from slipstream_worker.formats.start_state import start_state

END = "</s>"
MAX_TOKENS = 2_000
FORCEABLE = [
    "cohere_command3",
    "deepseek_v3",
    "deepseek_v31",
    "granite",
    "granite-20b-fc",
    "hermes",
    "hunyuan_a13b",
    "jamba",
    "kimi_k2",
    "llama3_json",
    "longcat",
    "minimax",
    "mistral",
    "nemotron_json",
    "phi4_mini_json",
]
SCHEMAS: dict[str, Any] = {
    "look": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/Place"}, "is_far": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {"Place": {"enum": ["north", 'a "b"\n</a>', "é"]}},
    },
    "count": {
        "properties": {"to": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["to"],
        "additionalProperties": False,
    },
    "now": None,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
TYPES: dict[str, dict[str, str]] = {name: {} for name in SCHEMAS}
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "look": lambda given: (
        given["at"] in SCHEMAS["look"]["$defs"]["Place"]["enum"]
        and isinstance(given.get("is_far", True), bool)
        and given.keys() <= {"at", "is_far"}
    ),
    "count": lambda given: given.keys() == {"to"} and 0 <= given["to"] <= 99,
    "now": lambda given: given == {},
}


class SmallModel:
    """A vocabulary of bytes and of a format's delimiters, for llguidance."""

    def __init__(self, literals: tuple[str, ...]) -> None:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(END, special=True)])
        # as models have them: where `[ARGS]` is not special, llguidance takes it for text
        tokenizer.add_tokens([AddedToken(each, special=each[0] == "[") for each in literals])
        self._tokenizer = tokenizer
        self.ids: dict[str, int] = {each: self._id_of(each) for each in literals}
        self.end_id = self._id_of(END)
        self.library = llguidance.LLTokenizer(
            tokenizer.to_str(), tokenizer.get_vocab_size(), [self.end_id]
        )

    def _id_of(self, literal: str) -> int:
        token_id = self._tokenizer.token_to_id(literal)
        assert token_id is not None
        return token_id

    def matcher(self, grammar: str) -> Any:
        text = llguidance.LLMatcher.grammar_from_lark(grammar)
        matcher = llguidance.LLMatcher(self.library, text, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def encoded(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def items(self, token_ids: list[int]) -> list[str | int]:
        """Delimiters as tokens, the rest as text."""
        found: list[str | int] = []
        run: list[int] = []
        for token_id in [*token_ids, None]:
            if token_id is not None and token_id not in self.ids.values():
                run.append(token_id)
                continue
            if run:
                found.append(self._tokenizer.decode(run, skip_special_tokens=False))
                run = []
            if token_id is not None:
                found.append(token_id)
        return found


@cache
def model_of(name: str, reasoning: str, has_tokens: bool) -> tuple[AnswerFormat, SmallModel]:
    found = compose(REASONING.get(reasoning), CALLS[name])
    literals = tuple(sorted({each.literal for each in delimiters(found)})) if has_tokens else ()
    return found, SmallModel(literals)


def sampled(model: SmallModel, grammar: str, seed: int) -> list[int]:
    """A random walk through the grammar, which ends as soon as it may, three times in four."""
    draw = random.Random(seed)
    matcher = model.matcher(grammar)
    taken: list[int] = []
    while not (matcher.is_accepting() and draw.random() < 0.75):
        biases = matcher.compute_logit_bias()
        allowed = [i for i, bias in enumerate(biases) if bias and i != model.end_id]
        # free text of a random walk never ends
        ends = [i for i in allowed if i in model.ids.values()] if len(taken) > 20 else []
        if not allowed:
            break
        taken.append(draw.choice(ends or allowed))
        assert matcher.consume_token(taken[-1])
        assert len(taken) < MAX_TOKENS
    assert matcher.is_accepting()
    return taken


def check(events: list[AnswerEvent], may_reason: bool = False) -> list[str]:
    """Check that the answer is whole calls with valid arguments; their names."""
    kinds = {each.kind for each in events}
    assert EventKind.CONTENT not in kinds, events
    assert may_reason or EventKind.REASONING not in kinds
    begun = {each.call: each.text for each in events if each.kind == EventKind.CALL_BEGINS}
    ended = {each.call for each in events if each.kind == EventKind.CALL_ENDS}
    assert begun
    assert begun.keys() == ended
    for number, name in begun.items():
        parts = [
            each.text
            for each in events
            if each.kind == EventKind.CALL_ARGUMENTS and each.call == number
        ]
        assert ALLOWED[name](json.loads("".join(parts))), parts
    return list(begun.values())


every_format = pytest.mark.parametrize("name", FORCEABLE)
with_tokens = pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
seeds = st.integers(0, 2**32)


@every_format
@with_tokens
@settings(max_examples=15)
@given(seed=seeds, is_parallel=st.booleans())
def test_required_calls_are_read_as_whole_calls(
    name: str, has_tokens: bool, seed: int, is_parallel: bool
) -> None:
    found, model = model_of(name, "", has_tokens)
    grammar = call_grammar(found, model.ids, TOOLS, "required", is_parallel=is_parallel)
    items = model.items(sampled(model, grammar, seed))
    names = check(read(compile_format(found, model.ids), items, TYPES))
    assert is_parallel or len(names) == 1


@every_format
@with_tokens
@settings(max_examples=5)
@given(seed=seeds, choice=st.sampled_from(sorted(SCHEMAS)))
def test_a_named_function_is_called_once(
    name: str, has_tokens: bool, seed: int, choice: str
) -> None:
    found, model = model_of(name, "", has_tokens)
    grammar = call_grammar(found, model.ids, TOOLS, f"function:{choice}")
    items = model.items(sampled(model, grammar, seed))
    assert check(read(compile_format(found, model.ids), items, TYPES)) == [choice]


def test_a_call_that_begins_with_text_is_not_told_from_reasoning() -> None:
    found, model = model_of("phi4_mini_json", "qwen3", True)
    with pytest.raises(BadRequest, match="reasoning"):
        call_grammar(found, model.ids, TOOLS, "required", opened=Opened(False, True))


@pytest.mark.parametrize("name", [each for each in FORCEABLE if each != "phi4_mini_json"])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral"])
@pytest.mark.parametrize("prefilled", ["", "<think>\n", "<think>\n\n</think>\n\n"])
@settings(max_examples=5)
@given(seed=seeds)
def test_reasoning_stays_free(name: str, reasoning: str, prefilled: str, seed: int) -> None:
    found, model = model_of(name, reasoning, True)
    compiled = compile_format(found, model.ids)
    items = model.items(model.encoded(prefilled))
    pieces = [(it, "") if isinstance(it, int) else (-1, it) for it in items]
    state = start_state(compiled, pieces, TYPES)
    opened = Opened(not prefilled, prefilled == "<think>\n")
    grammar = call_grammar(found, model.ids, TOOLS, "required", opened=opened)
    items = model.items(sampled(model, grammar, seed))
    check(read(compiled, items, TYPES, state=state), may_reason=True)


@pytest.mark.parametrize("name", [each for each in FORCEABLE if each != "phi4_mini_json"])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral"])
@pytest.mark.parametrize("prefilled", ["", "<think>\n"])
@settings(max_examples=5)
@given(seed=seeds, text=st.text("ab \n<{", max_size=9))
def test_a_grammar_behind_reasoning_is_read_as_calls(
    name: str, reasoning: str, prefilled: str, seed: int, text: str
) -> None:
    """What the core lets pass before it: reasoning, up to one of the ids that end it."""
    found, model = model_of(name, reasoning, True)
    compiled = compile_format(found, model.ids)
    items = model.items(model.encoded(prefilled))
    state = start_state(
        compiled, [(it, "") if isinstance(it, int) else (-1, it) for it in items], TYPES
    )
    place = compiled.reader(TYPES, AnswerOptions(), state).place
    ids = reasoning_ids(found, model.ids, (), place, is_start=not prefilled)
    assert ids is not None
    opened = Opened(not prefilled, bool(prefilled))
    grammar = call_grammar(found, model.ids, TOOLS, "required", opened=opened, is_followed=True)
    calls = sampled(model, grammar, seed)
    thought = [*model.encoded(text), ids.ends[0]]
    begun = thought if prefilled else [ids.begins[0], *thought]
    for before in (begun, [] if not prefilled else begun):
        items = model.items([*before, *calls])
        check(read(compiled, items, TYPES, state=state), may_reason=True)


@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral", "cohere_command3"])
@pytest.mark.parametrize("prefilled", [False, True])
@settings(max_examples=60)
@given(data=st.data())
def test_the_core_and_the_reader_say_the_same_of_where_reasoning_is(
    reasoning: str, prefilled: bool, data: st.DataObject
) -> None:
    found, model = model_of("hermes", reasoning, True)
    compiled = compile_format(found, model.ids)
    options = AnswerOptions(tool_choice="none")
    start = found.reasoning.begins[0].literal if prefilled and found.reasoning else ""
    items = model.items(model.encoded(start))
    state = start_state(
        compiled, [(it, "") if isinstance(it, int) else (-1, it) for it in items], None, options
    )
    reader = compiled.reader(None, options, state)
    blanks = model.encoded(" ") + model.encoded("\n")
    ids = reasoning_ids(found, model.ids, blanks, reader.place, is_start=not prefilled)
    assert ids is not None
    followed = ReasoningState(ids, 10**9, has_grammar=False)
    choices = [*model.ids.values(), *blanks, *model.encoded("ab{")]
    outputs = data.draw(st.lists(st.sampled_from(choices), max_size=30))
    for index, token_id in enumerate(outputs):
        [item] = model.items([token_id])
        if isinstance(item, int):
            reader.feed_delimiter(item)
        else:
            reader.feed(item)
        followed.take(token_id, index)
        place = reader.place
        assert place is not None
        assert followed.is_reasoning == place.is_reasoning


@pytest.mark.parametrize("name", sorted(set(FORCEABLE) - {"phi4_mini_json"}))
@settings(max_examples=10)
@given(seed=seeds, is_parallel=st.booleans(), strict=st.sampled_from(["look", "count", ""]))
def test_a_free_answer_has_calls_in_the_grammar(
    name: str, seed: int, is_parallel: bool, strict: str
) -> None:
    found, model = model_of(name, "", True)
    tools = [
        {"type": "function", "function": {**each["function"], "strict": True}}
        if each["function"]["name"] == strict
        else each
        for each in TOOLS
    ]
    grammar, triggers = free_call_grammar(found, model.ids, tools, is_parallel=is_parallel)
    if not triggers:
        assert name == "llama3_json" or not any(
            first is not None and first.literal in model.ids
            for first in call_beginnings(CALLS[name])
        )
        return
    draw, matcher = random.Random(seed), model.matcher(grammar)
    taken: list[int] = []
    while not matcher.is_accepting():  # it is over with the first token that completes it
        biases = matcher.compute_logit_bias()
        allowed = [i for i, bias in enumerate(biases) if bias and i != model.end_id]
        if not taken:
            assert set(allowed) == set(triggers)
        ends = [i for i in allowed if i in model.ids.values()] if len(taken) > 20 else []
        if len(taken) > 100:  # nor does an object of any form
            closing = [each for each in model.encoded('"}]') if each in allowed]
            ends = ends or closing[:1]
        taken.append(draw.choice(ends or allowed))
        assert matcher.consume_token(taken[-1])
        assert len(taken) < MAX_TOKENS
    before, behind = model.encoded("Well: ["), model.encoded(" so")
    events = read(compile_format(found, model.ids), model.items([*before, *taken, *behind]), TYPES)
    begun = [each.text for each in events if each.kind == EventKind.CALL_BEGINS]
    assert begun
    assert is_parallel or len(begun) == 1
    for number, function in enumerate(begun):
        parts = [
            each.text
            for each in events
            if each.kind == EventKind.CALL_ARGUMENTS and each.call == number
        ]
        arguments = json.loads("".join(parts))
        assert isinstance(arguments, dict)
        assert function != strict or ALLOWED[function](arguments)


def test_reasoning_within_which_calls_begin_needs_no_end() -> None:
    found, model = model_of("hermes", "qwen3", True)
    opened = Opened(False, True)
    grammar = call_grammar(found, model.ids, TOOLS, "function:now", opened=opened)
    call = '{"name": "now", "arguments": {}}'
    for end, is_allowed in (("</think>\n\n", True), ("<think>", False), ("", True)):
        matcher = model.matcher(grammar)
        text = f"so [{{ I{end}<tool_call>\n{call}\n</tool_call>"
        assert matcher.try_consume_tokens(model.encoded(text)) > 5
        assert matcher.is_accepting() is is_allowed


@every_format
@with_tokens
def test_calls_are_allowed_as_they_are_rendered(name: str, has_tokens: bool) -> None:
    """Cohere's number of the call alone is left out: the model counts through the conversation."""
    found, model = model_of(name, "", has_tokens)
    calls = (SampleCall("look", {"at": "north"}), SampleCall("count", {"to": 7}))
    grammar = call_grammar(found, model.ids, TOOLS, "required")
    matched = []
    for variant in RENDERINGS:
        if format_of(variant) != name:
            continue
        token_ids = model.encoded(render(variant, calls))
        matcher = model.matcher(grammar)
        matched.append(
            matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
        )
    assert any(matched) is (name != "cohere_command3")


TYPED = sorted(set(CALLS) - set(FORCEABLE))


@pytest.mark.parametrize("name", TYPED)
def test_a_format_that_cannot_be_forced_is_named(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"'none\+{name}'") as caught:
        call_grammar(compose(None, CALLS[name]), {}, TOOLS, "required")
    assert caught.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("found", "tools", "choice", "field", "why"),
    [
        (WHOLE["harmony"], TOOLS, "required", "tool_choice", "'harmony'"),
        (compose(REASONING["qwen3"], None), TOOLS, "required", "tool_choice", "qwen3"),
        (compose(None, CALLS["hermes"]), TOOLS, "function:no", "tool_choice", "of the tools"),
        (compose(None, CALLS["hermes"]), [], "required", "tool_choice", "of the tools"),
        (
            compose(None, CALLS["hermes"]),
            [{"function": {"name": "f", "parameters": {"type": "string"}}}],
            "required",
            "tools",
            "schema of an object",
        ),
        (
            compose(None, CALLS["hermes"]),
            [{"function": {"name": "f", "parameters": {"enum": ["<tool_call>"]}}}],
            "required",
            "tools",
            "delimiters",
        ),
        (
            compose(None, CALLS["hermes"]),
            [{"function": {"name": "f", "parameters": {"description": "x" * 2**18}}}],
            "required",
            "tools",
            "bytes",
        ),
        (
            compose(None, CALLS["hermes"]),
            [{"function": {"name": f"f{number}"}} for number in range(513)],
            "required",
            "tools",
            "at most 512",
        ),
        (
            compose(None, CALLS["deepseek_v31"]),
            [{"function": {"name": "a b"}}],
            "required",
            "tools",
            "names without",
        ),
    ],
)
def test_what_cannot_be_forced_is_told(
    found: AnswerFormat, tools: Any, choice: str, field: str, why: str
) -> None:
    with pytest.raises(BadRequest, match=why) as caught:
        call_grammar(found, {"<tool_call>": 7}, tools, choice)
    assert caught.value.field == field
