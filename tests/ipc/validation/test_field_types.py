"""Wrong types are reported in words, with the path, the value and what is allowed."""

from __future__ import annotations

from collections import deque
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET, Meta, Struct

from slipstream_ipc.errors import BadRequest, MissingField, UnknownField, shown
from slipstream_ipc.validation.field_types import field_error, of_text, values_of


class Part(Struct, forbid_unknown_fields=True, tag_field="type", tag="text"):
    text: str


class Turn(Struct, forbid_unknown_fields=True):
    role: Literal["user", "system"]
    content: str | tuple[Part, ...] | None = None


class Request(Struct, forbid_unknown_fields=True):
    turns: Annotated[tuple[Turn, ...], Meta(max_length=2)] = ()
    temperature: float = 1.0
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    stop: str | tuple[str, ...] = ()
    bias: dict[int, float] | None = None
    anything: Any = None
    stream: bool = False


@given(st.floats(allow_nan=False, allow_infinity=False).map(str))
def test_a_number_is_read_as_python_writes_it(text: str) -> None:
    assert of_text(text, float) == float(text)


@pytest.mark.parametrize("text", [".5", "5.", "-.25", "+5.", "-0.", ".5e3", "5.E-2", "+.1"])
def test_a_number_may_begin_or_end_with_its_point(text: str) -> None:
    assert of_text(text, float) == float(text)
    assert of_text(text, float | None) == float(text)
    assert of_text(text, str) == of_text(text, str | None) == text


@pytest.mark.parametrize("text", ["", ".", "-.", "5.5.", "..5", ".e3", "5.x", "\u0665."])
def test_other_texts_are_no_numbers(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        of_text(text, float)


WRONG: list[tuple[Any, str]] = [
    (5, "body: got 5, allowed: a mapping with turns, temperature, "),
    ({"temperature": "hot"}, "temperature: got 'hot', allowed: a number"),
    ({"max_tokens": "3"}, "max_tokens: got '3', allowed: an integer >= 1, or None"),
    ({"max_tokens": 0}, "max_tokens: got 0, allowed: an integer >= 1, or None"),
    ({"stop": 1}, "stop: got 1, allowed: a string or a list of strings"),
    ({"stop": ["a", 1]}, "stop[1]: got 1, allowed: a string"),
    ({"stream": 1}, "stream: got 1, allowed: True or False"),
    ({"bias": {"a": 1}}, "bias: got {'a': 1}, allowed: a mapping of integers to numbers, or None"),
    ({"bias": {1: "a"}}, "bias: got {1: 'a'}, allowed: a mapping of integers to numbers, or None"),
    ({"turns": None}, "turns: got None, allowed: a list of at most 2 mappings"),
    ({"turns": [{"role": "user"}] * 3}, "turns: got [{'role': 'user'}, "),
    ({"turns": [{"role": "me"}]}, "turns[0].role: got 'me', allowed: one of system, user"),
    (
        {"turns": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "turns[0].content[0].type: got 'image_url', allowed: text",
    ),
    (
        {"turns": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
        "turns[0].content[0].text: got 1, allowed: a string",
    ),
]


def error_for(wrong: Any, **options: Any) -> BadRequest:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(wrong, Request)
    return field_error(caught.value, Request, **options)


@pytest.mark.parametrize(("given", "text"), WRONG)
def test_the_wrong_part_is_quoted(given: Any, text: str) -> None:
    where = "body" if given == 5 else ""
    error = error_for(given, given=given, where=where)
    assert str(error).startswith(text)
    assert text.startswith(f"{error.field}: ")


def test_a_value_that_is_not_at_hand_is_described() -> None:
    assert str(error_for({"max_tokens": "3"})) == (
        "max_tokens: got a string, allowed: an integer >= 1, or None"
    )
    assert "got an integer, allowed: a string" in str(error_for({"stop": [1]}))
    assert "got another value, allowed: one of" in str(error_for({"turns": [{"role": "me"}]}))


@pytest.mark.parametrize("name", ["topk", "", "a.b", "x`y", "ä - at `$.x`", "type"])
@pytest.mark.parametrize("has_value", [True, False])
def test_an_unknown_field_is_named_once(name: str, has_value: bool) -> None:
    given = {"turns": [{"role": "user", name: 1}]}
    error = error_for(given, given=given if has_value else UNSET)
    assert isinstance(error, UnknownField)
    assert (error.field, error.name) == (f"turns[0].{name}", name)
    assert str(error) == f"turns[0].{name}: unknown field, allowed: content, role"


def test_a_missing_field_says_what_it_would_hold() -> None:
    error = error_for({"turns": [{}]}, where="body")
    assert isinstance(error, MissingField)
    assert error.field == "body.turns[0].role"
    assert str(error) == "body.turns[0].role: missing, allowed: one of system, user"


def test_of_what_nests_deeply_the_beginning_is_quoted() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    error = BadRequest("x", deep, "less")
    assert str(error) == f"x: got {'[' * 77}..., allowed: less"


def test_what_nests_within_another_type_is_not_quoted() -> None:
    deep: Any = None
    for _ in range(100_000):
        deep = deque([deep])
    error = BadRequest("x", deep, "less")
    assert str(error) == "x: got a deeply nested deque, allowed: less"


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=60) | st.binary(max_size=9) | st.floats(),
        lambda some: (
            st.lists(some) | st.lists(some).map(tuple) | st.dictionaries(st.text(max_size=60), some)
        ),
    )
)
def test_a_value_is_quoted_as_python_writes_it(value: Any) -> None:
    text = repr(value)
    assert shown(value) == (text if len(text) <= 80 else text[:77] + "...")


def test_what_is_not_quoted_costs_nothing() -> None:
    class Counted:
        made = 0

        def __repr__(self) -> str:
            Counted.made += 1
            return "it"

    many = [Counted()] * 100_000
    for value in (many, tuple(many), dict.fromkeys(range(100_000), many[0]), [many] * 1000):
        assert shown(value).endswith("...")
    assert Counted.made < 200
    assert shown("a" * 10**6) == "'" + "a" * 76 + "..."


def test_a_command_line_knows_no_none() -> None:
    info = msgspec.inspect.type_info(bool | None)
    assert values_of(info) == "True or False, or None"
    assert values_of(info, in_python=False) == "true or false"
