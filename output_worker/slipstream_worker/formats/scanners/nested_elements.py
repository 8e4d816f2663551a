"""Reads the arguments of a call that is written as elements named after them, and gives JSON.

An element holds text or further elements: `P<K>V P</K>`, where P is a prefix that each tag has. A
string leaves as it comes; any other value when its element ends, as lists, objects and words are
told apart by the types of the function's properties.

- The output is always a prefix of a JSON object, and a whole object once the reading is done.
- Of text that breaks the rules, what came before the fault has been given.
"""

from __future__ import annotations

from enum import IntEnum
from json.encoder import encode_basestring
from typing import Any, Final

from slipstream_ipc.formats.answer_format import NestedElements
from slipstream_ipc.formats.tool_types import LIST_ITEM, nested_key
from slipstream_ipc.messages.answer import MAX_NAME_CHARS
from slipstream_ipc.validation.json_nesting import is_nested_deeper
from slipstream_worker.formats.scanners.json_scanner import (
    MAX_NESTING,
    STRING_HAZARDS,
    JsonScanner,
)
from slipstream_worker.formats.scanners.scanner import (
    BLANKS,
    MAX_HELD_CHARS,
    ScanContext,
    ScanStatus,
)
from slipstream_worker.formats.scanners.typed_scanner import (
    TypedScanner,
    escape_json,
    read_until,
)
from slipstream_worker.formats.scanners.values import WORD_CHARS, value_as_json

__all__ = ["NestedElementsScanner"]

_MAX_ELEMENTS: Final = MAX_NESTING // 2 - 1  # within each other; each may be in a list of its own
_MAX_WORD_CHARS: Final = 4096  # of a number
_CONTAINERS: Final = ("", "{", "[", '"')
_MIXED_TEXT: Final = "$text"  # the name that text beside elements gets


class _ElementPhase(IntEnum):
    """The element that the next character belongs to."""

    GAP = 1  # between the arguments
    TAG = 2  # the name of an argument, or what ends them
    STRING = 3  # a value that is a string
    VALUE = 4  # any other value
    INNER_TAG = 5  # of an element within a value
    ENDED = 6
    FAILED = 7


class _Open:
    """An element that is not closed. path: of its value among the function's types."""

    __slots__ = ("is_list", "members", "name", "path", "texts")

    def __init__(self, name: str, path: str, is_list: bool) -> None:
        self.name = name
        self.path = path
        self.is_list = is_list
        self.texts: list[str] = []
        self.members: list[tuple[str, str]] = []  # names and values, as JSON


