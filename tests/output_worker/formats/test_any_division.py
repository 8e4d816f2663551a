"""What holds for every format and every answer, however it is divided."""

# ruff: noqa: RUF001 - DeepSeek's delimiters have full-width bars

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.answers import Item, delimiter_tokens, divide, feed, join, read, to_items

from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.table import CALLS, WHOLE, compose, find_format
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format
from slipstream_worker.formats.scanners.scanner import BLANKS, MAX_HELD_CHARS

REASONING = find_format("qwen3+none")
FORMATS = {
    **{name: compose(REASONING.reasoning, calls) for name, calls in CALLS.items()},
    **WHOLE,
}
ARGUMENTS = '{"a": [1, -2.5e3, null], "b": "x\\n{"}'
CALL = f'{{"name": "f", "arguments": {ARGUMENTS}}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
PYTHON_CALL = "f(a=[1, -2.5e3, None], b='x\\\\n{')"
TAGGED = "<parameter=a>\n[1, -2.5e3, null]\n</parameter>\n<parameter=b>\nx\\n{{\n</parameter>\n"
INVOKE = (
    '<{0}invoke name="f">\n<{0}parameter name="a">[1, -2.5e3, null]</{0}parameter>\n'
    '<{0}parameter name="b">x\\n{{</{0}parameter>\n</{0}invoke>'
)
PAIRS = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>[1, -2.5e3, null]</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x\\n{</arg_value>\n</tool_call>"
)
WRITTEN = {
    "deepseek_v3": DEEPSEEK.format(f"function<｜tool▁sep｜>f\n```json\n{ARGUMENTS}\n```"),
    "deepseek_v31": DEEPSEEK.format(f"f<｜tool▁sep｜>{ARGUMENTS}"),
    "granite": f"<|tool_call|>[{CALL}, {CALL}]",
    "granite-20b-fc": f"<function_call> {CALL}",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    f"{ARGUMENTS}<|call|><|start|>assistant<|channel|>analysis<|message|>x<|end|>",
    "hermes": f"<tool_call>\n{CALL}\n</tool_call>",
    "jamba": f"<tool_calls>[{CALL}]</tool_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "llama3_json": f"{CALL}; {CALL}",
    "longcat": f"<longcat_tool_call>\n{CALL}\n</longcat_tool_call>",
    "mistral": f"[TOOL_CALLS] [{CALL}][TOOL_CALLS]f[CALL_ID]a1[ARGS]{ARGUMENTS}",
    "phi4_mini_json": f"functools[{CALL}]",
    "cohere_command3": '<|START_ACTION|>[{"tool_name": "f", "parameters": '
    f"{ARGUMENTS}}}]<|END_ACTION|>",
    "deepseek_v32": f"<｜DSML｜function_calls>{INVOKE.format('｜DSML｜')}</｜DSML｜function_calls>",
    "deepseek_v4": f"<｜DSML｜tool_calls>{INVOKE.format('｜DSML｜')}</｜DSML｜tool_calls>",
    "functiongemma": "<start_function_call>call:f{a:[1,-2.5e3,null],b:<escape>x\\n{<escape>}"
    "<end_function_call>",
    "gemma4": '<|tool_call>call:f{a:[1,-2.5e3,null],b:<|"|>x\\n{<|"|>}<tool_call|>',
    "glm45": PAIRS,
    "glm47": PAIRS.replace("\n<", "<"),
    "hunyuan_a13b": f"<tool_calls>[{CALL}, {CALL}]</tool_calls>",
    "lfm2": f"<|tool_call_start|>[{PYTHON_CALL}, {CALL}]<|tool_call_end|>",
    "llama4_pythonic": f"<|python_start|>[{PYTHON_CALL}]<|python_end|>",
    "minimax": f"<tool_calls>\n{CALL}\n{CALL}\n</tool_calls>",
    "minimax_m2": f"<minimax:tool_call>\n{INVOKE.format('')}\n</minimax:tool_call>",
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" '
    'type="array"<|sep|>[1, -2.5e3, null]<|close|>argument<|sep|><|open|>argument key="b" '
    'type="string"<|sep|>x\\n{<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
    "minimax_m3": '{0}<tool_call>\n{0}<invoke name="f">\n{0}<a>{0}<item>1{0}</item>{0}<item>-2.5e3'
    "{0}</item>{0}<item>null{0}</item>{0}</a>\n{0}<b>x\\n{{{0}</b>\n{0}</invoke>\n{0}"
    "</tool_call>".format("]<]minimax[>["),
    "nemotron_json": f"<TOOLCALL>[{CALL}]</TOOLCALL>",
    "olmo3": f"<function_calls>{PYTHON_CALL}\n{PYTHON_CALL}</function_calls>",
    "pythonic": f"[{PYTHON_CALL}, {PYTHON_CALL}]",
    "qwen3_coder": f"<tool_call>\n<function=f>\n{TAGGED}</function>\n</tool_call>",
    "seed_oss": f"<seed:tool_call>\n<function=f>\n{TAGGED}</function>\n</seed:tool_call>",
}
TOOLS = {"f": {"a": "array", "b": "string"}, "g": {}}
JUNK = ["x", " ", "\n", "{", "}", '"', "[", "]", ",", ";", ":", "\\", "<", "f", "12", "</", "``"]
JUNK += [
    "\\ud800",
    '"\\udfff"',
    '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800\\"}"}',
    '"id": "\\ud800"',
]


