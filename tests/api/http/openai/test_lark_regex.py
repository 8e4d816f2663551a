"""Lark grammars of custom tools, as patterns that calls keep to."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.answers import read
from tests.helpers.grammar_walk import SmallModel, compiled_for, model_of, walk

from slipstream.http.openai.custom_tools import InputReader, function_of_custom
from slipstream.http.openai.lark_regex import (
    _COMMON,
    MAX_REGEX_CHARS,
    NotRegularError,
    regex_of_lark,
)
from slipstream_core.grammar.embedded_schemas import with_schemas
from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters
from slipstream_ipc.formats.table import CALLS, WHOLE, forced_format
from slipstream_ipc.messages.answer import EventKind
from slipstream_lab.formats.rendering import RENDERINGS, SampleCall, format_of, render
from slipstream_worker.formats.call_grammar import call_grammar, free_call_grammar
from slipstream_worker.formats.property_types import property_types

# of the patches that Codex's apply_patch takes, with what its grammar is written in
APPLY_PATCH = """\
// a patch is of whole files, or of lines in them
start: "*** Begin Patch" LF file+ "*** End Patch" [LF]

file: "*** Add File: " path ("+" text) + -> added
    | "*** Delete File: " path -> deleted
    | "*** Update File: " path move? change?

move: "*** Move to: " path
change: (place | ("+" | "-" | " ") text)+ end_of_file?
place: ("@@" | "@@ " /(.+)/) LF
end_of_file: "*** End of File" LF
path: /(.+)/ LF
text: /(.*)/ LF

%import common.LF
"""
ADDED = "*** Begin Patch\n*** Add File: a/b.py\n+print(\"\\n\\t\", 'é😀')\n+\n*** End Patch\n"
CHANGED = (
    "*** Begin Patch\n*** Delete File: x\n*** Update File: y z\n*** Move to: w\n@@ def f():\n"
    "-    return 1\n+\treturn 2\n \n*** End of File\n*** End Patch"
)
PATCHES = (ADDED, CHANGED)
NO_PATCHES = (
    "",
    "*** Begin Patch\n*** End Patch",
    ADDED.replace("+print", "print"),
    ADDED.replace("*** Begin Patch\n", ""),
    ADDED + "\n",
    CHANGED.replace("Update", "Change"),
    CHANGED.replace("\n*** End of File", ""),
)
_CLOSINGS = ("\n</parameter>", "</parameter>", "<|close|>argument<|sep|>")
ENDS = ("\n*** End Patch", "\n@@\n+a\n*** End Patch", "\n+a\n*** End Patch")
CLOSERS = (
    *ENDS,
    *(f"{end}{closing}" for end in ENDS for closing in _CLOSINGS),
    "\\n*** End Patch",
    "\\n@@\\n+a\\n*** End Patch",
    "\\n+a\\n*** End Patch",
    "\\n",
)
TOOL = {
    "type": "custom",
    "name": "apply_patch",
    "format": {"type": "grammar", "syntax": "lark", "definition": APPLY_PATCH},
}


def matches(definition: str, text: str) -> bool:
    return re.fullmatch(regex_of_lark(definition), text) is not None


def allows(grammar: str, text: str) -> bool:
    """What the library says of it, byte by byte."""
    tokens = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokens, llguidance.LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokens.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("text", [*PATCHES, *NO_PATCHES[:-1]])
def test_apply_patch(text: str) -> None:
    assert matches(APPLY_PATCH, text) == allows(APPLY_PATCH, text) == (text in PATCHES)


FUNCTION = function_of_custom(TOOL, "tools[0]")
TOOLS = [
    {"type": "function", "function": FUNCTION},
    {"type": "function", "function": {"name": "now", "parameters": {"properties": {}}}},
]
TYPES = {each["function"]["name"]: property_types(each["function"]) for each in TOOLS}  # type: ignore[arg-type]


def as_compiled(grammar: str) -> str:
    """A worker's grammar as the core gives it to the library, which takes all of it."""
    found, left_out = with_schemas(grammar, lambda _schema: "")
    assert not left_out
    return found


def patches_of(found: AnswerFormat, model: SmallModel, token_ids: list[int]) -> list[str]:
    """The inputs of the calls of `apply_patch` in an answer."""
    events = read(compiled_for(found, model), model.items(token_ids), TYPES)
    names = {each.call: each.text for each in events if each.kind == EventKind.CALL_BEGINS}
    patches = []
    for number in [call for call, name in names.items() if name == "apply_patch"]:
        reader = InputReader()
        pieces = [
            reader.read(each.text)
            for each in events
            if each.kind == EventKind.CALL_ARGUMENTS and each.call == number
        ]
        patches.append("".join(pieces) + reader.finish())
    return patches


