"""Custom tools: tools of the client whose input is free text instead of a JSON object.

To the model a custom tool is a function with one argument, `input`, so it works with every format
of calls. `InputReader` makes the text of that argument of what the model writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from slipstream.answers.tool_calls import ToolCallDelta
from slipstream.http.api_errors import bad_field
from slipstream.http.openai.ignored_fields import IgnoredFields
from slipstream.http.openai.lark_regex import NotRegularError, regex_of_lark
from slipstream_ipc.errors import shown
from slipstream_ipc.messages import FORMAT_MARK, AnswerEvent, EventKind

INPUT = "input"
_FREE = "The input of the tool, as free text."
_BEGIN = re.compile(r'\s*+\{\s*+"input"\s*+:\s*+"')
_MAX_BEGIN_CHARS = 64
_HEX = "[0-9a-fA-F]"
# Whole characters of a JSON string, and escapes that JSON does not have, once that shows. A high
# surrogate waits for what tells whether it is half of a pair, so that any division reads the same.
_HIGH = rf"\\u[dD][89abAB]{_HEX}{{2}}"
_LOW = rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_NO_LOW = rf"[^\\]|\\[^u]|\\u(?![dD][c-fC-F])..|\\u[dD][c-fC-F]{_HEX}?[^0-9a-fA-F]"
_CHARACTER = (
    rf"\\[^u]|\\u(?![dD][89abAB]){_HEX}{{4}}|\\u{_HEX}{{0,3}}(?=[^0-9a-fA-F])"
    rf"|{_HIGH}(?:{_LOW}|(?={_NO_LOW}))"
)
_CHARACTERS = re.compile(rf'(?:[^"\\]++|{_CHARACTER})*+', re.DOTALL)
_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|\\u{_HEX}{{0,4}}|\\[^u]", re.DOTALL)
_HALF = re.compile("[\ud800-\udfff]")

Syntax = Literal["lark", "regex"]


def function_of_custom(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """The function that stands for a custom tool. where: the tool's place in the request.

    Its grammar is the pattern of the argument, which calls keep to; one in `lark` that is no
    regular expression is described to the model alone. Raises: ApiError.
    """
    name, description = tool.get("name"), tool.get("description")
    if not (isinstance(name, str) and name):
        raise bad_field(f"{where}.name", f"{where}.name: got {shown(name)}, allowed: a name")
    argument: dict[str, Any] = {"type": "string", "description": _FREE}
    grammar = grammar_of(tool, where)
    if grammar is not None:
        syntax, definition = grammar
        argument["description"] = f"The input of the tool: text of this {syntax}.\n{definition}"
        pattern = _pattern_of(syntax, definition)
        if pattern is not None:
            argument["pattern"] = f"^(?:{pattern})$"
    parameters = {
        "type": "object",
        "properties": {INPUT: argument},
        "required": [INPUT],
        "additionalProperties": False,
    }
    described = {} if description is None else {"description": description}
    marked = {FORMAT_MARK: True} if "pattern" in argument else {}
    return {"name": name, **described, "parameters": parameters, **marked}


def grammar_of(tool: dict[str, Any], where: str) -> tuple[Syntax, str] | None:
    """The syntax and the definition of a custom tool's grammar, whichever of OpenAI's forms has it;
    None if its input is free text. Raises: ApiError.
    """
    match tool.get("format"):
        case None | {"type": "text"}:
            return None
        case {
            "type": "grammar",
            "syntax": "lark" | "regex" as syntax,
            "definition": str(definition),
        } | {
            "type": "grammar",
            "grammar": {"syntax": "lark" | "regex" as syntax, "definition": str(definition)},
        }:
            return syntax, definition
        case given:
            allowed = 'text, or a grammar with the syntax "lark" or "regex" and its definition'
            field = f"{where}.format"
            raise bad_field(field, f"{field}: got {shown(given)}, allowed: {allowed}")


def name_unenforced(
    tool: dict[str, Any], path: str, where: str, ignored: IgnoredFields | None
) -> None:
    """Add a custom tool's format to `ignored` if it is no pattern. Raises ApiError where that is
    None and it is none. Worker and core name a pattern that they cannot enforce.

    path, where: the tool's place, as a header and as an error name it.
    """
    grammar = grammar_of(tool, where)
    if grammar is None or _pattern_of(*grammar) is not None:
        return
    if ignored is None:
        what = f"{where}.format: got a grammar that is not enforced, allowed: text"
        raise bad_field(f"{where}.format", what)
    ignored.add(f"{path}custom.", "format", {})


def _pattern_of(syntax: Syntax, definition: str) -> str | None:
    if syntax == "regex":
        return definition
    try:
        return regex_of_lark(definition)
    except NotRegularError:
        return None


def arguments_of_input(text: str) -> str:
    """The arguments of a call with this input, as the model is shown them."""
    return msgspec.json.encode({INPUT: text}).decode()


class InputReader:
    """Reads the arguments of a custom tool's call, piece by piece, and gives its input.

    The pieces add up to the same input however they were cut. Arguments that do not begin with the
    input are read at their end: another one text is the input, and what is no such object is passed
    on as the model wrote it. What follows the input is left out. num_bytes: of the arguments so
    far, in UTF-8.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._has_begun = False  # within the text of the input
        self._is_over = False
        self._is_other = False  # the arguments do not begin with the input
        self._held = ""  # what a next piece may complete
        self._others: list[str] = []

    def read(self, piece: str) -> str:
        """The input that a next piece of the arguments adds."""
        self.num_bytes += len(piece.encode(errors="replace"))
        if self._is_over:
            return ""
        if self._is_other:
            self._others.append(piece)
            return ""
        self._held += piece
        return self._text() if self._has_begun or self._begins() else ""

    def finish(self) -> str:
        """The rest of the input; there are no more pieces."""
        if self._has_begun:
            return ""  # at most the beginning of an escape is left
        return _input_of("".join([*self._others, self._held]))

    def _begins(self) -> bool:
        found = _BEGIN.match(self._held)
        if found is not None:
            self._has_begun = True
            self._held = self._held[found.end() :]
        elif len(self._held) > _MAX_BEGIN_CHARS:
            self._is_other = True
            self._others, self._held = [self._held], ""
        return self._has_begun

    def _text(self) -> str:
        found = _CHARACTERS.match(self._held)
        assert found is not None  # of no characters, at least
        text, self._held = _decoded(found[0]), self._held[found.end() :]
        self._is_over = self._held.startswith('"')
        return text