def fragments(answer_format: AnswerFormat, name: str) -> list[str]:
    literals = sorted({part.literal for part in delimiters(answer_format)})
    written = WRITTEN.get(name, "")
    cuts = [written[pos : pos + 7] for pos in range(0, len(written), 7)]
    return [*literals, *(text[:-1] for text in literals), written, *filter(None, cuts), *JUNK]


CASES: dict[tuple[str, bool], tuple[CompiledFormat, dict[str, int], list[str]]] = {}
for _name, _format in FORMATS.items():
    for _with_tokens in (False, True):
        _tokens = delimiter_tokens(_format) if _with_tokens else {}
        _compiled = compile_format(_format, _tokens)
        CASES[_name, _with_tokens] = _compiled, _tokens, fragments(_format, _name)

every_format = pytest.mark.parametrize("case", CASES, ids=str)
sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)
options = st.sampled_from([AnswerOptions(), AnswerOptions(tool_choice="none")])
tools = st.sampled_from([None, TOOLS, {}])


def draw_items(data: st.DataObject, case: tuple[str, bool]) -> list[Item]:
    _, tokens, parts = CASES[case]
    written = data.draw(st.lists(st.sampled_from(parts), max_size=9))
    text = "".join(written)
    some = {key: value for key, value in tokens.items() if data.draw(st.integers(0, 7))}
    return to_items(text, some)


def spell(items: list[Item], tokens: dict[str, int]) -> str:
    literals = {value: key for key, value in tokens.items()}
    return "".join(item if isinstance(item, str) else literals[item] for item in items)


@every_format
@settings(max_examples=25)
@given(data=st.data(), sizes=sizes, options=options, tools=tools)
def test_any_division_gives_the_same_events(
    case: tuple[str, bool],
    data: st.DataObject,
    sizes: list[int],
    options: AnswerOptions,
    tools: Any,
) -> None:
    compiled, _, _ = CASES[case]
    items = draw_items(data, case)
    whole = read(compiled, items, tools, options)
    assert read(compiled, divide(items, sizes), tools, options) == whole
    assert read(compiled, divide(items, [1]), tools, options) == whole