class NestedElementsScanner(TypedScanner):
    """Reads the element `NestedElements`: from behind the function's name up to what ends the
    arguments.
    """

    def __init__(self, element: NestedElements, context: ScanContext) -> None:
        super().__init__(context)
        self._opening = element.prefix + "<"
        self._end_tag = "/" + element.end
        self._hazards = STRING_HAZARDS | frozenset(element.prefix[0])
        self._key = ""
        self._open: list[_Open] = []  # outermost first
        self._num_chars = 0  # of a value that is not decided
        self._first_char = ""  # of it that is no blank
        self._may_nest = False  # by its type
        self._phase = _ElementPhase.GAP

    @property
    def string_hazards(self) -> frozenset[str] | None:
        if self._phase != _ElementPhase.STRING or self.num_held:
            return None
        return self._hazards

    def break_off(self) -> str:
        match self._phase:
            case _ElementPhase.TAG if not self._held.startswith("/"):
                self._emit(self._before_key + '"' + escape_json(self._held), 0)
            case _ElementPhase.STRING:
                self._emit(escape_json(self._held), 0)
            case _ElementPhase.VALUE | _ElementPhase.INNER_TAG:
                self._emit(self._unfinished(0), 0)
        return self.take()

    def save(self) -> list[Any]:
        return [int(self._phase), self._is_first, self._key]

    def load(self, saved: list[Any]) -> None:
        phase, self._is_first, self._key = saved
        self._phase = _ElementPhase(phase)
        if self._phase == _ElementPhase.VALUE:
            self._begin_value()
        self._has_begun = True

    @property
    def _status(self) -> ScanStatus:
        if self._phase == _ElementPhase.ENDED:
            return ScanStatus.DONE
        return ScanStatus.FAILED if self._phase == _ElementPhase.FAILED else ScanStatus.MORE

    def _step(self, text: str, at: int) -> int:
        match self._phase:
            case _ElementPhase.GAP:
                return self._gap(text, at)
            case _ElementPhase.TAG | _ElementPhase.INNER_TAG:
                return self._tag(text, at)
            case _ElementPhase.STRING:
                return self._string(text, at)
            case _:
                return self._value(text, at)

    def _step_delimiter(self, literal: str) -> bool:
        """No delimiter is a part of the element: one is a word of a value, else a fault."""
        if self._is_word(literal) and self._phase in (_ElementPhase.STRING, _ElementPhase.VALUE):
            text, self._held = self._held + literal, ""
            if self._phase == _ElementPhase.STRING:
                self._emit(escape_json(text), 0)
            else:
                self._take_text(text, 0)
        else:
            self._phase = _ElementPhase.FAILED
        return self._phase != _ElementPhase.FAILED

    # -- tags

    def _gap(self, text: str, at: int) -> int:
        """Between arguments: blanks, then the beginning of a tag."""
        at, tag = self._read_tag((self._opening,), text, at)
        if tag is None:
            self._phase = _ElementPhase.FAILED
        elif tag:
            self._phase = _ElementPhase.TAG
        return at

    def _tag(self, text: str, at: int) -> int:
        """Read a tag from behind its `<` up to its `>`; return the position behind it."""
        bound = at + MAX_NAME_CHARS + 2 - len(self._held)  # with a slash and `>`
        found = text.find(">", at, bound)
        if found < 0:
            self._held += text[at:bound]
            if len(text) < bound:
                return len(text)
            self._phase = _ElementPhase.FAILED
            return bound
        tag, self._held = self._held + text[at:found], ""
        behind = found + 1
        if self._phase == _ElementPhase.INNER_TAG:
            self._inner_tag(tag, behind)
        elif tag == self._end_tag:
            self._emit("{}" if self._is_first else "}", behind)
            self._phase = _ElementPhase.ENDED
        elif _is_name(tag):
            self._argument_begins(tag, behind)
        else:
            self._phase = _ElementPhase.FAILED
            return found
        return behind

    def _argument_begins(self, name: str, at: int) -> None:
        begin = self._before_key
        self._key = name
        self._is_first = False
        is_string = self._types_of(name) == {"string"}
        self._emit(f"{begin}{encode_basestring(name)}: " + '"' * is_string, at)
        self._phase = _ElementPhase.STRING if is_string else _ElementPhase.VALUE
        if not is_string:
            self._begin_value()

    def _begin_value(self) -> None:
        self._num_chars = 0
        self._first_char = ""
        self._may_nest = not self._types_of(self._key).isdisjoint(("array", "object"))
        self._open = [self._opened(self._key, self._key)]

    def _inner_tag(self, tag: str, at: int) -> None:
        self._phase = _ElementPhase.VALUE
        self._num_chars += len(tag) + len(self._opening) + 1
        top = self._open[-1]
        if tag == "/" + top.name:
            self._element_ends(at)
        elif self._num_chars > MAX_HELD_CHARS:
            self._phase = _ElementPhase.FAILED
        elif _is_name(tag) and len(self._open) < _MAX_ELEMENTS:
            step = LIST_ITEM if top.is_list else tag
            self._open.append(self._opened(tag, nested_key(top.path, step)))
        else:
            self._phase = _ElementPhase.FAILED

    # -- values

    def _string(self, text: str, at: int) -> int:
        """A string, up to the tag that closes it."""
        run = read_until(f"{self._opening}/{self._key}>", self._held, text, at)
        self._held = run.held
        piece = escape_json(run.text)
        if run.is_end:
            self._emit(piece + '"', run.behind)
            self._phase = _ElementPhase.GAP
        elif run.text:
            self._emit(piece, run.behind - len(run.held))
        return run.behind

    def _value(self, text: str, at: int) -> int:
        """Text of a value, up to the beginning of a tag."""
        run = read_until(self._opening, self._held, text, at)
        self._held = run.held
        self._take_text(run.text, run.behind - len(run.held) - len(self._opening) * run.is_end)
        if run.is_end and self._phase == _ElementPhase.STRING:
            self._held = self._opening
        elif run.is_end and self._phase == _ElementPhase.VALUE:
            self._phase = _ElementPhase.INNER_TAG
        return run.behind

    def _take_text(self, text: str, at: int) -> None:
        self._num_chars += len(text)
        top = self._open[-1]
        top.texts.append(text)
        is_too_long = self._num_chars > MAX_HELD_CHARS
        if len(self._open) > 1 or top.members:
            if is_too_long:
                self._phase = _ElementPhase.FAILED
        elif is_too_long or not self._may_be_value(text):
            self._emit('"' + escape_json("".join(top.texts)), at)
            self._phase = _ElementPhase.STRING

    def _may_be_value(self, text: str) -> bool:
        """True if an argument of which `text` came last may be anything but a string."""
        if not self._first_char:
            self._first_char = text.lstrip(BLANKS)[:1]
        if self._first_char in _CONTAINERS or self._may_nest:
            return True
        return self._num_chars <= _MAX_WORD_CHARS and WORD_CHARS.issuperset(text)

    def _element_ends(self, at: int) -> None:
        element = self._open.pop()
        value = self._as_json(element)
        if self._open:
            self._open[-1].members.append((element.name, value))
            return
        self._emit(value, at)
        self._phase = _ElementPhase.GAP

    def _as_json(self, element: _Open) -> str:
        text = "".join(element.texts)
        types = self._types_of(element.path)
        if not element.members:
            if not text.strip(BLANKS) and "string" not in types:
                if "array" in types:
                    return "[]"
                if "object" in types:
                    return "{}"
            value = value_as_json(text, types, python=bool(types))
            deepest = MAX_NESTING - 2 * len(self._open) - 2
            if value is None or is_nested_deeper(value, deepest):
                return encode_basestring(text)
            return value
        members = _with_text(element)
        if element.is_list:
            return f"[{', '.join(value for _, value in members)}]"
        found = _by_name(members)
        return f"{{{', '.join(map(_member, found, found.values()))}}}"

    def _unfinished(self, depth: int) -> str:
        """The beginning of a JSON value, for an open element and those within it."""
        element = self._open[depth]
        is_innermost = depth == len(self._open) - 1
        if is_innermost and not element.members:
            text = "".join(element.texts).lstrip(BLANKS)
            scanner = JsonScanner()
            if scanner.feed(text, 0)[1] is ScanStatus.FAILED:
                return '"' + escape_json(text + self._held * (self._phase == _ElementPhase.VALUE))
            return scanner.take() + scanner.break_off()
        members = _with_text(element)
        inner = "" if is_innermost else self._unfinished(depth + 1)
        if element.is_list:
            values = [value for _, value in members]
            return "[" + ", ".join(values if is_innermost else [*values, inner])
        found = _by_name(members)
        if is_innermost:
            return "{" + ", ".join(map(_member, found, found.values()))
        name = self._open[depth + 1].name
        earlier = found.pop(name, [])
        begin = "{" + "".join(_member(*each) + ", " for each in found.items())
        listed = "".join(each + ", " for each in earlier)
        return f"{begin}{encode_basestring(name)}: {'[' * bool(earlier)}{listed}{inner}"

    def _opened(self, name: str, path: str) -> _Open:
        return _Open(name, path, "array" in self._types_of(path))

    def _types_of(self, path: str) -> frozenset[str]:
        types = self._types.get(path, "")
        return frozenset(types.split("|")) if types else frozenset()


def _is_name(tag: str) -> bool:
    return bool(tag.strip(BLANKS)) and tag[0] != "/" and len(tag) <= MAX_NAME_CHARS


def _with_text(element: _Open) -> list[tuple[str, str]]:
    """The members, with the text that stands beside them."""
    text = "".join(element.texts)
    if not text.strip(BLANKS):
        return element.members
    return [*element.members, (_unused(_MIXED_TEXT, element.members), encode_basestring(text))]


def _by_name(members: list[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in members:
        found.setdefault(name, []).append(value)
    return found


def _unused(name: str, members: list[tuple[str, str]]) -> str:
    taken = {each for each, _ in members}
    while name in taken:
        name = "$" + name
    return name


def _member(name: str, values: list[str]) -> str:
    value = values[0] if len(values) == 1 else f"[{', '.join(values)}]"
    return f"{encode_basestring(name)}: {value}"
