"""Answers on which other servers' parsers failed, named by the issues that report them."""

# ruff: noqa: RUF001 - DeepSeek's delimiters have full-width bars

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence

import pytest
from tests.helpers.grammar_walk import SmallModel

from slipstream_core.grammar.reasoning.reasoning_state import Allowed, ReasoningState
from slipstream_ipc.formats.answer_format import delimiters
from slipstream_ipc.formats.table import CALLS, REASONING, compose, find_format
from slipstream_ipc.messages.answer import AnswerOptions, EventKind
from slipstream_lab.formats import our_reader
from slipstream_lab.formats.divisions import AnswerPiece, divided, pieces
from slipstream_lab.formats.our_reader import ReadAnswer, ReadCall
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, render
from slipstream_worker.formats.call_grammar import Opened, call_grammar
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format
from slipstream_worker.formats.delimiter_tables import Place
from slipstream_worker.formats.reasoning_ids import Spellings, reasoning_ids
from slipstream_worker.formats.start_state import start_state

TYPES = {
    "get_weather": {"city": "string", "days": "integer"},
    "write": {"path": "string", "content": "string", "body": "object"},
    "flag": {"is_on": "boolean", "size": "number", "rows": "array"},
    "now": {},
}
OSLO = SampleCall("get_weather", {"city": "Oslo", "days": 3})
NOW = SampleCall("now", {})
NUM_DIVISIONS = 20
REASONS = Place(is_reasoning=True, at_border=False, reads_calls=True, failed_at=0)


def divisions(text: str, tokens: Sequence[str]) -> list[list[AnswerPiece]]:
    """The whole text, its characters, and random pieces."""
    whole = pieces(text, tokens)
    rng = random.Random(text)
    return [
        whole,
        divided(whole, rng, 1),
        *(divided(whole, rng, 9) for _ in range(NUM_DIVISIONS)),
    ]


def compiled(variant: str, reasoning: str | None = None) -> CompiledFormat:
    if reasoning is None:
        found = our_reader.compiled(variant)
        if found is None:
            pytest.skip(f"the table lacks {variant}")
        return found
    format_ = find_format(f"{reasoning}+{variant}")
    if format_ is None:
        pytest.skip(f"the table lacks {reasoning}+{variant}")
    return compile_format(format_, our_reader.token_ids(variant))


def read(variant: str, text: str, *, reasoning: str | None = None, prompt: str = "") -> ReadAnswer:
    """What the text says, which is the same at every division. prompt: the open turn's text."""
    known = compiled(variant, reasoning)
    ids = our_reader.token_ids(variant)
    parts = pieces(prompt, RENDERINGS[variant].added_tokens)
    state = start_state(known, [(ids.get(part.text, 0), part.text) for part in parts], TYPES)
    first, *others = (
        our_reader.as_answer(our_reader.events_of(known, variant, cut, TYPES, state))
        for cut in divisions(text, RENDERINGS[variant].added_tokens)
    )
    assert all(other == first for other in others)
    return first


