"""Calls that are not what they seem, or break off: nothing is lost, and nothing is an error."""

from __future__ import annotations

import msgspec
import pytest
from tests.helpers.answers import (
    call,
    content,
    delimiter_tokens,
    divide,
    feed,
    read,
    reasoning,
    to_items,
)

from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages.answer import (
    MAX_CALLS,
    MAX_NAME_CHARS,
    AnswerEvent,
    AnswerOptions,
    EventKind,
)
from slipstream_worker.formats.answer_reader import MAX_BLANKS
from slipstream_worker.formats.compiled_format import compile_format

TOOLS: dict[str, dict[str, str]] = {"f": {}}
F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
F_0 = call(0, "f", '{"a": 1}')

HERMES = [
    # text that only looks like a call
    ("a <tool_call> b", [content("a <tool_call> b")]),
    ('a\n<tool_call>\n{"name": "f', [content('a\n<tool_call>\n{"name": "f')]),
    ('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
     [content('<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n')]),
    ('<tool_call>{"arguments": {}, "name": "g"}',
     [content('<tool_call>{"arguments": {}, "name": "g"}')]),
    ('<tool_call>{"name": ""}', [content('<tool_call>{"name": ""}')]),
    ('<tool_call>{"name": 1}', [content('<tool_call>{"name": 1}')]),
    ('<tool_call>{"arguments": {}}', [content('<tool_call>{"arguments": {}}')]),
    ('<tool_call>[]</tool_call>', [content("<tool_call>[]</tool_call>")]),
    ("x </tool_call>", [content("x </tool_call>")]),
    # a call behind such text
    (f"<tool_call>oh {F}", [content("<tool_call>oh"), *F_0]),
    (f'<tool_call>{{"name": {F}', [content('<tool_call>{"name": '), *F_0]),
    # a call that fails after its name
    ('<tool_call>{"name": "f", "arguments": {"a": 1 2}}</tool_call>\n!',
     [*call(0, "f", '{"a": 1 ', ends=False), content("2}}!")]),
    ('<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
     [*call(0, "f", '{"a": tru', ends=False), content("}}")]),
    ('<tool_call>{"name": "f", "arguments": [1]}</tool_call>\n' + F,
     [*call(0, "f", "", ends=False), content("[1]}"), *call(1, "f", '{"a": 1}')]),
    ('<tool_call>{"name": "f", "arguments": "x"}</tool_call>',
     [*call(0, "f", "", ends=False), content('"x"}')]),
    # a call that breaks off
    ('<tool_call>{"name": "f"', call(0, "f", "", ends=False)),
    ('<tool_call>{"name": "f", "arguments": {"a": "b', call(0, "f", '{"a": "b', ends=False)),
    ('<tool_call>{"name": "f", "arguments": {"a": -1', call(0, "f", '{"a": -1', ends=False)),
    ('<tool_call>{"name": "f", "arguments": {"a": "\\u00',
     call(0, "f", '{"a": "\\u00', ends=False)),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}', call(0, "f", '{"a": 1}', ends=False)),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}', F_0),
    ('<tool_call>{"name": "f", "arguments": {"a": 1}}\n</tool_', [*F_0, content("</tool_")]),
    # what is forgiven
    ('<tool_call>{"name": "f"}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', call(0, "f", "{}")),
    ('<tool_call>{"name": "f", "type": {"x": [1]}, "parameters": {}}</tool_call>',
     call(0, "f", "{}")),
    ('<tool_call>{"id": "c1", "name": "f"}</tool_call>', call(0, "f", "{}", "c1")),
    ('<tool_call>{"n\\u0061me": "\\u0066"}</tool_call>', call(0, "f", "{}")),
    (F.replace("</tool_call>", "") + "\n" + F, [*F_0, *call(1, "f", '{"a": 1}')]),
    # reasoning
    ("<think>a</think>b</think>c<think>", [reasoning("a"), content("b</think>c<think>")]),
    ("x <think>a</think>", [content("x <think>a</think>")]),
    ("<think><think>\n a", [reasoning("a")]),
    ("<think>a <think>b", [reasoning("a <think>b")]),
    ("</think>\n\nb", [content("b")]),
    (f"<think>a\n{F}<think>b</think>", [reasoning("a"), *F_0, reasoning("b")]),
    ("<think>a <tool_call> b</think>", [reasoning("a <tool_call> b")]),
    ("<think>a\n", [reasoning("a\n")]),
    # blanks
    (f" \n{F}\n\n", F_0),
    (f"a \n\n{F}\n b \n", [content("a"), *F_0, content("b \n")]),
    ("\n\n", [content("\n\n")]),
]  # fmt: skip