@pytest.mark.parametrize("name", [*sorted(CALLS), "json"])
def test_a_forced_call_is_in_the_grammar_and_is_read_back(name: str) -> None:
    """`json` is the format of a model whose own is not known."""
    found, model = forced_format(None), SmallModel(())
    if name in CALLS:
        found, model = model_of(name, "", True)
    assert found is not None
    grammar = as_compiled(call_grammar(found, model.ids, TOOLS, "function:apply_patch"))
    for seed in range(30 if name in ("hermes", "json", "qwen3_coder", "glm45") else 5):
        [patch] = patches_of(found, model, walk(model, grammar, seed, closers=CLOSERS))
        assert matches(APPLY_PATCH, patch), patch


@pytest.mark.parametrize("name", sorted(CALLS))
def test_a_free_call_is_in_the_grammar_and_is_read_back(name: str) -> None:
    found, model = model_of(name, "", True)
    free, triggers = free_call_grammar(found, model.spellings(found), TOOLS, is_parallel=True)
    assert free
    if not triggers:  # of the whole answer, where a walk hardly ever begins a call
        return
    grammar, num_patches = as_compiled(free), 0
    for seed in range(10):
        taken = walk(model, grammar, seed, closers=CLOSERS, is_short=True)
        for patch in patches_of(found, model, taken):
            num_patches += 1
            assert matches(APPLY_PATCH, patch), patch
    assert num_patches


def calls_of(name: str, patch: str) -> list[str]:
    """A call as templates of this format show it to the model; Python's in the other quotes, too,
    which are what a pattern's string has.
    """
    call = SampleCall("apply_patch", {"input": patch})
    found = [render(each, (call,)) for each in RENDERINGS if format_of(each) == name]
    python, quoted = repr(patch), json.dumps(patch, ensure_ascii=False)
    return [*found, *(each.replace(python, quoted) for each in found if f"({INPUT}=" in each)]


INPUT = "input"


@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"cohere_command3"}))  # it numbers its calls
def test_calls_keep_to_the_grammar_in_every_format(name: str, has_tokens: bool) -> None:
    found, model = model_of(name, "", has_tokens)
    free, _ = free_call_grammar(found, model.spellings(found), TOOLS, is_parallel=True)
    grammars = [free] if free else []  # of some there is none without their tokens
    assert grammars or not has_tokens
    for grammar in (*grammars, call_grammar(found, model.ids, TOOLS, "required")):
        for patch in (*PATCHES, *NO_PATCHES):
            matched = []
            for text in calls_of(name, patch):
                matcher, token_ids = model.matcher(as_compiled(grammar)), model.encoded(text)
                num_taken = matcher.try_consume_tokens(token_ids)
                matched.append(num_taken == len(token_ids) and matcher.is_accepting())
            assert any(matched) is matches(APPLY_PATCH, patch), patch


@pytest.mark.parametrize("patch", [*PATCHES, *NO_PATCHES])
def test_calls_in_channels_keep_to_the_grammar(patch: str) -> None:
    found = WHOLE["harmony"]
    model = SmallModel(tuple(sorted({each.literal for each in delimiters(found)})))
    grammar, _ = free_call_grammar(found, model.spellings(found), TOOLS, is_parallel=True)
    start = "<|start|>assistant"
    text = "<|channel|>final<|message|>*** Begin Patch<|end|>"
    header = " to=functions.apply_patch<|channel|>commentary <|constrain|>json<|message|>"
    arguments = json.dumps({"input": patch}, ensure_ascii=False)
    token_ids = model.encoded(f"{start}{text}{start}{header}{arguments}")
    matcher = model.matcher(as_compiled(grammar))
    num_taken = matcher.try_consume_tokens(token_ids)
    is_allowed = num_taken == len(token_ids) and matcher.is_accepting()
    assert is_allowed is matches(APPLY_PATCH, patch)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "gemma4", "pythonic"])
def test_calls_of_other_functions_take_anything(name: str) -> None:
    found, model = model_of(name, "", True)
    [written] = [each for each in RENDERINGS if format_of(each) == name and ":" not in each][:1]
    token_ids = model.encoded(render(written, (SampleCall("now", {"a": 7}),)))
    free, _ = free_call_grammar(found, model.spellings(found), TOOLS, is_parallel=True)
    assert model.matcher(as_compiled(free)).try_consume_tokens(token_ids) == len(token_ids)


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_grammar_with_a_delimiter_is_named_and_the_call_is_free(name: str) -> None:
    """Fixed text would be the token. Only what else asks for a grammar has one."""
    grammar = {"type": "grammar", "syntax": "lark", "definition": 'start: "<tool_call>" /.+/'}
    custom = function_of_custom({"name": "f", "format": grammar}, "tools[0]")
    found, model = model_of(name, "", True)
    tools: list[Any] = [{"function": custom}]
    spellings = model.spellings(found)
    assert free_call_grammar(found, spellings, tools, is_parallel=True) == ("", ())
    path = "tools.f.parameters.properties.input.pattern"
    for written in (
        free_call_grammar(found, spellings, tools, is_parallel=False)[0],
        call_grammar(found, model.ids, tools, "required"),
    ):
        text, left_out = with_schemas(written, lambda _schema: "")
        assert left_out == (path,)
        assert model.matcher(text)