def values(answer: ReadAnswer) -> list[SampleCall]:
    assert all(call.is_whole for call in answer.calls)
    return [SampleCall(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("variant", ["hermes", "llama3_json", "glm45", "qwen3_coder"])
def test_sglang_37634_more_than_one_call_in_one_piece(variant: str) -> None:
    assert values(read(variant, render(variant, [OSLO, NOW, OSLO]))) == [OSLO, NOW, OSLO]


@pytest.mark.parametrize("variant", ["glm45", "glm47", "minimax_m2", "mistral", "pythonic"])
def test_sglang_35564_character_by_character_as_the_whole(variant: str) -> None:
    """Integers that were quoted, `{}` that never came, all calls but an array's first, …"""
    last_is_object = SampleCall("write", {"path": "a", "body": {"deep": {"b": [1, {}]}}})
    calls = [NOW, OSLO, last_is_object, OSLO]
    assert values(read(variant, render(variant, calls))) == calls


@pytest.mark.parametrize("variant", ["minimax_m2", "hermes", "glm47"])
def test_sglang_35564_text_behind_a_call_is_content(variant: str) -> None:
    answer = read(variant, render(variant, [OSLO]) + "\nThat is all.")
    assert values(answer) == [OSLO]
    assert answer.content == "That is all."


@pytest.mark.parametrize("variant", ["minimax_m2", "hermes"])
def test_sglang_35564_a_call_of_an_unknown_tool_is_content(variant: str) -> None:
    text = render(variant, [SampleCall("unknown", {"a": 1})])
    assert read(variant, text) == ReadAnswer("", text, ())


@pytest.mark.parametrize("variant", ["hermes", "qwen3_coder", "glm47"])
def test_sglang_35564_the_begin_of_a_delimiter_is_not_lost(variant: str) -> None:
    assert read(variant, "5 <tool").content == "5 <tool"


def test_vllm_57699_a_parameter_that_its_function_closes() -> None:
    text = (
        "<tool_call>\n<function=write>\n<parameter=path>\na.txt\n</parameter>\n<parameter=body>\n"
        '{"mode": "AIR", "on": true}\n</function>\n</tool_call>'
    )
    expected = SampleCall("write", {"path": "a.txt", "body": {"mode": "AIR", "on": True}})
    assert values(read("qwen3_coder", text)) == [expected]
    text = text.replace("body", "content").replace('{"mode": "AIR", "on": true}', "a\nb")
    assert values(read("qwen3_coder", text)) == [
        SampleCall("write", {"path": "a.txt", "content": "a\nb"})
    ]


@pytest.mark.parametrize(
    "content",
    [
        "</function>",
        "a\n</function>\nb",
        "</function>\n\n",
        "</function </function> <",
        "</function>" + " " * 100,
        "</funct",
    ],
)
def test_vllm_57699_the_same_tag_within_a_parameter_is_text(content: str) -> None:
    text = f"<parameter=content>\n{content}\n</parameter>\n</function>\n</tool_call>"
    answer = read("qwen3_coder", f"<tool_call>\n<function=write>\n{text}")
    assert values(answer) == [SampleCall("write", {"content": content})]


@pytest.mark.parametrize(
    "variant",
    ["hermes", "qwen3_coder", "glm45", "minimax_m2", "deepseek_v31", "pythonic", "harmony"],
)
def test_vllm_30439_36073_43267_a_long_text_streams_as_it_is_written(variant: str) -> None:
    letters = "All work and no play makes. " * 40
    text = render(variant, [SampleCall("write", {"path": "a", "content": letters})])
    known = compiled(variant)
    reader = known.reader(TYPES, AnswerOptions())
    ids = our_reader.token_ids(variant)
    begin = text.index(letters)
    for piece in pieces(text[:begin], RENDERINGS[variant].added_tokens):
        if piece.is_token and ids[piece.text] in known.delimiter_ids:
            reader.feed_delimiter(ids[piece.text])
        else:
            reader.feed(piece.text)
    arguments = ""
    for at in range(begin, begin + len(letters), 4):
        for found in reader.feed(text[at : at + 4]):
            assert found.event.kind == EventKind.CALL_ARGUMENTS
            arguments += found.event.text
        assert len(arguments) >= at - begin - 1  # at most a blank is held, and what a piece lacks


@pytest.mark.parametrize("variant", ["qwen3_coder", "hermes"])
def test_vllm_39056_a_call_within_reasoning_is_a_call(variant: str) -> None:
    text = f"<think>\nI look it up.\n{render(variant, [OSLO])}"
    answer = read(variant, text, reasoning="qwen3")
    assert answer.reasoning == "I look it up."
    assert values(answer) == [OSLO]


@pytest.mark.parametrize("variant", ["qwen3_coder", "hermes"])
def test_llama_cpp_20260_text_between_reasoning_and_a_call_is_content(variant: str) -> None:
    text = f"<think>\nHm.\n</think>\n\nI read the file.\n\n{render(variant, [OSLO])}"
    answer = read(variant, text, reasoning="qwen3")
    assert (answer.reasoning, answer.content) == ("Hm.", "I read the file.")
    assert values(answer) == [OSLO]


@pytest.mark.parametrize(
    "end", ["<tool_call>", "<tool_call>\n", "<tool_call>\n<", "<tool_call>\n<fun"]
)
def test_vllm_47137_an_answer_that_ends_in_an_opener_keeps_it(end: str) -> None:
    assert read("qwen3_coder", f"Now: {end}").content == f"Now: {end}"


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        " to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.get_weather<|message|>",
        "<|channel|>analysis to=functions.get_weather code<|message|>",
    ],
)
def test_vllm_23567_51977_recipients_stand_where_they_like_in_a_header(header: str) -> None:
    text = f'{header}{{"city": "Oslo", "days": 3}}<|call|>'
    assert values(read("harmony", text, prompt="<|start|>assistant")) == [OSLO]


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>--commentary<|message|>Hello.<|end|>",
        "<|channel|>final more words<|message|>Hello.<|return|>",
        "<|message|>Hello.<|end|>",
    ],
)
def test_vllm_23567_a_header_that_says_too_much_is_no_error(text: str) -> None:
    answer = read("harmony", text)
    assert answer.calls == ()
    assert "Hello." in answer.content