@every_format
@settings(max_examples=25)
@given(data=st.data(), sizes=sizes, tools=tools)
def test_what_was_given_stays_and_is_in_order(
    case: tuple[str, bool], data: st.DataObject, sizes: list[int], tools: Any
) -> None:
    compiled, tokens, _ = CASES[case]
    items = draw_items(data, case)
    text = spell(items, tokens)
    reader = compiled.reader(tools, AnswerOptions())
    decided = 0
    events: list[AnswerEvent] = []
    for item in [*divide(items, sizes), None]:
        pieces = reader.finish() if item is None else feed(reader, item)
        for piece in pieces:
            assert decided <= piece.start <= piece.end <= reader.num_decided
            decided = piece.end
            if piece.event.kind in (EventKind.CONTENT, EventKind.REASONING):
                assert piece.event.text == text[piece.start : piece.end]
            events.append(piece.event)
        assert decided <= reader.num_decided <= reader.num_fed
    assert reader.num_decided == len(text)
    check_calls(events)


def check_calls(events: list[AnswerEvent]) -> None:
    """Calls are numbered in order; each has its name first, and valid JSON where it has an end."""
    msgspec.msgpack.encode(events)
    arguments: dict[int, str] = {}
    open_call = None
    for event in join(events):
        match event.kind:
            case EventKind.CALL_BEGINS:
                assert event.text
                assert event.call == len(arguments)
                open_call = event.call
                arguments[event.call] = ""
            case EventKind.CALL_ARGUMENTS:
                assert event.call == open_call
                arguments[event.call] += event.text
            case EventKind.CALL_ENDS:
                assert event.call == open_call
                assert isinstance(json.loads(arguments[event.call]), dict)
                open_call = None
            case _:
                open_call = None


@every_format
@settings(max_examples=20)
@given(data=st.data(), sizes=sizes)
def test_what_is_not_given_is_blank_or_markup(
    case: tuple[str, bool], data: st.DataObject, sizes: list[int]
) -> None:
    """Without calls, every character is given but for delimiters and the blanks beside them."""
    compiled, tokens, _ = CASES[case]
    items = draw_items(data, case)
    text = spell(items, tokens)
    reader = compiled.reader(None, AnswerOptions(tool_choice="none"))
    pieces = [piece for item in divide(items, sizes) for piece in feed(reader, item)]
    pieces += reader.finish()
    literals = sorted({part.literal for part in delimiters(FORMATS[case[0]])}, key=len)
    end = 0
    for start, stop in [*((piece.start, piece.end) for piece in pieces), (len(text), len(text))]:
        gap = text[end:start].strip(BLANKS)
        if case[0] not in WHOLE:
            for literal in reversed(literals):
                gap = gap.replace(literal, "")
            assert not gap.strip(BLANKS)
        end = stop


@every_format
@settings(max_examples=20)
@given(data=st.data(), sizes=sizes, options=options, tools=tools)
def test_another_reader_goes_on_from_a_state(
    case: tuple[str, bool],
    data: st.DataObject,
    sizes: list[int],
    options: AnswerOptions,
    tools: Any,
) -> None:
    compiled, _, _ = CASES[case]
    items = divide(draw_items(data, case), sizes)
    whole = compiled.reader(tools, options)
    pieces = [*(feed(whole, item) for item in items), whole.finish()]
    reader = compiled.reader(tools, options)
    for number, item in enumerate(items):
        feed(reader, item)
        if reader.num_decided == reader.num_fed:
            other = compiled.reader(tools, options, reader.state)
            assert (other.kind, other.mode) == (reader.kind, reader.mode)
            assert other.is_reasoning == reader.is_reasoning
            rest = read(compiled, items[number + 1 :], tools, options, reader.state)
            assert rest == join(piece.event for part in pieces[number + 1 :] for piece in part)
        else:
            assert not reader.is_settled


