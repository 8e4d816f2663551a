"""Forced calls: what the grammar of a format allows is read as whole calls of known functions."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.answers import read
from tests.helpers.grammar_walk import SmallModel, compiled_for, model_of, walk

from slipstream_core.grammar.llguidance_backend import GrammarError, Vocabulary
from slipstream_core.grammar.reasoning.reasoning_state import ReasoningState
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.table import CALLS, REASONING, WHOLE, compose
from slipstream_ipc.messages import FRAMED, StructuredOutputs
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, format_of, render
from slipstream_worker.formats.argument_grammar import json_rule
from slipstream_worker.formats.call_grammar import (
    Opened,
    call_grammar,
    frame_beside_calls,
    free_call_grammar,
    structured_frame,
)
from slipstream_worker.formats.compiled_format import CompiledFormat
from slipstream_worker.formats.property_types import property_types
from slipstream_worker.formats.reasoning_ids import call_beginnings, reasoning_ids
from slipstream_worker.formats.start_state import start_state

FORCEABLE = sorted(CALLS)
BEGIN_WITH_TEXT = {"phi4_mini_json", "pythonic", "olmo3"}
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
TYPES = {each["function"]["name"]: property_types(each["function"]) for each in TOOLS}
ALLOWED: dict[str, Callable[[Any], bool]] = {
    "look": lambda given: (
        given["at"] in SCHEMAS["look"]["$defs"]["Place"]["enum"]
        and isinstance(given.get("is_far", True), bool)
        and given.keys() <= {"at", "is_far"}
    ),
    "count": lambda given: given.keys() == {"to"} and 0 <= given["to"] <= 99,
    "now": lambda given: given == {},
}


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
    items = model.items(walk(model, grammar, seed))
    names = check(read(compiled_for(found, model), items, TYPES))
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
    items = model.items(walk(model, grammar, seed))
    assert check(read(compiled_for(found, model), items, TYPES)) == [choice]


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
    compiled = compiled_for(found, model)
    items = model.items(model.encoded(prefilled))
    pieces = [(it, "") if isinstance(it, int) else (-1, it) for it in items]
    state = start_state(compiled, pieces, TYPES)
    opened = Opened(not prefilled, prefilled == "<think>\n")
    grammar = call_grammar(found, model.ids, TOOLS, "required", opened=opened)
    items = model.items(walk(model, grammar, seed))
    check(read(compiled, items, TYPES, state=state), may_reason=True)


def thoughts(
    found: AnswerFormat, model: SmallModel, is_prefilled: bool, text: str
) -> tuple[CompiledFormat, bytes, list[list[int]]]:
    """The compiled format, its reader's state where the prompt may have begun reasoning, and what
    the core lets pass before a grammar then: reasoning, up to what ends it, or none.
    """
    assert found.reasoning is not None
    prefilled = found.reasoning.begins[0].literal if is_prefilled else ""
    compiled = compiled_for(found, model)
    items = model.items(model.encoded(prefilled))
    pieces = [(it, "") if isinstance(it, int) else (-1, it) for it in items]
    state = start_state(compiled, pieces, TYPES)
    place = compiled.reader(TYPES, AnswerOptions(), state).place
    ids = reasoning_ids(found, model.spellings(found), (), place, is_start=not is_prefilled)
    assert ids is not None
    thought = [*model.encoded(text), *ids.forced_end]
    if is_prefilled:
        return compiled, state, [thought]
    return compiled, state, [[*(ids.begins[:1] or ids.sequences.begins[0]), *thought], []]


@pytest.mark.parametrize("name", [each for each in FORCEABLE if each != "phi4_mini_json"])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral", "kimi_k3"])
@pytest.mark.parametrize("is_prefilled", [False, True])
@settings(max_examples=5)
@given(seed=seeds, text=st.text("ab \n<{", max_size=9))
def test_a_grammar_behind_reasoning_is_read_as_calls(
    name: str, reasoning: str, is_prefilled: bool, seed: int, text: str
) -> None:
    found, model = model_of(name, reasoning, True)
    compiled, state, befores = thoughts(found, model, is_prefilled, text)
    opened = Opened(not is_prefilled, is_prefilled)
    grammar = call_grammar(found, model.ids, TOOLS, "required", opened=opened, is_followed=True)
    calls = walk(model, grammar, seed)
    for before in befores:
        items = model.items([*before, *calls])
        check(read(compiled, items, TYPES, state=state), may_reason=True)


@pytest.mark.parametrize(
    "reasoning", ["qwen3", "deepseek_r1", "mistral", "cohere_command3", "kimi_k3"]
)
@pytest.mark.parametrize("prefilled", [False, True])
@settings(max_examples=60)
@given(data=st.data())
def test_the_core_and_the_reader_say_the_same_of_where_reasoning_is(
    reasoning: str, prefilled: bool, data: st.DataObject
) -> None:
    found, model = model_of("hermes", reasoning, True)
    compiled = compiled_for(found, model)
    options = AnswerOptions(tool_choice="none")
    start = found.reasoning.begins[0].literal if prefilled and found.reasoning else ""
    items = model.items(model.encoded(start))
    state = start_state(
        compiled, [(it, "") if isinstance(it, int) else (-1, it) for it in items], None, options
    )
    reader = compiled.reader(None, options, state)
    blanks = model.encoded(" ") + model.encoded("\n")
    ids = reasoning_ids(found, model.spellings(found), blanks, reader.place, is_start=not prefilled)
    assert ids is not None
    followed = ReasoningState(ids, 10**9, has_grammar=False)
    ways = [ways[0] for ways in model.spellings(found).sequences.values()]  # whole, and cut
    pieces = [*ways, *(way[:-1] for way in ways), *((each,) for each in model.ids.values())]
    pieces += [(each,) for each in (*blanks, *model.encoded("ab{"))]
    drawn = data.draw(st.lists(st.sampled_from(pieces), max_size=30))
    outputs = [token_id for piece in drawn for token_id in piece]
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
    grammar, triggers = free_call_grammar(
        found, model.spellings(found), tools, is_parallel=is_parallel
    )
    if not triggers:
        assert any(each.at_start for each in CALLS[name].sections) or not any(
            model.spellings(found).has(first) for first in call_beginnings(CALLS[name])
        )
        return
    taken = walk(model, grammar, seed, is_short=True)  # it is over with what completes it
    spellings = model.spellings(found)
    begins = [(each,) for each in spellings.ids(triggers)] + [*spellings.longer(triggers)]
    assert any(tuple(taken[: len(each)]) == each for each in begins)
    before, behind = model.encoded("Well: ["), model.encoded(" so")
    events = read(compiled_for(found, model), model.items([*before, *taken, *behind]), TYPES)
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


def test_a_walk_that_was_too_long_is_begun_anew_and_a_grammar_without_an_end_is_found() -> None:
    found, model = model_of("deepseek_v32", "", True)
    tools = [
        {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}},
        *TOOLS[1:],
    ]
    grammar, _ = free_call_grammar(found, model.spellings(found), tools, is_parallel=True)
    assert walk(model, grammar, 293, is_short=True)  # its first walk takes 3,215 tokens
    with pytest.raises(AssertionError, match="did not end"):
        walk(model, "start: /a{2500}/", 0)


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


@pytest.mark.parametrize(
    ("found", "tools", "choice", "field", "why"),
    [
        (WHOLE["harmony"], TOOLS, "required", "tool_choice", "without the tokens"),
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


HARMONY = WHOLE["harmony"]
HARMONY_MODEL = SmallModel(tuple(sorted({each.literal for each in delimiters(HARMONY)})))


@pytest.mark.parametrize("prefilled", ["<|start|>assistant", "", "<|channel|>analysis<|message|>"])
@settings(max_examples=40)
@given(seed=seeds, choice=st.sampled_from(["required", "function:count"]))
def test_calls_in_channels_are_read_as_one_whole_call(
    prefilled: str, seed: int, choice: str
) -> None:
    model = HARMONY_MODEL
    compiled = compiled_for(HARMONY, model)
    items = model.items(model.encoded(prefilled))
    state = start_state(
        compiled, [(it, "") if isinstance(it, int) else (-1, it) for it in items], TYPES
    )
    is_header = prefilled.endswith("assistant")
    opened = Opened(not prefilled, bool(prefilled) and not is_header, is_header=is_header)
    grammar = call_grammar(HARMONY, model.ids, TOOLS, choice, opened=opened)
    token_ids = [*walk(model, grammar, seed), model.ids["<|call|>"]]
    names = check(read(compiled, model.items(token_ids), TYPES, state=state), may_reason=True)
    assert names == ["count"] if choice != "required" else len(names) == 1


HEADER = "<|start|>assistant"
FRAME_ALONE = f"start: {FRAMED}"
CALL_HEADER = "<|channel|>commentary to=functions.count <|constrain|>json<|message|>"


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("<|channel|>final<|message|>well {", True),
        (f"<|channel|>analysis<|message|>so<|end|>{HEADER}<|channel|>final<|message|>well", True),
        (f'<|channel|>commentary<|message|>I look.<|end|>{HEADER}{CALL_HEADER}{{"to": 7}}', True),
        (f'{CALL_HEADER}{{"to": 7}}', True),
        (' to=functions.count<|channel|>commentary json<|message|>{"to": 7}', True),
        (f'{CALL_HEADER}{{"to": 100}}', False),
        (f"{CALL_HEADER}{{}}", False),
        ("<|channel|>commentary to=functions.no<|message|>{}", False),
    ],
)
def test_a_free_answer_in_channels_keeps_strict_functions_to_their_schema(
    text: str, is_allowed: bool
) -> None:
    tools = [{"function": {**each["function"], "strict": True}} for each in TOOLS]
    opened = Opened(is_header=True)
    grammar, triggers = free_call_grammar(
        HARMONY, HARMONY_MODEL.spellings(HARMONY), tools, is_parallel=True, opened=opened
    )
    assert not triggers
    matcher, token_ids = HARMONY_MODEL.matcher(grammar), HARMONY_MODEL.encoded(text)
    num_taken = matcher.try_consume_tokens(token_ids)
    assert (num_taken == len(token_ids) and matcher.is_accepting()) is is_allowed


@pytest.fixture(scope="module")
def harmony_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    file = tmp_path_factory.mktemp("model") / "tokenizer.json"
    file.write_text(HARMONY_MODEL.as_json)
    return Vocabulary(file, HARMONY_MODEL.vocab_size, (HARMONY_MODEL.end_id,))


OUTPUTS = {
    "json": (StructuredOutputs(json={"enum": [{"a/b": 1}]}), '{"a/b": 1}', '{"a/b": 2}'),
    "regex": (StructuredOutputs(regex="[a-c]/\n+"), "b/\n\n", "d/\n"),
    "choice": (StructuredOutputs(choice=("yes", 'n"o')), 'n"o', "maybe"),
    "lark": (StructuredOutputs(grammar='start: call\ncall: "c"+'), "cc", "call"),
    "gbnf": (StructuredOutputs(grammar='root ::= "a" x\nx ::= [b-d]'), "ad", "ae"),
    "json_object": (StructuredOutputs(json_object=True), '{"a": [1]}', "[1]"),
}
FINAL = "<|channel|>final<|message|>"
THOUGHT = f"<|channel|>analysis<|message|>so<|end|>{HEADER}"


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("prefilled", [HEADER, "", "<|channel|>analysis<|message|>"])
def test_structured_output_is_the_text_of_the_final_message(
    name: str, prefilled: str, harmony_vocabulary: Vocabulary
) -> None:
    outputs, fitting, other = OUTPUTS[name]
    is_header = prefilled == HEADER
    opened = Opened(not prefilled, bool(prefilled) and not is_header, is_header=is_header)
    channels = HARMONY.channels
    assert channels is not None
    frame = structured_frame(channels, HARMONY_MODEL.ids, TOOLS, opened)
    text = harmony_vocabulary.text_of(outputs, frame).text

    def allows(answer: str) -> bool:
        matcher, token_ids = harmony_vocabulary.compile_text(text), HARMONY_MODEL.encoded(answer)
        num_taken = matcher.try_consume_tokens(token_ids)
        return num_taken == len(token_ids) and matcher.is_accepting()

    before = {HEADER: "", "": HEADER}.get(prefilled, f"hm<|end|>{HEADER}")
    assert allows(f"{before}{FINAL}{fitting}")
    assert allows(f"{before}{THOUGHT}{FINAL}{fitting}")
    assert allows(f"{before}{THOUGHT}<|channel|>final <|constrain|>json<|message|>{fitting}")
    assert allows(f"{before}{THOUGHT}{CALL_HEADER}{{}}")
    assert not allows(f"{before}{FINAL}{other}")
    assert not allows(fitting)
    assert not allows(f"{before}<|channel|>commentary<|message|>I look.<|end|>{FINAL}{fitting}")
    assert not allows(f"{before}{FINAL}{fitting}<|end|>{HEADER}{FINAL}{fitting}")


STRICT = [
    {**tool, "function": {**tool["function"], "strict": True}}  # type: ignore[dict-item]
    for tool in TOOLS
]


def calls_or(text: str, events: list[AnswerEvent], *, takes_blanks: bool = False) -> list[str]:
    """Check that the answer is whole calls, or this text as content, behind blanks if it takes
    them; the calls' names.
    """
    if any(each.kind == EventKind.CALL_BEGINS for each in events):
        return check(events, may_reason=True)
    content = "".join([each.text for each in events if each.kind == EventKind.CONTENT])
    assert (content.lstrip() if takes_blanks else content) == text, events
    return []


@every_format
@with_tokens
@settings(max_examples=12)
@given(seed=seeds, is_parallel=st.booleans())
def test_structured_output_beside_calls_is_read_as_one_or_the_other(
    name: str, has_tokens: bool, seed: int, is_parallel: bool
) -> None:
    found, model = model_of(name, "", has_tokens)
    frame = frame_beside_calls(found, model.ids, STRICT, is_parallel=is_parallel)
    assert frame.count(FRAMED) == 1
    items = model.items(walk(model, frame.replace(FRAMED, '"yes"'), seed))
    names = calls_or("yes", read(compiled_for(found, model), items, TYPES))
    assert is_parallel or len(names) <= 1


@pytest.mark.parametrize("name", [each for each in FORCEABLE if each != "phi4_mini_json"])
@pytest.mark.parametrize("reasoning", ["qwen3", "deepseek_r1", "mistral", "kimi_k3"])
@pytest.mark.parametrize("is_prefilled", [False, True])
@settings(max_examples=5)
@given(seed=seeds, text=st.text("ab \n<{", max_size=9), takes_blanks=st.booleans())
def test_structured_output_or_calls_stand_behind_reasoning(
    name: str, reasoning: str, is_prefilled: bool, seed: int, text: str, takes_blanks: bool
) -> None:
    found, model = model_of(name, reasoning, True)
    compiled, state, befores = thoughts(found, model, is_prefilled, text)
    opened = Opened(not is_prefilled, is_prefilled)
    frame = frame_beside_calls(
        found,
        model.ids,
        STRICT,
        is_parallel=True,
        opened=opened,
        is_followed=True,
        form="json" if takes_blanks else "other",
    )
    answer = walk(model, frame.replace(FRAMED, '"yes"'), seed)
    for before in befores:
        events = read(compiled, model.items([*before, *answer]), TYPES, state=state)
        calls_or("yes", events, takes_blanks=takes_blanks and not before)


@every_format
@with_tokens
@settings(max_examples=5)
@given(seed=seeds)
def test_neither_json_nor_a_call_beside_it_is_lost_where_they_begin_alike(
    name: str, has_tokens: bool, seed: int
) -> None:
    found, model = model_of(name, "", has_tokens)
    frame = frame_beside_calls(found, model.ids, STRICT, is_parallel=True)
    output = json_rule({"type": "object"}, is_strict=True)
    matcher = model.matcher(f"{frame.replace(FRAMED, 'output')}output: {output}\n")
    fitting = ["{}", '{"n":1}', '{"name":"look"}', '{"name": "n", "b": []}', '{\n  "at": "look"\n}']
    calls = walk(model, call_grammar(found, model.ids, STRICT, "required"), seed)
    for token_ids in [*map(model.encoded, fitting), calls]:
        one = matcher.deep_copy()
        assert one.try_consume_tokens(token_ids) == len(token_ids)
        assert one.is_accepting()


@every_format
@with_tokens
def test_nothing_of_a_grammar_of_the_requests_own_is_lost_beside_calls(
    name: str, has_tokens: bool
) -> None:
    found, model = model_of(name, "", has_tokens)
    frame = frame_beside_calls(found, model.ids, TOOLS, is_parallel=True, form="grammar")
    begins = [first.literal for first in call_beginnings(CALLS[name]) if first]
    begins += ["functools[", "[now()", '{"name": 1']
    texts = [f"{each[:num]}0" for each in begins for num in range(len(each))]
    whole = (frame or f"start: {FRAMED}\n").replace(FRAMED, "own")
    matcher = model.matcher(f"{whole}own: /./+\n")  # in the smallest terminals
    for text in texts:
        one, token_ids = matcher.deep_copy(), model.encoded(text)
        if not set(token_ids) & set(model.ids.values()):
            assert one.try_consume_tokens(token_ids) == len(token_ids), text
            assert one.is_accepting()
    assert frame or not has_tokens or name in BEGIN_WITH_TEXT | {"llama4_pythonic"}


@every_format
@with_tokens
def test_calls_beside_structured_output_have_arguments(name: str, has_tokens: bool) -> None:
    found, model = model_of(name, "", has_tokens)
    frame = frame_beside_calls(found, model.ids, TOOLS, is_parallel=True)
    calls = (SampleCall("look", {"at": "north"}), SampleCall("count", {"to": 7}))
    matched = []
    for variant in RENDERINGS:
        if format_of(variant) == name:
            token_ids = model.encoded(render(variant, calls))
            matcher = model.matcher(frame.replace(FRAMED, '"yes"'))
            matched.append(matcher.try_consume_tokens(token_ids) == len(token_ids))
    assert any(matched) is (name != "cohere_command3")  # as where calls are forced


def test_structured_output_stands_alone_where_calls_have_no_grammar() -> None:
    found, model = model_of("phi4_mini_json", "qwen3", True)
    within = Opened(False, True)
    assert not frame_beside_calls(found, model.ids, TOOLS, is_parallel=True, opened=within)
    broken = {"type": "function", "function": {"name": "<", "parameters": {}}}
    found, model = model_of("glm45", "", True)
    assert not frame_beside_calls(found, model.ids, [broken], is_parallel=True)
    broken["function"]["strict"] = True  # type: ignore[index]
    with pytest.raises(BadRequest, match="names without"):
        frame_beside_calls(found, model.ids, [broken], is_parallel=True)


@pytest.mark.parametrize("grammar", ['{"a": 1}', "{", "start: @no"])
def test_structured_output_that_is_no_grammar_is_refused(
    grammar: str, harmony_vocabulary: Vocabulary
) -> None:
    def compile_it(outputs: StructuredOutputs) -> None:
        harmony_vocabulary.compile_text(harmony_vocabulary.text_of(outputs, FRAME_ALONE).text)

    compile_it(StructuredOutputs(grammar='start: "a"'))
    with pytest.raises(GrammarError):
        compile_it(StructuredOutputs(grammar=grammar))


COUNT = '{"name": "count", "arguments": {"to": 7}}'
WRONG = '{"name": "count", "arguments": {"to": "x"}}'


@pytest.mark.parametrize(
    ("name", "text", "num_calls"),
    [
        ("phi4_mini_json", f"Well: functools[{COUNT}] so", 1),
        ("phi4_mini_json", f"functools[{COUNT}]functools[{COUNT}]", 2),
        ("phi4_mini_json", f"functools[{WRONG}]", None),
        ("phi4_mini_json", "func [tools", 0),
        ("granite-20b-fc", f"a<function_call> {COUNT}", 1),
        ("granite-20b-fc", f"a<function_call> {WRONG}", None),
        ("granite", f"a<tool_call>[{COUNT}]", 1),
        ("granite", f"a<tool_call>[{COUNT}]<|tool_call|>[{COUNT}]", 2),
        ("granite", f"a<|tool_call|>[{WRONG}]", None),
        ("granite", "a <tool|call> b", 0),
        ("llama3_json", COUNT.replace("arguments", "parameters"), 1),
        ("llama3_json", WRONG.replace("arguments", "parameters"), None),
        ("llama3_json", "<|python_tag|>" + WRONG.replace("arguments", "parameters"), None),
        ("llama3_json", "a {b}", 0),
        ("llama3_json", ' {"a": 1}', None),
        ("pythonic", "[count(to=7), now()]", 2),
        ("pythonic", "[count(to='x')]", None),
        ("pythonic", "a [count(to='x')]", 0),
        ("olmo3", "a <function_calls>\ncount(to=7)\n</function_calls> b", 1),
        ("olmo3", "a <function_calls>count(to=100)</function_calls>", None),
    ],
)
def test_strict_functions_are_kept_to_their_schema_where_calls_begin_with_text(
    name: str, text: str, num_calls: int | None
) -> None:
    found, _ = model_of(name, "", False)
    model = SmallModel(("<|python_tag|>",))
    tools = [{"function": {**each["function"], "strict": True}} for each in TOOLS]
    grammar, triggers = free_call_grammar(found, model.spellings(found), tools, is_parallel=True)
    assert not triggers
    matcher, token_ids = model.matcher(grammar), model.encoded(text)
    num_taken = matcher.try_consume_tokens(token_ids)
    is_allowed = num_taken == len(token_ids) and matcher.is_accepting()
    assert is_allowed is (num_calls is not None)
    if num_calls is not None:
        events = read(compiled_for(found, model), model.items(token_ids), TYPES)
        assert sum(each.kind == EventKind.CALL_ENDS for each in events) == num_calls
