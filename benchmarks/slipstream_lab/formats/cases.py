"""Function calls to be written and read back: hand-made ones, and those of BFCL.

BFCL, the Berkeley Function Calling Leaderboard (Apache-2.0), has tools with the calls that are
expected. Its data is in the package bfcl-eval, which is not a dependency:

    pip install --no-deps --target FOLDER bfcl-eval

makes FOLDER/bfcl_eval/data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from slipstream.errors import wrong_option
from slipstream_lab.formats.rendering import PropertyTypes, SampleCall

BFCL_CATEGORIES = (
    "simple_python",
    "multiple",
    "parallel",
    "parallel_multiple",
    "live_simple",
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
)
_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array"}  # others are JSON's own
_KNOWN = frozenset(("string", "integer", "number", "boolean", "array", "object"))


class AnswerCase(NamedTuple):
    """Calls of one answer, and the tools that the model had, in OpenAI's form."""

    name: str
    tools: list[dict[str, Any]]
    calls: tuple[SampleCall, ...]

    @property
    def types(self) -> PropertyTypes:
        """The JSON types of the tools' properties; those without one are left out."""
        return {
            tool["function"]["name"]: {
                name: schema["type"]
                for name, schema in tool["function"]["parameters"].get("properties", {}).items()
                if isinstance(schema.get("type"), str)
            }
            for tool in self.tools
        }


def read_bfcl(folder: Path) -> list[AnswerCase]:
    """All cases whose calls are written down, in the order of the files.

    Of an argument's possible values the first is taken; names get the letters that OpenAI's API
    allows. Raises BadRequestError if the folder is not BFCL's.
    """
    cases = []
    for category in BFCL_CATEGORIES:
        questions = folder / f"BFCL_v4_{category}.json"
        answers = folder / "possible_answer" / questions.name
        if not questions.is_file() or not answers.is_file():
            allowed = f"the folder bfcl_eval/data of the package bfcl-eval, with {questions.name}"
            raise wrong_option("bfcl", str(folder), allowed)
        truths = {line["id"]: line["ground_truth"] for line in _lines(answers)}
        for line in _lines(questions):
            schemas = {tool["name"]: tool["parameters"] for tool in line["function"]}
            calls = tuple(
                SampleCall(_name(name), _arguments(given, schemas.get(name, {})))
                for truth in truths[line["id"]]
                for name, given in truth.items()
            )
            cases.append(AnswerCase(line["id"], [_tool(it) for it in line["function"]], calls))
    return cases


def _lines(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines() if line.strip()]


def _name(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_-]", "_", name)


def _tool(given: Mapping[str, Any]) -> dict[str, Any]:
    function = {
        "name": _name(given["name"]),
        "description": given.get("description", ""),
        "parameters": _schema(given["parameters"]),
    }
    return {"type": "function", "function": function}


def _schema(given: Mapping[str, Any]) -> dict[str, Any]:
    schema = dict(given)
    kind = schema.get("type")
    if isinstance(kind, str):
        kind = _JSON_TYPES.get(kind.lower(), kind.lower())
        schema["type"] = kind
        if kind not in _KNOWN:  # BFCL's "any"
            del schema["type"]
    if isinstance(schema.get("properties"), Mapping):
        schema["properties"] = {k: _schema(v) for k, v in schema["properties"].items()}
    if isinstance(schema.get("items"), Mapping):
        schema["items"] = _schema(schema["items"])
    return schema


def _arguments(given: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The first value of each property that may not be left out; an empty text says it may."""
    properties = schema.get("properties", {})
    arguments = {}
    for name, values in given.items():
        stated = [value for value in values if value != ""] if values else values
        if stated:
            arguments[name] = _value(stated[0], properties.get(name, {}))
    return arguments


def _value(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value, in which objects have lists of possible values again."""
    if isinstance(value, Mapping):
        if all(isinstance(part, list) for part in value.values()):
            return _arguments(value, schema)
        return dict(value)
    if isinstance(value, list):
        return [_value(part, schema.get("items", {})) for part in value]
    return value


def _made_tool(name: str, **types: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in types.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_TOOLS = [
    _made_tool("get_weather", city="string", days="integer", is_metric="boolean"),
    _made_tool("write_file", path="string", text="string", mode="object"),
    _made_tool("plot", points="array", scale="number", title="string", legend="object"),
    _made_tool("now"),
]

_CODE = 'def f(x):\n    """A \\"text\\"."""\n    return {"a": [x, \'b\'], "c": f"{x}"}\n# end'
_MARKUP = "<p class='a'>5 < 6 & 7 > 3</p>\t[see](a|b) {{x}} ]} </b> <"
_LETTERS = "Zürich 🏔 東京 \u2028 e\u0301 \x7f"


def _case(name: str, *calls: tuple[str, dict[str, Any]]) -> AnswerCase:
    return AnswerCase(name, _TOOLS, tuple(SampleCall(*call) for call in calls))


MADE_CASES = (
    _case("one", ("get_weather", {"city": "Oslo", "days": 3, "is_metric": True})),
    _case("no arguments", ("now", {})),
    _case("two", ("now", {}), ("get_weather", {"city": "Paris"})),
    _case("same twice", ("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Rome"})),
    _case("empty text", ("get_weather", {"city": "", "days": 0})),
    _case("letters", ("get_weather", {"city": _LETTERS})),
    _case("code", ("write_file", {"path": "a/b.py", "text": _CODE, "mode": {"bits": 420}})),
    _case("markup", ("write_file", {"path": "x.html", "text": _MARKUP})),
    _case("json in a text", ("write_file", {"path": "a.json", "text": '{"name": "now", "b": []}'})),
    _case("number in a text", ("write_file", {"path": "5", "text": "true"})),
    _case(
        "nested",
        (
            "plot",
            {
                "points": [[1, 2.5], [-3e-7, 0], []],
                "scale": 1.5,
                "title": "a, b; c: d",
                "legend": {"at": {"x": None, "y": [True, False]}, "name": "q\\u0041\\", "none": {}},
            },
        ),
    ),
    _case("three", ("now", {}), ("now", {}), ("plot", {"points": [], "scale": 0.0})),
)
"""Cases that need no other package."""