@pytest.mark.parametrize("variant", ["hermes", "llama3_json", "mistral", "glm47", "hunyuan_a13b"])
def test_vllm_28806_44326_47901_a_call_without_arguments_has_an_empty_object(variant: str) -> None:
    answer = read(variant, render(variant, [NOW, OSLO, NOW]))
    assert values(answer) == [NOW, OSLO, NOW]


@pytest.mark.parametrize("variant", ["hermes", "llama3_json", "mistral:args", "kimi_k2", "granite"])
def test_vllm_40861_delimiters_within_a_text_are_text(variant: str) -> None:
    """They are written as text there, not as tokens."""
    content = "".join(RENDERINGS[variant].added_tokens) + '</tool_call>\n"}}]; {'
    calls = [SampleCall("write", {"path": "a", "content": content})]
    known = compiled(variant)
    tokens = RENDERINGS[variant].added_tokens
    before, after = render(variant, calls).split(json.dumps(content)[1:-1])
    for max_len in (1, 3, 9, 99):
        cut = [
            *pieces(before, tokens),
            *divided([AnswerPiece(json.dumps(content)[1:-1], False)], random.Random(3), max_len),
            *pieces(after, tokens),
        ]
        events = our_reader.events_of(known, variant, cut, TYPES)
        assert values(our_reader.as_answer(events)) == calls


@pytest.mark.parametrize("variant", ["gemma4", "glm45", "qwen3_coder", "pythonic"])
def test_vllm_39089_42047_47906_literals_come_whole_and_typed(variant: str) -> None:
    """`true` in two pieces, 108.2 as 108.02, numbers as texts."""
    calls = [SampleCall("flag", {"is_on": True, "rows": [1, False, None], "size": 108.2})]
    assert values(read(variant, render(variant, calls))) == calls


def test_llama_cpp_23838_calls_of_lfm2() -> None:
    text = "<|tool_call_start|>[get_weather(city='Mexico City', days=5)]<|tool_call_end|>"
    expected = SampleCall("get_weather", {"city": "Mexico City", "days": 5})
    assert values(read("lfm2", text)) == [expected]


