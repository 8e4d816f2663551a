"""Which format a model's answers have: by its template and tokens, by options, or none."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats import choose
from slipstream_ipc.formats.answer_format import (
    AnswerFormat,
    CallFormat,
    CallSection,
    Delimiter,
    ReasoningFormat,
    Signature,
)
from slipstream_ipc.formats.choose import choose_format, delimiter_ids


def reasoning(name: str, *signatures: Signature, end: str = "</a>") -> ReasoningFormat:
    return ReasoningFormat(name, (Delimiter("<a>"),), (Delimiter(end),), signatures=signatures)


def calls(name: str, *signatures: Signature) -> CallFormat:
    return CallFormat(name, (CallSection((Delimiter(f"<{name}>"),)),), signatures=signatures)


TABLE = {
    "REASONING": {
        "r1": reasoning("r1", Signature(("AA",), ("B",))),
        "r2": reasoning("r2", Signature(("C",), tokens=("<c>",)), Signature(("D",)), end="</b>"),
        "r3": reasoning("r3", Signature(("E",))),
        "r4": reasoning("r4", Signature(tokens=("<k>",), rank=1), end="</d>"),
    },
    "CALLS": {"c1": calls("c1", Signature(("A",))), "c2": calls("c2", Signature(("D",)))},
    "WHOLE": {"w": AnswerFormat("w", reasoning("r"), calls("c"), signatures=(Signature(("W",)),))},
}


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, entries in TABLE.items():
        monkeypatch.setattr(choose, name, entries)


def chosen(template: str | None, *tokens: str, **options: Any) -> str | None:
    found = choose_format(template, tokens, **options)
    return None if found.format is None else found.format.name


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        (None, (), None),
        ("", (), None),
        ("x", (), None),
        ("A", (), "none+c1"),
        ("AA", (), "r1+c1"),
        ("AAB", (), "none+c1"),
        ("C", (), None),
        ("C", ("<c>",), "r2+none"),
        ("D", (), "r2+c2"),
        ("AA", ("<k>",), "r4+c1"),
        ("D", ("<k>",), "r4+c2"),
        ("W A D", (), "w"),
    ],
)
def test_a_signature_is_all_that_it_says(template, tokens, name):
    assert chosen(template, *tokens) == name


def test_several_templates_count_together():
    assert choose_format({"default": "AA", "tool_use": "x"}, ()).format == chosen_format("AA")
    assert choose_format({"default": "A", "tool_use": "A"}, ()).format == chosen_format("A")


def chosen_format(template: str) -> AnswerFormat | None:
    return choose_format(template, ()).format


def test_what_fits_several_formats_is_read_by_none():
    found = choose_format("AD", ())
    assert found.is_ambiguous
    assert found.format is not None
    assert found.format.name == "r2+none"
    assert found.calls.endswith("fit several formats: c1, c2")
    assert not choose_format("x", ()).is_ambiguous


def test_formats_that_differ_in_their_name_alone_are_one():
    assert chosen("AAE") == "r1+c1"
    assert chosen("DE") == "none+c2"  # r2 ends otherwise


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"tool_format": "c2"}, "r1+c2"),
        ({"tool_format": "none"}, "r1+none"),
        ({"reasoning_format": "r2"}, "r2+c1"),
        ({"reasoning_format": "none", "tool_format": "none"}, None),
        ({"tool_format": "w"}, "w"),
        ({"reasoning_format": "w"}, "w"),
        ({"reasoning_format": "w", "tool_format": "w"}, "w"),
    ],
)
def test_options_name_a_part(options, name):
    assert chosen("AA", **options) == name
    if len(options) == 2 or name == "w":
        assert chosen(None, **options) == name


def test_an_option_goes_before_a_format_of_both():
    assert chosen("WAA", tool_format="c2") == "r1+c2"


@pytest.mark.parametrize(
    ("options", "allowed"),
    [
        ({"tool_format": "c3"}, "c1, c2, none, w"),
        ({"tool_format": "r1"}, "c1, c2, none, w"),
        ({"reasoning_format": ""}, "none, r1, r2, r3, r4, w"),
        ({"reasoning_format": "none", "tool_format": "w"}, "w or nothing: w is a format of both"),
        ({"tool_format": "c1", "reasoning_format": "w"}, "w or nothing: w is a format of both"),
    ],
)
def test_unknown_names_are_refused(options, allowed):
    with pytest.raises(BadRequest) as caught:
        choose_format("x", (), **options)
    assert caught.value.field in options
    assert str(caught.value).endswith(f"allowed: {allowed}")


def test_the_reason_is_what_was_found():
    found = choose_format("C", ["<c>"])
    assert found.reasoning == "its chat template has 'C'; its vocabulary has '<c>'"
    assert found.calls == "its chat template and its tokens are those of no known format"
    assert choose_format(None, ()).calls == "the model has no chat template"
    assert choose_format("AA", ()).reasoning == (
        "its chat template has 'AA'; its chat template does not have 'B'"
    )
    assert choose_format("x", (), tool_format="c1").calls == "named by an option"


def test_ids_are_those_of_delimiters():
    assert delimiter_ids({"<a>": 3, "</b>": 4, "<c1>": 5, "<other>": 6}) == {
        "<a>": 3,
        "</b>": 4,
        "<c1>": 5,
    }