class CustomCalls:
    """Makes the calls of custom tools of their functions' calls, stretch by stretch of an answer.

    numbers: of the custom tools' calls so far, within the answer.
    """

    def __init__(self, names: Collection[str]) -> None:
        """names: of the custom tools."""
        self.numbers: set[int] = set()
        self._names = names
        self._readers: dict[int, InputReader] = {}  # of the calls that have not ended

    def read(
        self, calls: Iterable[ToolCallDelta], events: Iterable[AnswerEvent], *, is_last: bool
    ) -> list[ToolCallDelta]:
        """The calls of these events, in which a piece of the input stands for the arguments of a
        custom tool. is_last: no more events follow.
        """
        found: dict[int, ToolCallDelta] = {}
        for call in calls:
            if call.name is not None and call.name in self._names:
                self.numbers.add(call.index)
                self._readers[call.index] = InputReader()
            reader = self._readers.get(call.index)
            if reader is not None:
                call = replace(call, arguments=reader.read(call.arguments))
            found[call.index] = call
        ended = {event.call for event in events if event.kind == EventKind.CALL_ENDS}
        for number in list(self._readers) if is_last else ended & self._readers.keys():
            rest = self._readers.pop(number).finish()
            call = found.get(number) or ToolCallDelta(number)
            found[number] = replace(call, arguments=call.arguments + rest)
        return list(found.values())


def _decoded(characters: str) -> str:
    """The text of a JSON string's characters, without half characters; an escape that JSON does not
    have stays as it is written.
    """
    try:
        text = json.loads(f'"{characters}"', strict=False)
    except ValueError:
        text = _ESCAPE.sub(_decoded_escape, characters)
    return _HALF.sub("\ufffd", text)


def _decoded_escape(found: re.Match[str]) -> str:
    try:
        text: str = json.loads(f'"{found[0]}"')
    except ValueError:
        return found[0]
    return text


def _input_of(arguments: str) -> str:
    """The input in whole arguments that do not begin with it."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return arguments
    if not isinstance(found, dict):
        return arguments
    texts = [found[INPUT]] if INPUT in found else list(found.values())
    match texts:
        case []:
            return ""
        case [str(text)]:
            return text
        case _:
            return arguments
