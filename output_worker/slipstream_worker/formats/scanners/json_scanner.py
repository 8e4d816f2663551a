"""Reads one JSON value from text in pieces, and gives its text back.

What has been given is always the beginning of a valid JSON text. Three things that models write are
mended: control characters within strings are escaped, a backslash that begins no escape is doubled,
and an escape of half a surrogate pair alone, which many readers of JSON refuse, is U+FFFD. White
space around numbers is kept.
"""

from __future__ import annotations

import re
from typing import Any

from slipstream_worker.formats.scanners.scanner import BLANKS, ScanStatus

MAX_NESTING = 64
MAX_SCALAR_CHARS = 1024

STRING_HAZARDS = frozenset('"\\') | frozenset(map(chr, range(0x20)))
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = re.compile(r"[ \t\r\n]*")
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_SCALAR_BEGINS = re.compile(
    r"-|-?(?:0|[1-9][0-9]*)(?:\.[0-9]*)?"
    r"|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*"
    r"|t(?:r(?:ue?)?)?|f(?:a(?:l(?:se?)?)?)?|n(?:u(?:ll?)?)?"
)
_HIGH, _LOW = r"\\u[dD][89abAB][0-9A-Fa-f]{2}", r"\\u[dD][c-fC-F][0-9A-Fa-f]{2}"
_ESCAPE = re.compile(rf'\\["\\/bfnrt]|(?!\\u[dD][89a-fA-F])\\u[0-9A-Fa-f]{{4}}|{_HIGH}{_LOW}')
_ESCAPE_BEGINS = re.compile(
    rf"\\(?:u[0-9A-Fa-f]{{0,3}})?|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F][0-9A-Fa-f]?)?)?)?)?"
)
_HALF = re.compile(rf"{_HIGH}|{_LOW}")
_ANY_ESCAPE = re.compile(rf"{_HIGH}{_LOW}|{_HIGH}|{_LOW}|\\.", re.DOTALL)
NO_HALF = "\\ufffd"  # in place of half a pair
_CONTROLS = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\b": "\\b", "\f": "\\f"}


# where in a value the scanner is; plain numbers, as they are compared for every character
_VALUE = 0
_VALUE_OR_END = 1  # behind [
_KEY = 2  # behind a comma in an object
_KEY_OR_END = 3  # behind {
_COLON = 4
_AFTER = 5  # behind a value
_SCALAR_PHASE = 6
_DONE = 7
_STRING = 8
_KEY_STRING = 9


