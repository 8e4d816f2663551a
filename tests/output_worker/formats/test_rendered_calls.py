"""Calls that are written as a model's template writes them are read back, however divided."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from slipstream_ipc.formats.table import CALLS, WHOLE
from slipstream_lab.formats import our_reader
from slipstream_lab.formats.cases import MADE_CASES, AnswerCase
from slipstream_lab.formats.divisions import AnswerPiece, divided, pieces
from slipstream_lab.formats.rendering import (
    RENDERINGS,
    SampleCall,
    can_render,
    format_of,
    render,
)

KNOWN = [variant for variant in RENDERINGS if our_reader.compiled(variant) is not None]
CONTENT = "Let me see."

# characters that formats use, and some of every width
LETTERS = st.characters(codec="utf-8") | st.sampled_from("\"'\\{}[]()<>|/=:;,`\n\t \u2028é🏔")
TEXTS = st.text(LETTERS, max_size=20)
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    TEXTS | NUMBERS | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
OF_TYPE = {
    "string": TEXTS,
    "number": NUMBERS,
    "integer": st.integers(-(2**70), 2**70),
    "boolean": st.booleans(),
    "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(TEXTS, VALUES, max_size=3),
}
TYPES = {
    "f": {"text": "string", "count": "integer", "size": "number", "is_on": "boolean"},
    "get_it": {"rows": "array", "deep": "object", "text": "string", "other_text": "string"},
    "now": {},
}


@st.composite
def calls(draw: st.DrawFn) -> tuple[SampleCall, ...]:
    found = []
    for name in draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=3)):
        chosen = draw(st.lists(st.sampled_from(sorted(TYPES[name]) or [""]), unique=True))
        arguments = {key: draw(OF_TYPE[TYPES[name][key]]) for key in chosen if key}
        found.append(SampleCall(name, arguments))
    return tuple(found)


def check(
    variant: str, written: tuple[SampleCall, ...], cut: list[AnswerPiece], content: str
) -> None:
    read = our_reader.read(variant, cut, TYPES)
    assert read is not None
    assert [(it.name, json.loads(it.arguments)) for it in read.calls] == list(written)
    assert all(it.is_whole for it in read.calls)
    assert read.content.strip() == content
    assert read.reasoning == ""


def whole(variant: str, written: tuple[SampleCall, ...], content: str) -> list[AnswerPiece]:
    return pieces(render(variant, written, content=content), RENDERINGS[variant].added_tokens)


@pytest.mark.parametrize("variant", KNOWN)
@settings(max_examples=40)
@given(written=calls(), seed=st.integers(0, 2**32), max_len=st.integers(1, 9))
@example(written=(SampleCall("now", {}), SampleCall("now", {})), seed=1, max_len=3)
def test_calls_come_back_as_they_were_written(
    variant: str, written: tuple[SampleCall, ...], seed: int, max_len: int
) -> None:
    assume(can_render(variant, written, TYPES))
    content = "" if RENDERINGS[variant].is_alone else CONTENT
    parts = whole(variant, written, content)
    check(variant, written, divided(parts, random.Random(seed), max_len), content)
    check(variant, written, parts, content)


@pytest.mark.parametrize("case", MADE_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("variant", KNOWN)
def test_made_cases_come_back_at_every_cut(variant: str, case: AnswerCase) -> None:
    """Each text cut into characters, and each delimiter spelled out where it may be text."""
    if not can_render(variant, case.calls, case.types):
        pytest.skip("the format cannot write these arguments")
    rendering = RENDERINGS[variant]
    text = render(variant, case.calls)
    for cut in (
        pieces(text, rendering.added_tokens),
        divided(pieces(text, rendering.added_tokens), random.Random(1), 1),
    ):
        read = our_reader.read(variant, cut, case.types)
        assert read is not None
        assert [(it.name, json.loads(it.arguments)) for it in read.calls] == list(case.calls)
        assert read.content.strip() == ""


@pytest.mark.parametrize(
    "variant", [variant for variant in KNOWN if RENDERINGS[variant].call_id is not None]
)
def test_the_ids_that_the_model_wrote_come_back(variant: str) -> None:
    rendering = RENDERINGS[variant]
    assert rendering.call_id is not None
    written = (SampleCall("f", {"count": 1}), SampleCall("now", {}))
    known = our_reader.compiled(variant)
    assert known is not None
    events = our_reader.events_of(known, variant, whole(variant, written, ""), TYPES)
    ids = [event.call_id for event in events if event.kind == 3]
    assert ids == [rendering.call_id(it.name, i) for i, it in enumerate(written)]


def test_every_format_of_the_table_is_written_here() -> None:
    unwritten = {*CALLS, *WHOLE} - {format_of(variant) for variant in RENDERINGS}
    assert unwritten == set()