@pytest.mark.parametrize("text", [*PATCHES, *NO_PATCHES])
def test_a_pattern_is_enforced_within_the_string(text: str) -> None:
    schema = function_of_custom(TOOL, "tools[0]")["parameters"]
    whole = {**schema, "x-guidance": {"whitespace_pattern": " "}}
    written = json.dumps({"input": text}, ensure_ascii=False)
    is_allowed = allows(f"start: %json {json.dumps(whole)}", written)
    assert is_allowed == matches(APPLY_PATCH, text)


@pytest.mark.parametrize(
    ("definition", "good", "bad"),
    [
        ('start: "a"i "b"?', ["a", "Ab"], ["B", "ab\n"]),
        ('start: A\nA: "x".."z" ~ 2..3', ["xy", "zzz"], ["x", "abcd"]),
        ('start: "a" ~ 2 [B]\nB: /\\d/', ["aa", "aa1"], ["a", "aab"]),
        ('start: b\n     | "c" -> see\n?b.2: "." // one\n', [".", "c"], ["b", "a"]),
        ("start: /a.b/s", ["a\nb", "axb"], ["ab"]),
        ("start: /a.b/", ["axb"], ["a\nb"]),
        ("start: /a\\/b/ # a slash\n", ["a/b"], ["a\\/b"]),
        ('start: "a\\n\\"\\\\" "\\u00e9"', ['a\n"\\é'], ["a"]),
        (
            'start: w ("," w)*\nw: WORD\n%import common.WORD\n%ignore " "',
            ["a , b", " a"],
            ["a,", ","],
        ),
        ("start: N\n%import common.INT -> N", ["12"], ["x"]),
        ("start: A B\n%import common (WORD, INT)\nA: WORD\nB: INT", ["a1"], ["1a"]),
        ('start: | "a"', ["", "a"], ["b"]),
        ('start: "[" ("(" | ")" )+ "*" "]"', ["[()*]"], ["[*]"]),
    ],
)
def test_what_is_written_in_a_grammar(definition: str, good: list[str], bad: list[str]) -> None:
    assert [text for text in (*good, *bad) if matches(definition, text)] == good


@pytest.mark.parametrize("name", _COMMON)
def test_common_terminals_are_known(name: str) -> None:
    definition = f"start: X\n%import common.{name} -> X"
    assert not matches(definition, "")


@pytest.mark.parametrize(
    "definition",
    [
        "",
        "[a-z]+",
        'start: "(" start ")" | "x"',
        "start: a\na: b\nb: a?",
        "start: X",
        'start: "a"\nstart: "b"',
        'start: %json {"type": "string"}',
        "start: <think>",
        "start: A & ~B\nA: /a/\nB: /b/",
        "start: /a/x",
        "start: A\nA: b\nb: /x/",
        "start: x{A}\nA: /a/",
        "%import python.NAME\nstart: NAME",
        "%import common.NOTHING\nstart: NOTHING",
        'start: "a',
        'start: ("a"',
        'start: "a")',
        'start: "\\ud800"',  # half a character
        'start: "a".."bc"',
        'start: "a" ~ B',
        "start: " + "(" * 10_000,
        "\n".join(["start: r0", *(f"r{n}: r{n + 1}" for n in range(1000)), 'r1000: "x"']),
        "\n".join(["start: r0", *(f"r{n}: r{n + 1} r{n + 1}" for n in range(40)), 'r40: "x"']),
        "start: " + '"x" ' * MAX_REGEX_CHARS,
        "x" * (MAX_REGEX_CHARS + 1),
    ],
)
def test_what_is_no_regular_expression_is_left_alone(definition: str) -> None:
    with pytest.raises(NotRegularError):
        regex_of_lark(definition)


@given(
    st.text('start:abAB"/|()[]?*+~.,->%ignmpoc01{}\\\n #i_', max_size=60).map("start: {}".format)
)
def test_any_text_is_a_pattern_or_left_alone(definition: str) -> None:
    try:
        found = regex_of_lark(definition)
    except NotRegularError:
        return
    assert len(found) <= 2 * MAX_REGEX_CHARS
