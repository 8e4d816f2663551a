"""Expressions of the names that patterns do not take, beside Python's own regular expressions."""

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slipstream_core.grammar.name_patterns import names_outside, takes

ATOMS = st.sampled_from(
    [
        "a",
        "b",
        "-",
        "é",
        ".",
        "[ab]",
        "[^a]",
        "[a-c-]",
        r"\d",
        r"\w",
        r"\S",
        r"[\da]",
        r"\-",
        r"\x62",
        "x",
    ]
)
NAMES = st.text("abx-é0 A_", max_size=5)


def joined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?"])).map(
            lambda parts: f"(?:{parts[0]}){parts[1]}"
        ),
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda each: f"({'|'.join(each)})"),
    )


PATTERNS = st.tuples(
    st.sampled_from(["^", ""]),
    st.recursive(ATOMS, joined, max_leaves=6),
    st.sampled_from(["$", ""]),
).map("".join)


def of_python(pattern: str) -> re.Pattern[str]:
    """The same pattern, as Python writes it."""
    text = re.sub(r"\\x\{(\w+)\}", lambda found: rf"\U{int(found[1], 16):08x}", pattern)
    return re.compile(text.replace("$", r"\Z"), re.ASCII)


@settings(max_examples=400, deadline=None)
@given(st.lists(PATTERNS, min_size=1, max_size=3), st.lists(NAMES, max_size=3), st.lists(NAMES))
def test_what_is_outside_is_what_python_does_not_find(
    patterns: list[str], names: list[str], asked: list[str]
) -> None:
    found = names_outside(names, patterns)
    assume(found is not None)
    assert found is not None
    for name in [*asked, *names, ""]:
        is_taken = [bool(of_python(each).search(name)) for each in patterns]
        assert [takes(each, name) for each in patterns] == is_taken
        is_outside = bool(found) and bool(of_python(found).search(name))
        assert is_outside is not (name in names or any(is_taken)), name


@pytest.mark.parametrize(
    "pattern",
    [
        "^[a-z]+$",
        "^[A-Za-z_][A-Za-z0-9_]*$",
        "^S_",
        "_id$",
        r"^\d{4}-\d{2}-\d{2}$",
        "^(en|de)(-[A-Z]{2})?$",
    ],
)
def test_what_people_write_is_read(pattern: str) -> None:
    found = names_outside(["id", "name"], [pattern])
    assert found
    outside = of_python(found)
    for name in (
        "id",
        "name",
        "Id",
        "a_b",
        "S_",
        "x_id",
        "2026-11-29",
        "2026-11",
        "en",
        "en-GB",
        "é",
    ):
        is_known = name in ("id", "name") or bool(of_python(pattern).search(name))
        assert bool(outside.search(name)) is not is_known


def test_what_takes_all_leaves_nothing() -> None:
    for pattern in ("", "^", ".*", "a*", "^.*$", "(x|)"):
        assert names_outside(["a"], [pattern]) == ""
    assert names_outside([], ["^[^x]*$", "x"]) == ""


def test_a_control_character_is_neither_within_nor_outside() -> None:
    found = names_outside([], ["^[a-z]+$"])
    assert found
    assert of_python(found).search("A")
    assert not any(of_python(found).search(f"A{chr(code)}") for code in (*range(32), 127))


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?i)a", "(?=a)a", r"a\b", r"(a)\1", r"\p{L}", "[[:alpha:]]", "[a&&b]", "[a--b]", r"\A"),
        *("(", ")", "a)", "[a", "a{,3}", "a{3,1}", "{", "*", "a**", "a{2}{3}", "\\", r"\x{110000}"),
        *("(" * 200, "a{201}", "(a{200}){200}", "[b-a]", r"[a-\d]"),
    ],
)
def test_what_is_not_read_has_no_complement(pattern: str) -> None:
    assert names_outside([], [pattern]) is None
    assert takes(pattern, "a") is None


def test_the_size_of_a_complement_is_bounded() -> None:
    """The deterministic automaton of the first has 2**30 states."""
    assert names_outside([], ["a.{29}$"]) is None
    assert names_outside([], [f"^x{n}[a-z]*[0-9]{{9}}$" for n in range(40)]) is None
    assert names_outside([f"name {n}" for n in range(2_000)], ["^[A-Z]+$"]) is None