def test_llama_cpp_24807_a_parameter_that_is_closed_twice_keeps_its_call() -> None:
    text = (
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    answer = read("qwen3_coder", text)
    assert [call.name for call in answer.calls] == ["write"]


def test_vllm_51914_markup_without_a_name_is_content() -> None:
    text = (
        "<｜DSML｜function_calls>\n"
        '<｜DSML｜parameter name="path" string="true">a</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    assert read("deepseek_v32", text) == ReadAnswer("", text, ())


@pytest.mark.parametrize("variant", ["hermes", "mistral:args", "llama3_json"])
def test_vllm_10395_an_answer_that_is_cut_keeps_a_prefix_of_its_arguments(variant: str) -> None:
    text = render(variant, [OSLO])
    arguments = json.dumps(OSLO.arguments)
    for end in range(text.index("Oslo"), len(text) - len("}\n</tool_call>")):
        answer = read(variant, text[:end])
        assert len(answer.calls) == 1
        assert answer.calls[0].name == OSLO.name
        assert arguments.startswith(answer.calls[0].arguments)
        assert answer.calls[0] != ReadCall(OSLO.name, arguments)


OBJECTS = [{"path": "a.txt", "edits": [{"from": "a", "to": "b"}]}, {"path": "b"}]
REPORTED: list[tuple[str, str, str | None, str, ReadAnswer]] = [
    (  # a value that its type does not fit cut what had been sent before
        "vllm-48702",
        "qwen3_coder",
        None,
        (
            "<tool_call>\n<function=get_weather>\n<parameter=city>\n17\n</parameter>\n"
            "<parameter=days>\n3 or 4\n</parameter>\n</function>\n</tool_call>"
        ),
        ReadAnswer("", "", (ReadCall("get_weather", '{"city": "17", "days": "3 or 4"}'),)),
    ),
    (  # "tool_calls" as the reason of an answer whose arguments had broken off
        "vllm-53269",
        "qwen3_coder",
        None,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nOs",
        ReadAnswer("", "", (ReadCall("get_weather", '{"city": "Os', False),)),
    ),
    (  # what had looked like a call was dropped where a stop string cut it off
        "vllm-42210",
        "llama3_json",
        None,
        '{"n',
        ReadAnswer("", '{"n', ()),
    ),
    (  # reasoning leaked into the content where deltas were large
        "vllm-39885",
        "gemma4",
        "gemma4",
        "<|channel>thought\nI look it up.\n<channel|>Here:<|tool_call>call:now{}<tool_call|>",
        ReadAnswer("I look it up.", "Here:", (ReadCall("now", "{}"),)),
    ),
    (  # the same with nothing in the channel, as templates without reasoning write it
        "vllm-39885",
        "gemma4",
        "gemma4",
        "<|channel>thought\n<channel|>Hello.",
        ReadAnswer("", "Hello.", ()),
    ),
    (  # lists of objects as parameters, the first of which ended the answer
        "llama.cpp-21771",
        "qwen3_coder",
        None,
        (
            f"<tool_call>\n<function=flag>\n<parameter=rows>\n{json.dumps(OBJECTS)}\n</parameter>\n"
            "</function>\n</tool_call>"
        ),
        ReadAnswer("", "", (ReadCall("flag", f'{{"rows": {json.dumps(OBJECTS)}}}'),)),
    ),
    (
        "llama.cpp-21771",
        "qwen3_coder",
        None,
        f"<tool_call>\n<function=flag>\n<parameter=rows>\n{json.dumps(OBJECTS)[:20]}",
        ReadAnswer("", "", (ReadCall("flag", f'{{"rows": {json.dumps(OBJECTS)[:20]}', False),)),
    ),
]


@pytest.mark.parametrize(
    ("variant", "reasoning", "text", "expected"),
    [row[1:] for row in REPORTED],
    ids=[row[0] for row in REPORTED],
)
def test_reported_answers(
    variant: str, reasoning: str | None, text: str, expected: ReadAnswer
) -> None:
    assert read(variant, text, reasoning=reasoning) == expected


@pytest.mark.parametrize("variant", ["glm47", "hermes", "qwen3_coder", "kimi_k2"])
def test_vllm_50399_required_calls_may_end_with_the_first(variant: str) -> None:
    found = compose(None, CALLS[variant])
    model = SmallModel(tuple({each.literal for each in delimiters(found)}))
    tools = [{"function": {"name": "now"}}]
    matcher = model.matcher(call_grammar(found, model.ids, tools, "required"))
    token_ids = model.encoded(render(variant, [NOW]))
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


@pytest.mark.parametrize("prompt", ["", "<think>\n"])
def test_vllm_46149_a_forced_call_leaves_room_for_reasoning(prompt: str) -> None:
    """Its grammar had none, and refused the token that ends reasoning."""
    found = compose(REASONING["qwen3"], CALLS["hermes"])
    model = SmallModel(tuple({each.literal for each in delimiters(found)}))
    opened = Opened(is_start=not prompt, is_reasoning=bool(prompt))
    tools = [{"function": {"name": "now"}}]
    matcher = model.matcher(call_grammar(found, model.ids, tools, "required", opened=opened))
    begin = "" if prompt else "<think>"
    token_ids = model.encoded(f"{begin}so</think>\n\n{render('hermes', [NOW])}")
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


def test_vllm_50948_json_in_a_grammar_is_content() -> None:
    """Where the prompt has opened reasoning, the grammar begins behind its end."""
    text = '{"a": 1}'
    assert read("hermes", text, reasoning="qwen3").content == text
    answer = read("hermes", f"so</think>\n\n{text}", reasoning="qwen3", prompt="<think>\n")
    assert (answer.reasoning, answer.content) == ("so", text)
    found = compose(REASONING["qwen3"], None)
    ids = reasoning_ids(
        found, Spellings({"<think>": 7, "</think>": 8}), (), REASONS, is_start=False
    )
    assert ids is not None
    state = ReasoningState(ids, None, has_grammar=True)
    assert state.allowed_at(0) is Allowed.ANY
    state.take(5, 0)
    assert state.allowed_at(1) is Allowed.ANY
    state.take(8, 1)
    assert state.allowed_at(2) is Allowed.GRAMMAR


def num_lines_run(variant: str, text: str) -> int:
    """Lines of Python that reading the text takes."""
    known, cut = compiled(variant), pieces(text, RENDERINGS[variant].added_tokens)
    num = 0

    def count(_frame: object, event: str, _arg: object) -> object:
        nonlocal num
        num += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)  # type: ignore[arg-type]
    try:
        our_reader.events_of(known, variant, cut, TYPES, b"")
    finally:
        sys.settrace(before)
    return num


ENDLESS = {
    "pythonic": ("[write(path=1, ", "content=, a=, body=\n\n[now(x='y')]\n"),
    "hermes": ("", '<tool_call>\n{"name": "now", "arguments": {"a": [['),
    "qwen3_coder": ("<tool_call>\n<function=write>\n", "<parameter=path>\n</parameter"),
    "deepseek_v3": ("", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"),
    "harmony": ("", "<|channel|>commentary to=functions.now<|message|>{"),
}


@pytest.mark.parametrize("variant", ENDLESS)
def test_vllm_18304_no_text_is_read_again_and_again(variant: str) -> None:
    """Expressions that tried all divisions of a text took half an hour for one answer."""
    begin, part = ENDLESS[variant]
    once, twice = (num_lines_run(variant, begin + part * num) for num in (200, 400))
    assert twice < 2.2 * once


def test_vllm_50938_no_text_comes_before_reasoning_and_a_schema() -> None:
    """The first token is one of the schema's, or begins reasoning."""
    found = compose(REASONING["gemma4"], CALLS["gemma4"])
    model = SmallModel(tuple({each.literal for each in delimiters(found)}))
    place = compile_format(found, model.ids).reader(TYPES, AnswerOptions()).place
    ids = reasoning_ids(found, model.spellings(found), (), place, is_start=True)
    assert ids is not None
    assert (ids.begins, ids.ends) == ((model.ids["<|channel>"],), (model.ids["<channel|>"],))
    state = ReasoningState(ids, None, has_grammar=True)
    assert state.allowed_at(0) is Allowed.GRAMMAR_OR_REASONING