@every_format
@settings(max_examples=25)
@given(data=st.data(), sizes=sizes, options=options, text=st.text('abc <[{"\\\n:,;}', max_size=6))
def test_harmless_text_is_one_event_and_changes_nothing(
    case: tuple[str, bool],
    data: st.DataObject,
    sizes: list[int],
    options: AnswerOptions,
    text: str,
) -> None:
    compiled, _, parts = CASES[case]
    items = divide(draw_items(data, case), sizes)
    text += data.draw(st.sampled_from(["", *parts]))
    reader = compiled.reader(None, options)
    for item in items:
        feed(reader, item)
        if not reader.is_settled:
            assert reader.kind == 0
            assert not reader.is_harmless(text)
            continue
        state = reader.state
        mode, kind = reader.mode, reader.kind
        harmless = reader.is_harmless(text)
        if text and reader.hazard_chars.isdisjoint(text):
            assert harmless
        other = compiled.reader(None, options, state)
        pieces = other.feed(text)
        is_whole = [piece.event.text for piece in pieces] == [text]
        if harmless:
            assert is_whole
            event = pieces[0].event
            assert event.kind | event.call << 8 == kind
            assert (other.state, other.mode) == (state, mode)
            assert reader.is_settled


def count_calls(compiled: CompiledFormat, items: list[Item]) -> int:
    """How often functions are called, those of C included, while the items are read."""
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    reader = compiled.reader(None, AnswerOptions())
    sys.setprofile(profile)
    try:
        for item in items:
            feed(reader, item)
    finally:
        sys.setprofile(None)
    return count


@every_format
def test_the_cost_is_linear(case: tuple[str, bool]) -> None:
    compiled, tokens, _ = CASES[case]
    literals = [part.literal for part in delimiters(FORMATS[case[0]])]
    parts = [WRITTEN.get(case[0], ""), *literals, literals[0][:-1], "\n", "{", '{"name": "f", ']
    for part in dict.fromkeys(parts):
        once = divide(to_items(part * 20, tokens), [3])
        twice = divide(to_items(part * 40, tokens), [3])
        assert count_calls(compiled, twice) < 2.3 * count_calls(compiled, once) + 400


@every_format
def test_an_argument_of_a_megabyte_is_read_in_few_steps(case: tuple[str, bool]) -> None:
    compiled, tokens, _ = CASES[case]
    written = WRITTEN.get(case[0], "")
    start = written.find("x\\")
    if start < 0:
        pytest.skip("the arguments are typed")
    parts = [*to_items(written[:start], tokens), *["abcdefghij"] * 100]
    steps = count_calls(compiled, parts)
    more = count_calls(compiled, [*parts, *["abcdefghij"] * 900])
    assert more - steps < 900 * 25


def test_the_decoded_state_is_small() -> None:
    compiled, tokens, _ = CASES["hermes", True]
    reader = compiled.reader(None, AnswerOptions())
    head = '<tool_call>{"name": "f", "arguments": {"a":'
    for item in to_items(head + "[" * 60 + '"x', tokens):
        feed(reader, item)
    assert reader.is_settled
    assert len(reader.state) < 100
    assert isinstance(msgspec.msgpack.decode(reader.state), list)


