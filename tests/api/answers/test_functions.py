"""Functions as tools: what their definitions say."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.answers.functions import tool_definition, tool_definitions
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.validation.chat_template import template_options


class Place(TypedDict):
    name: str
    height_m: float


@dataclass
class Span:
    begin: int
    end: int | None = None


def google(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
    """Forecast of the weather.

    It is a rough one.

    Args:
        city: Where; a name
            in English.
        days (int, optional): How many.
        unit: Of the temperature: C or F.

    Returns:
        city: not a parameter here.
    """
    return f"{city} {days} {unit}"


def sphinx(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> str:
    """Forecast of the weather.

    It is a rough one.

    :param city: Where; a name
        in English.
    :param int days: How many.
    :param unit: Of the temperature: C or F.
    :returns: a text.
    """
    return f"{city} {days} {unit}"


@pytest.mark.parametrize("function", [google, sphinx])
def test_signature_and_docstring(function: Any) -> None:
    definition = tool_definition(function)
    assert definition == {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": "Forecast of the weather.\n\nIt is a rough one.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "Where; a name in English."},
                    "days": {"type": "integer", "description": "How many.", "default": 3},
                    "unit": {
                        "enum": ["C", "F"],
                        "description": "Of the temperature: C or F.",
                        "default": "C",
                    },
                },
                "required": ["city"],
            },
        },
    }


def test_types_of_parameters() -> None:
    def use(
        place: Place,
        span: Span,
        tags: list[str],
        count: Annotated[int, msgspec.Meta(ge=0, description="Of tags")],
        anything: Any,
        note: str | None = None,
    ) -> None: ...

    definition = tool_definition(use)["function"]
    assert "description" not in definition
    schema = definition["parameters"]
    assert schema["required"] == ["place", "span", "tags", "count", "anything"]
    of = schema["properties"]
    assert of["tags"] == {"type": "array", "items": {"type": "string"}}
    assert of["count"] == {"type": "integer", "minimum": 0, "description": "Of tags"}
    assert of["anything"] == {}
    assert of["note"]["default"] is None
    assert schema["$defs"]["Place"]["required"] == ["height_m", "name"]
    assert of["span"] == {"$ref": "#/$defs/Span"}


class Searcher:
    def search(self, words: str) -> None:
        """Search."""

    def __call__(self, words: str) -> None:
        """Search."""


def test_methods_and_definitions_beside_them() -> None:
    given = {"type": "function", "function": {"name": "own"}}
    [first, second] = tool_definitions([given, Searcher().search])
    assert first is given
    assert second["function"]["name"] == "search"
    assert list(second["function"]["parameters"]["properties"]) == ["words"]
    [called] = tool_definitions([Searcher()])
    assert called["function"]["name"] == "Searcher"
    assert called["function"]["parameters"]["properties"] == {"words": {"type": "string"}}
    assert tool_definitions(None) is None
    assert tool_definitions("no list") == "no list"


async def later(x: int) -> None:
    """Works, too."""


def test_definitions_go_into_a_template() -> None:
    options = template_options(tool_definitions([google, sphinx, later]))
    names = [tool["function"]["name"] for tool in json.loads(options.tools)]
    assert names == ["google", "sphinx", "later"]


@pytest.mark.parametrize(
    ("function", "allowed"),
    [
        (print, "parameters have names"),
        (lambda x: x, "a function with a name"),
        (lambda x: x, "allowed"),
    ],
)
def test_what_cannot_be_described_is_refused(function: Any, allowed: str) -> None:
    with pytest.raises(BadRequest, match=allowed) as caught:
        tool_definitions([google, function])
    assert caught.value.field == "tools[1]"


def test_types_that_json_lacks_are_refused() -> None:
    def use(x: Searcher) -> None: ...

    with pytest.raises(BadRequest, match="types that JSON has"):
        tool_definition(use)


@given(st.text(" \n:aArgs()", max_size=60))
def test_any_docstring_will_do(docstring: str) -> None:
    def use(a: int) -> None: ...

    use.__doc__ = docstring
    definition = tool_definition(use)["function"]
    assert list(definition["parameters"]["properties"]) == ["a"]