class JsonScanner:
    """One JSON value. It is done behind its last character; a number or a word at the outermost
    level is done at the character that follows it.
    """

    def __init__(self, objects_only: bool = False) -> None:
        self._objects_only = objects_only
        self._phase = _VALUE
        self._stack = 1  # a bit for each level behind the leading 1: object or array
        self._held = ""  # of an escape or a scalar
        self._out: list[str] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def string_hazards(self) -> frozenset[str] | None:
        return STRING_HAZARDS if self._phase >= _STRING and not self._held else None

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def save(self) -> list[Any]:
        return [self._phase, self._stack.to_bytes(MAX_NESTING // 8 + 1)]

    def load(self, saved: list[Any]) -> None:
        self._phase = saved[0]
        self._stack = int.from_bytes(saved[1])

    def break_off(self) -> str:
        """Return the held text if the input may end behind it as the beginning of a JSON text."""
        pattern = _SCALAR_BEGINS if self._phase == _SCALAR_PHASE else _ESCAPE_BEGINS
        text = self._held if pattern.fullmatch(self._held) else ""
        self._held = ""
        return text

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        pos = start
        while pos < len(text):
            phase = self._phase
            if phase >= _STRING:
                pos = self._string(text, pos)
            elif phase == _SCALAR_PHASE:
                pos, failed = self._scalar(text, pos)
                if failed:
                    return pos, ScanStatus.FAILED
            elif text[pos] in BLANKS:
                end = _end(_SPACE, text, pos)
                self._out.append(text[pos:end])
                pos = end
                continue
            else:
                if not self._structure(text[pos], phase):
                    return pos, ScanStatus.FAILED
                if self._phase != _SCALAR_PHASE:  # whose first character is read again
                    self._out.append(text[pos])
                    pos += 1
            if self._phase == _DONE:
                return pos, ScanStatus.DONE
        return pos, ScanStatus.MORE

    def _structure(self, char: str, phase: int) -> bool:
        """Read a character outside strings and scalars; return True if it may stand here."""
        if char == '"':
            if phase in (_KEY, _KEY_OR_END):
                self._phase = _KEY_STRING
            elif phase <= _VALUE_OR_END and self._may_be_scalar():
                self._phase = _STRING
            else:
                return False
        elif char == ",":
            if phase != _AFTER:
                return False
            self._phase = _KEY if self._stack & 1 else _VALUE
        elif char == ":":
            if phase != _COLON:
                return False
            self._phase = _VALUE
        elif char in "{[":
            is_object = char == "{"
            if phase > _VALUE_OR_END or not (is_object or self._may_be_scalar()):
                return False
            if self._stack.bit_length() > MAX_NESTING:
                return False
            self._stack = self._stack << 1 | is_object
            self._phase = _KEY_OR_END if is_object else _VALUE_OR_END
        elif char in "}]":
            is_object = char == "}"
            first = _KEY_OR_END if is_object else _VALUE_OR_END
            if self._stack == 1 or self._stack & 1 != is_object or phase not in (_AFTER, first):
                return False
            self._stack >>= 1
            self._value_ended()
        else:
            if phase > _VALUE_OR_END or not self._may_be_scalar():
                return False
            if not (char in "-tfn" or "0" <= char <= "9"):
                return False
            self._phase = _SCALAR_PHASE
        return True

    def _may_be_scalar(self) -> bool:
        return self._stack != 1 or not self._objects_only

    def _value_ended(self) -> None:
        self._phase = _DONE if self._stack == 1 else _AFTER

    def _string(self, text: str, pos: int) -> int:
        if self._held:
            return self._escape(text, pos)
        end = _end(_STRING_RUN, text, pos)
        if end > pos:
            self._out.append(text[pos:end])
            if end == len(text):
                return end
        char = text[end]
        if char == "\\":
            self._held = char
        elif char == '"':
            self._out.append(char)
            if self._phase == _KEY_STRING:
                self._phase = _COLON
            else:
                self._value_ended()
        else:
            self._out.append(_CONTROLS.get(char) or f"\\u{ord(char):04x}")
        return end + 1

    def _escape(self, text: str, pos: int) -> int:
        """One character of an escape: the next, or the first that shows that there is none."""
        longer = self._held + text[pos]
        if _ESCAPE.fullmatch(longer):
            self._out.append(longer)
            self._held = ""
            return pos + 1
        if _ESCAPE_BEGINS.fullmatch(longer):
            self._held = longer
            return pos + 1
        if half := _HALF.match(longer):
            self._out.append(NO_HALF)
            self._held = longer[half.end() :][:-1]  # what may begin another escape
            return pos + (half.end() == len(longer))
        self._out.append("\\" + self._held)
        self._held = ""
        return pos

    def _scalar(self, text: str, pos: int) -> tuple[int, bool]:
        end = _end(_SCALAR_RUN, text, pos)
        room = MAX_SCALAR_CHARS - len(self._held)
        if end - pos > room:
            self._held += text[pos : pos + room]
            return pos + room, True
        self._held += text[pos:end]
        if end == len(text):
            return end, False
        if not _SCALAR.fullmatch(self._held):
            return end, True
        self._out.append(self._held)
        self._held = ""
        self._value_ended()
        return end, False


def without_halves(text: str) -> str:
    """A JSON text without escapes of half a surrogate pair."""
    if "\\u" not in text:
        return text
    return _ANY_ESCAPE.sub(lambda match: NO_HALF if _HALF.fullmatch(match[0]) else match[0], text)


def _end(pattern: re.Pattern[str], text: str, pos: int) -> int:
    """The end of the run that begins at `pos`; the pattern matches the empty run, too."""
    match = pattern.match(text, pos)
    assert match is not None
    return match.end()
