"""Lark grammars of custom tools, as patterns that forced calls keep to."""

from __future__ import annotations

import json
import re

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
from slipstream_ipc.formats.table import CALLS, forced_format
from slipstream_ipc.messages.answer import EventKind
from slipstream_worker.formats.call_grammar import call_grammar

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
CLOSERS = ("\\n*** End Patch", "\\n@@\\n+a\\n*** End Patch", "\\n+a\\n*** End Patch", "\\n")
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


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "json"])
def test_a_forced_call_is_in_the_grammar_and_is_read_back(name: str) -> None:
    """In formats of which calls are JSON; `json` is that of a model whose own is not known."""
    found, model = forced_format(None), SmallModel(())
    if name in CALLS:
        found, model = model_of(name, "", True)
    assert found is not None
    functions = [{"type": "function", "function": function_of_custom(TOOL, "tools[0]")}]
    grammar = call_grammar(found, model.ids, functions, "function:apply_patch")
    for seed in range(30):
        items = model.items(walk(model, grammar, seed, closers=CLOSERS))
        events = read(compiled_for(found, model), items, {"apply_patch": {}})
        pieces = [each.text for each in events if each.kind == EventKind.CALL_ARGUMENTS]
        reader = InputReader()
        patch = "".join(map(reader.read, pieces)) + reader.finish()
        assert matches(APPLY_PATCH, patch), patch


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