X = "<parameter=a>\nx\n</parameter>\n"
A_CALL = "<tool_call>\n<function=f>\n</function>\n</tool_call>"
BOUNDS = [
    ("qwen3_coder", 1024, "<tool_call>\n<function=f>\n<parameter={}", A_CALL),
    ("qwen3_coder", 256, "<tool_call>\n<function={}", A_CALL),
    ("qwen3_coder", 256, "<tool_call>\n<function={}", ">\n</function>\n</tool_call>"),
    ("qwen3_coder", 1024, "<tool_call>\n<function=f>\n<parameter={}", ">1</parameter>"),
    ("qwen3_coder", 1024, f"<tool_call>\n<function=f>\n{X}<parameter={{}}", "</tool_call>ok"),
    ("qwen3_coder", 4096, "<tool_call>\n<function=f>\n<parameter=b>{}", "</parameter>\n"),
    ("minimax_m2", 1024, '<minimax:tool_call><invoke name="f"><parameter name="{}', '">1<'),
    ("minimax_m2", 1024, '<minimax:tool_call><invoke name="f"><parameter name="a" {}', ">1<"),
    ("glm45", 256, "<tool_call>{}", "\n<arg_key>a</arg_key>"),
    ("glm45", 1024, "<tool_call>f\n<arg_key>{}", "</arg_key>\n<arg_value>1</arg_value>"),
    ("glm45", 1024, "<tool_call>f\n<arg_key>{}", "</tool_call>ok"),
    ("gemma4", 1024, '<|tool_call>call:f{{a:<|"|>x<|"|>,b:{}', "<tool_call|>ok"),
    ("gemma4", 1024, "<|tool_call>call:f{{a:1,{}", "<tool_call|>ok"),
    ("gemma4", 1024, "<|tool_call>call:f{{a:1,{}", ":2}<tool_call|>ok"),
    ("olmo3", 1024, "<function_calls>f(a=1, b={}", ")</function_calls>ok"),
    ("olmo3", 1024, "<function_calls>f(a=1, {}", "</function_calls>ok"),
    ("pythonic", 1024, "[f(a=1, {}", "=1)]"),
    ("hermes", 1024, '<tool_call>{{"{}', '": <tool_call>'),
    ("hermes", 1024, '<tool_call>{{"name": "f", "arguments": {{"a": {}', "}}</tool_call>"),
    ("hermes", 1538, '<tool_call>{{"name": "{}', '", "arguments": {}}</tool_call>'),
    ("mistral", 256, "[TOOL_CALLS]{}", '[TOOL_CALLS]f{"a":1}'),
    ("kimi_k2", 256, "<|tool_call_begin|>functions.{}", "<|tool_call_argument_begin|>{}"),
    ("harmony", 1024, "<|channel|>{}", "<|message|>x"),
]  # fmt: skip


@pytest.mark.parametrize("filler", "A1")
@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize("bound", BOUNDS, ids=str)
def test_any_division_gives_the_same_events_at_a_bound(
    bound: tuple[str, int, str, str], with_tokens: bool, filler: str
) -> None:
    name, length, head, tail = bound
    compiled, tokens, _ = CASES[name, with_tokens]
    for more in (-12, -9, -2, -1, 0, 1, 2):
        num_chars = length + more
        items = to_items(head.format(filler * num_chars) + tail + CALL, tokens)
        whole = read(compiled, items, {"f": {"b": "integer"}})
        for size in (1, 100):
            assert read(compiled, divide(items, [size]), {"f": {"b": "integer"}}) == whole


HELD = [
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=c>\n[", " "),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=c>\n[", "1,"),
    ("glm45", "<tool_call>f\n<arg_key>c</arg_key>\n<arg_value>{", '"a": "b",'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{', '\\"a\\":1,'),
    ("hermes", '<tool_call>{"name": "f", "other": [', "1,"),
    ("hermes", '<tool_call>{"name": "f", "other": "', "x"),
    ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    ("hermes", '<tool_call>{"other": "', "x"),
]


@pytest.mark.parametrize(("name", "head", "filler"), HELD)
def test_what_is_held_is_bounded(name: str, head: str, filler: str) -> None:
    compiled, _, _ = CASES[name, False]
    text = head + filler * (2**19 // len(filler))
    given = []
    for size in (4096, 8191):
        reader = compiled.reader({"f": {"c": "array"}}, AnswerOptions())
        pieces = []
        for item in divide([text], [size]):
            pieces += feed(reader, item)
            assert reader.num_fed - reader.num_decided <= MAX_HELD_CHARS + size
        pieces += reader.finish()
        assert max(len(piece.event.text) for piece in pieces) <= 2 * MAX_HELD_CHARS
        given.append(join(piece.event for piece in pieces))
    assert given[0] == given[1]