def check(
    name: str,
    text: str,
    expected: list[AnswerEvent],
    with_tokens: bool,
    options: AnswerOptions = AnswerOptions(),  # noqa: B008 - frozen
) -> None:
    answer_format = find_format(name)
    tokens = delimiter_tokens(answer_format) if with_tokens else {}
    compiled = compile_format(answer_format, tokens)
    items = to_items(text, tokens)
    assert read(compiled, items, TOOLS, options) == expected
    assert read(compiled, divide(items, [1]), TOOLS, options) == expected


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(("text", "expected"), HERMES)
def test_hermes(text: str, expected: list[AnswerEvent], with_tokens: bool) -> None:
    if with_tokens and text.endswith("</tool_"):
        pytest.skip("half a token")
    check("qwen3+hermes", text, expected, with_tokens)


@pytest.mark.parametrize("with_tokens", [False, True])
def test_without_calls_their_markup_is_content(with_tokens: bool) -> None:
    options = AnswerOptions(tool_choice="none")
    text = f"<think>\na\n</think>\n\nb {F} "
    check("qwen3+hermes", text, [reasoning("a"), content(f"b {F} ")], with_tokens, options)


def test_only_the_token_is_a_delimiter_where_there_is_one() -> None:
    tokens = {"<tool_call>": 1, "</tool_call>": 2, "<think>": 3, "</think>": 4}
    compiled = compile_format(find_format("qwen3+hermes"), tokens)
    text = f"<think>a</think>{F}"
    assert read(compiled, [text]) == [content(text)]


KIMI = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0{}<|tool_calls_section_end|>"
KIMI_TWICE = KIMI.format(
    '<|tool_call_argument_begin|>{"a": x}<|tool_call_end|><|tool_call_begin|>functions.f:1'
    '<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
)
OTHERS = [
    ("llama3_json", '{"a": 1} and more', [content('{"a": 1} and more')]),
    ("llama3_json", '{"name": "Bob", "age": 5}', [content('{"name": "Bob", "age": 5}')]),
    ("llama3_json", 'See {"name": "f", "parameters": {}}',
     [content('See {"name": "f", "parameters": {}}')]),
    ("llama3_json", ' {"name": "f", "parameters": {}}; and',
     [*call(0, "f", "{}"), content("; and")]),
    ("llama3_json", '<|python_tag|>print("x")', [content('<|python_tag|>print("x")')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', F_0),
    ("mistral", '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', F_0),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]\n', F_0),
    ("mistral", '[TOOL_CALLS] [{"id": "abcdefghi", "name": "f"}] x',
     [*call(0, "f", "{}", "abcdefghi"), content("x")]),
    ("mistral", "[TOOL_CALLS] []", [content("[TOOL_CALLS] []")]),
    ("mistral", "[TOOL_CALLS]g[ARGS]{}", [content("[TOOL_CALLS]g[ARGS]{}")]),
    ("mistral", "[TOOL_CALLS]f and so on", [content("[TOOL_CALLS]f and so on")]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}, 5] x',
     [*F_0, content(", 5] x")]),
    ("granite", 'a <|tool_call|> [ {"name": "f", "arguments": {"a": 1}} ]', [content("a"), *F_0]),
    ("kimi_k2", KIMI.format("<|tool_call_argument_begin|><|tool_call_end|>"),
     call(0, "f", "{}", "functions.f:0")),
    ("kimi_k2", "<|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>",
     call(0, "f", "{}", "f")),
    ("kimi_k2", KIMI_TWICE + "x",
     [*call(0, "f", '{"a": ', "functions.f:0", ends=False), content("x}"),
      *call(1, "f", '{"a": 1}', "functions.f:1"), content("x")]),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_calls_section_end|>",
     [content("<|tool_calls_section_begin|><|tool_calls_section_end|>")]),
]  # fmt: skip


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(("name", "text", "expected"), OTHERS)
def test_other_formats(
    name: str, text: str, expected: list[AnswerEvent], with_tokens: bool
) -> None:
    check(f"qwen3+{name}", text, expected, with_tokens)


GRANITE = "Here is my thought process: a b Here is my respect. Here's my response: c"
REASONING = [
    ("granite+none", GRANITE, [reasoning("a b Here is my respect."), content("c")]),
    ("granite+none", "Here is my", [content("Here is my")]),
    ("mistral+none", "[THINK]a[/THINK]b", [reasoning("a"), content("b")]),
    ("deepseek_r1+none", "<think>\n</think>\n\nb", [content("b")]),
    ("deepseek_r1+hermes", f"<think>{F}</think>b", [reasoning(F), content("b")]),
]


@pytest.mark.parametrize("with_tokens", [False, True])
@pytest.mark.parametrize(("name", "text", "expected"), REASONING)
def test_reasoning(name: str, text: str, expected: list[AnswerEvent], with_tokens: bool) -> None:
    check(name, text, expected, with_tokens)


def test_names_are_bounded() -> None:
    compiled = compile_format(find_format("none+hermes"), {})
    name = "n" * MAX_NAME_CHARS
    text = f'<tool_call>{{"name": "{name}"}}</tool_call>'
    assert read(compiled, [text]) == call(0, name, "{}")
    text = text.replace("n" * 9, "n" * 10, 1)
    assert read(compiled, [text]) == read(compiled, list(text)) == [content(text)]


def test_the_number_of_calls_is_bounded() -> None:
    compiled = compile_format(find_format("none+hermes"), {})
    events = read(compiled, [F] * (MAX_CALLS + 1))
    assert [event.kind for event in events].count(EventKind.CALL_ENDS) == MAX_CALLS
    assert events[-1] == content(F)


def test_blanks_beside_a_delimiter_are_bounded() -> None:
    compiled = compile_format(find_format("none+hermes"), {})
    blanks = "\n" * (MAX_BLANKS * 2 + 5)
    for items in ([f"a{blanks}{F}"], list(f"a{blanks}{F}")):
        assert read(compiled, items) == [content("a" + blanks[: MAX_BLANKS * 2]), *F_0]


def test_what_is_decided_is_given_at_once() -> None:
    compiled = compile_format(find_format("qwen3+hermes"), {})
    reader = compiled.reader(TOOLS, AnswerOptions())
    steps = ["a", " b", "\n", "<tool", '_call>{"name": "', 'f"', ', "arguments": {"a', '": ', "12",
             ', "b": "x', "\\", "n", '"', "}", "}", "</tool_call>"]  # fmt: skip
    given = [
        "".join(f"{piece.event.kind.name[:6]}:{piece.event.text} " for piece in feed(reader, step))
        for step in steps
    ]
    assert given == [
        "CONTEN:a ", "CONTEN: b ", "", "", "", "CALL_B:f ",  'CALL_A:{"a ', 'CALL_A:":  ', "",
        'CALL_A:12, "b": "x ', "", "CALL_A:\\n ", 'CALL_A:" ', "CALL_A:} ", "CALL_E: ", "",
    ]  # fmt: skip
    assert reader.finish() == []


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (
            '{"id": "\\ud800", "name": "f", "arguments": {}}',
            call(0, "f", "{}", "\N{REPLACEMENT CHARACTER}"),
        ),
        ('{"\\ud800": 1, "name": "f", "arguments": {}}', call(0, "f", "{}")),
        (
            '{"name": "f", "arguments": "{\\"a\\": \\"\\ud800x\\"}"}',
            call(0, "f", '{"a": "\N{REPLACEMENT CHARACTER}x"}'),
        ),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', call(0, "f", '{"a": "\\ufffd"}')),
        (
            '{"name": "f\\udfff", "arguments": {}}',
            call(0, "f\N{REPLACEMENT CHARACTER}", "{}"),
        ),
        ('{"name": "f\\ud83d\\ude00", "arguments": {}}', call(0, "f😀", "{}")),
    ],
)
def test_half_of_a_pair_is_never_written_bare(written: str, expected: list[AnswerEvent]) -> None:
    compiled = compile_format(find_format("none+hermes"), {})
    events = read(compiled, [f"<tool_call>{written}</tool_call>"])
    assert events == expected
    msgspec.msgpack.encode(events)
