"""Reads the arguments of a call that is written as key and value pairs and gives them as JSON.

Two spellings: Python's, `f(a=1, b="x")`, and Gemma's, `call:f{a:1,b:<escape>x<escape>}`. Strings
leave as they come; keys, numbers and words when they are complete. Every character is looked at
once and nothing is evaluated.

- The output is always a prefix of a JSON object, and a whole object once the reading is done.
- Of text that breaks the rules, what came before the fault has been given.
"""

from __future__ import annotations

import re
from enum import IntEnum
from json.encoder import encode_basestring
from typing import Any, Final

from slipstream_ipc.formats.answer_format import KeywordArguments
from slipstream_worker.formats.scanners.json_scanner import MAX_NESTING, NO_HALF, STRING_HAZARDS
from slipstream_worker.formats.scanners.scanner import BLANKS, ScanContext, ScanStatus
from slipstream_worker.formats.scanners.typed_scanner import TypedScanner, escape_json, read_until

__all__ = ["WORDS_AS_JSON", "ArgumentState", "KeywordArgumentsScanner", "python_container_as_json"]

_MAX_TOKEN_CHARS: Final = 1024  # of a key; and of a number, or a word
_STRUCTURE: Final = frozenset(",:()[]{}'\"" + BLANKS)
_CLOSERS: Final = {"(": ")", "[": "]", "{": "}"}
_ENDS_VALUE: Final = frozenset(",)]}:" + BLANKS)
_ENDS_BARE: Final = frozenset(",]}")  # where strings may stand without their delimiter
_NUMBER: Final = re.compile(r"([+-]?)(\d[\d_]*)?(?:(\.)(\d[\d_]*)?)?(?:[eE]([+-]?\d+))?", re.ASCII)
WORDS_AS_JSON: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "b": "\b",
    "f": "\f",
    "a": "\a",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "/": "/",
    "\n": "",
}
_HEX_LEN: Final = {"x": 2, "u": 4, "U": 8}
_HEX: Final = frozenset("0123456789abcdefABCDEF")
_OCTAL: Final = frozenset("01234567")
# half of a surrogate pair, as escapes of Python's write it
_HIGH_HALF: Final = re.compile(r"\\(?:u|U0000)([dD][89abAB][0-9a-fA-F]{2})")
_LOW_HALF: Final = re.compile(r"\\(?:u|U0000)([dD][c-fC-F][0-9a-fA-F]{2})")
_LOW_BEGINS: Final = re.compile(r"\\(?:(?:u|U0{4})(?:[dD](?:[c-fC-F][0-9a-fA-F]?)?)?|U0{0,3})?")
_IN_QUOTES: Final = {quote: re.compile(rf"[{quote}\\]") for quote in "'\""}


class ArgumentState(IntEnum):
    """The element that the next character belongs to."""

    KEY = 1  # a key, or the end of its object
    BARE_KEY = 2
    SEPARATOR = 3  # between a key and its value
    VALUE = 4  # a value; in a list, also its end
    WORD = 5  # a number, True, None …
    OPENING = 6  # behind the first quote: an empty string, or three quotes
    STRING = 7
    ESCAPE = 8
    CLOSING = 9  # behind a quote that closes the string if the next character agrees
    DELIMITER = 10  # in what may be the delimiter that opens a string
    COMMA = 11  # behind a value
    ENDED = 12
    FAILED = 13


def number_as_json(text: str) -> str | None:
    """A number of Python's as JSON writes it; None if it is none."""
    match = _NUMBER.fullmatch(text)
    if match is None:
        return None
    sign, whole, point, fraction, exponent = match.groups()
    if whole is None and fraction is None:
        return None
    whole = (whole or "0").replace("_", "").lstrip("0") or "0"
    number = ("-" if sign == "-" else "") + whole
    if point:
        number += "." + ((fraction or "").replace("_", "") or "0")
    return number + (f"e{exponent}" if exponent else "")


class KeywordArgumentsScanner(TypedScanner):
    """Reads the element `KeywordArguments`: from behind the function's name up to the bracket that
    closes the arguments.
    """

    def __init__(
        self, element: KeywordArguments, context: ScanContext, is_single: bool = False
    ) -> None:
        """is_single: read one list or dict instead of arguments."""
        super().__init__(context)
        delimiter = element.string_delimiter
        self._has_delimiter = delimiter is not None
        self._literal = delimiter.literal if delimiter else ""
        is_token = delimiter is not None and delimiter.literal in context.tokens
        is_text = delimiter is not None and (delimiter.as_text or not is_token)
        self._delimiter = self._literal if is_text else ""
        self._ends_word = _ENDS_BARE if delimiter else _ENDS_VALUE
        self._top_separator = element.separator
        self._is_single = is_single
        self._stack = "[" if is_single else element.opening
        self._held = ""  # what is held: of a key, a word, an escape, a delimiter
        self._quote = ""
        self._is_key = False  # the string that is being read is a key
        self._needs_comma = False
        self._is_first = not is_single  # nothing of the object was given
        self.phase = ArgumentState.VALUE if is_single else ArgumentState.KEY

    @property
    def string_hazards(self) -> frozenset[str] | None:
        if self.phase != ArgumentState.STRING or self.num_held:
            return None
        if not self._has_delimiter:
            return STRING_HAZARDS | {self._quote[0]}
        return STRING_HAZARDS | frozenset(self._delimiter[:1])

    def break_off(self) -> str:
        match self.phase:
            case ArgumentState.BARE_KEY:
                self._comma(0)
                self._emit('"' + escape_json(self._held), 0)
            case ArgumentState.WORD if beginning := self._beginning(self._held):
                self._comma(0)
                self._emit(beginning, 0)
            case ArgumentState.OPENING:
                self._comma(0)
                self._emit('"' * len(self._quote), 0)
            case ArgumentState.CLOSING:
                self._emit('"', 0)
            case ArgumentState.STRING | ArgumentState.ESCAPE:
                self._emit(escape_json(self._held), 0)
        return self.take()

    def _beginning(self, token: str) -> str:
        """The JSON form of a word or a number that breaks off; empty if it is neither."""
        for word, value in WORDS_AS_JSON.items():
            if word.startswith(token):
                return value[: len(token)]
        return self._word(token)

    def save(self) -> list[Any]:
        return [int(self.phase), self._stack, self._quote, self._is_key, self._needs_comma]

    def load(self, saved: list[Any]) -> None:
        phase, self._stack, self._quote, self._is_key, self._needs_comma = saved
        self.phase = ArgumentState(phase)
        self._is_first = False
        self._has_begun = True

    @property
    def _status(self) -> ScanStatus:
        if self.phase == ArgumentState.ENDED:
            return ScanStatus.DONE
        return ScanStatus.FAILED if self.phase == ArgumentState.FAILED else ScanStatus.MORE

    def _step(self, text: str, at: int) -> int:
        match self.phase:
            case ArgumentState.STRING:
                return self._string(text, at)
            case ArgumentState.WORD | ArgumentState.BARE_KEY:
                return self._run(text, at)
            case _:
                return self._char(text[at], at)

    def _step_delimiter(self, literal: str) -> bool:
        if literal == self._literal:
            if self.phase == ArgumentState.STRING:
                self._end_string(0)
                return True
            if self.phase in (ArgumentState.KEY, ArgumentState.VALUE):
                self._is_key = self.phase == ArgumentState.KEY
                self._open_string(literal, 0)
                return True
        elif self._is_word(literal) and self._is_in_string():
            self._emit(escape_json(self._held + literal), 0)
            self._held = ""
            self.phase = ArgumentState.STRING
            return True
        self.phase = ArgumentState.FAILED
        return False

    def _is_in_string(self) -> bool:
        """True if the next character is text of a string, unless it is a quote or a bracket."""
        if self.phase == ArgumentState.OPENING and len(self._quote) == 1:
            self._open_string(self._quote, 0)
        return self.phase in (ArgumentState.STRING, ArgumentState.ESCAPE, ArgumentState.CLOSING)

    # -- one character, by phase; each returns the index behind what it took

    def _char(self, char: str, at: int) -> int:
        match self.phase:
            case (
                ArgumentState.KEY
                | ArgumentState.VALUE
                | ArgumentState.COMMA
                | ArgumentState.SEPARATOR
            ):
                if char in BLANKS:
                    self._drop(at + 1)
                    return at + 1
                return self._structure(char, at)
            case ArgumentState.OPENING:
                return self._opening(char, at)
            case ArgumentState.CLOSING:
                return self._closing(char, at)
            case ArgumentState.DELIMITER:
                return self._open_delimiter(char, at)
            case _:
                return self._escape(char, at)

    def _structure(self, char: str, at: int) -> int:
        phase = self.phase
        if char == _CLOSERS[self._stack[-1]] and phase != ArgumentState.SEPARATOR:
            if phase == ArgumentState.VALUE and self._stack[-1] != "[":
                return self._fail(at)  # a key without a value
            self._close(at + 1)
            return at + 1
        if phase == ArgumentState.COMMA:
            if char != ",":
                return self._fail(at)
            self._needs_comma = True
            self.phase = ArgumentState.VALUE if self._stack[-1] == "[" else ArgumentState.KEY
            return at + 1
        if phase == ArgumentState.SEPARATOR:
            if char != self._separator:
                return self._fail(at)
            self._emit(": ", at + 1)
            self.phase = ArgumentState.VALUE
            return at + 1
        if self._delimiter and char == self._delimiter[0]:
            self._held = char
            self._is_key = phase == ArgumentState.KEY
            self.phase = ArgumentState.DELIMITER
            return self._opened(at + 1)
        if not self._has_delimiter and char in "'\"" and self._may_be_string:
            self._quote = char
            self._is_key = phase == ArgumentState.KEY
            self.phase = ArgumentState.OPENING
            return at + 1
        if phase == ArgumentState.KEY:
            if (len(self._stack) > 1 and not self._has_delimiter) or char in _STRUCTURE:
                return self._fail(at)
            self.phase = ArgumentState.BARE_KEY
            return at
        if char in "[{":
            if len(self._stack) >= MAX_NESTING:
                return self._fail(at)
            self._comma(at + 1)
            self._stack += char
            self._emit(char, at + 1)
            self.phase = ArgumentState.VALUE if char == "[" else ArgumentState.KEY
            return at + 1
        if char in _STRUCTURE:
            return self._fail(at)
        self.phase = ArgumentState.WORD
        return at

    @property
    def _separator(self) -> str:
        return self._top_separator if len(self._stack) == 1 else ":"

    @property
    def _may_be_string(self) -> bool:
        """True if quotes open a string here: not in place of the name of a Python argument."""
        return self.phase == ArgumentState.VALUE or len(self._stack) > 1

    def _comma(self, at: int) -> None:
        """Emit what precedes an item: a comma, or the bracket that opens the object."""
        if self._is_first:
            self._emit("{", at)
            self._is_first = False
        if self._needs_comma:
            self._emit(", ", at)
            self._needs_comma = False

    def _close(self, at: int) -> None:
        opening = self._stack[-1]
        self._stack = self._stack[:-1]
        self._needs_comma = False
        self._comma(at)
        self._emit("]" if opening == "[" else "}", at)
        is_end = not self._stack or (self._is_single and len(self._stack) == 1)
        self.phase = ArgumentState.ENDED if is_end else ArgumentState.COMMA

    def _fail(self, at: int) -> int:
        self.phase = ArgumentState.FAILED
        return at

    # -- keys and words without quotes

    def _run(self, text: str, at: int) -> int:
        """A bare key up to its separator, or a word up to what ends a value."""
        is_key = self.phase == ArgumentState.BARE_KEY
        end = at
        bound = at + _MAX_TOKEN_CHARS - len(self._held)
        ends = self._separator if is_key else self._ends_word
        while end < len(text):
            char = text[end]
            if char in ends:
                break
            if end == bound:
                return self._fail(end)
            if is_key and char in _STRUCTURE and char not in BLANKS:
                return self._fail(end)
            end += 1
        self._held += text[at:end]
        if end < len(text):
            token, self._held = self._held, ""
            if is_key:
                self._comma(end)
                self._emit(encode_basestring(token.rstrip(BLANKS)), end)
                self.phase = ArgumentState.SEPARATOR
            else:
                word = self._word(token)
                if not word:
                    return self._fail(end)
                self._comma(end)
                self._emit(word, end)
                self.phase = ArgumentState.COMMA
        return end

    def _word(self, token: str) -> str:
        """A word or a number as JSON; empty if it is neither, and strings have to be marked."""
        if self._has_delimiter:
            token = token.rstrip(BLANKS)
            return WORDS_AS_JSON.get(token) or number_as_json(token) or encode_basestring(token)
        return WORDS_AS_JSON.get(token) or number_as_json(token) or ""

    # -- strings

    def _open_string(self, quote: str, at: int) -> None:
        self._quote = quote
        self._comma(at)
        self._emit('"', at)
        self.phase = ArgumentState.STRING

    def _end_string(self, at: int) -> None:
        self._emit('"', at)
        self._held = self._quote = ""
        self.phase = ArgumentState.SEPARATOR if self._is_key else ArgumentState.COMMA

    def _opening(self, char: str, at: int) -> int:
        quote = self._quote[0]
        if char == quote and len(self._quote) == 1:
            self._quote += quote
            return at + 1
        if char == quote:
            self._open_string(quote * 3, at + 1)
            return at + 1
        is_empty = len(self._quote) == 2
        self._open_string(quote, at)
        if is_empty:
            self._end_string(at)
        return at

    def _open_delimiter(self, char: str, at: int) -> int:
        self._held += char
        return self._opened(at + 1)

    def _opened(self, at: int) -> int:
        """Decide what begins like the delimiter of strings, at the index behind it."""
        delimiter, token = self._delimiter, self._held
        if not delimiter.startswith(token):
            return self._fail(at)
        if token == delimiter:
            self._held = ""
            self._open_string(delimiter, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._has_delimiter:
            return self._delimited(text, at)
        quote = self._quote[0]
        match = _IN_QUOTES[quote].search(text, at)
        end = match.start() if match else len(text)
        if end > at:
            self._emit(escape_json(text[at:end]), end)
        if match is None:
            return end
        if match[0] == "\\":
            self.phase = ArgumentState.ESCAPE
        else:
            self.phase = ArgumentState.CLOSING
        self._held = match[0]
        return end + 1

    def _closing(self, char: str, at: int) -> int:
        """Behind a quote: it ends the string where the next character may follow a value; else it
        is part of the text, as templates that do not escape write it.
        """
        quote = self._quote[0]
        if len(self._quote) == 3:
            if char == quote and len(self._held) < 3:
                self._held += char
                if len(self._held) == 3:
                    self._end_string(at + 1)
                return at + 1
        elif char in _ENDS_VALUE:
            self._end_string(at)
            return at
        self._emit(escape_json(self._held), at)
        self._held = ""
        self.phase = ArgumentState.STRING
        return at

    def _escape(self, char: str, at: int) -> int:
        token = self._held + char
        if high := _HIGH_HALF.match(self._held):
            return self._behind_half(high, token[high.end() :], at)
        kind = token[1]
        if kind in _HEX_LEN:
            digits = token[2:]
            if digits and digits[-1] not in _HEX:
                return self._unescaped(self._held, at)
            if len(digits) < _HEX_LEN[kind]:
                self._held = token
                return at + 1
            code = int(digits, 16)
            if code > 0x10FFFF:
                return self._unescaped(token, at + 1)
            if 0xD800 <= code < 0xDC00:  # half of a pair: the other half may follow
                self._held = token
                return at + 1
            if 0xDC00 <= code < 0xE000:
                return self._unescaped("", at + 1, NO_HALF)
            return self._unescaped(chr(code), at + 1)
        if kind in _OCTAL:
            if char not in _OCTAL:
                return self._unescaped(chr(int(self._held[1:], 8)), at)
            if len(token) < 4:
                self._held = token
                return at + 1
            return self._unescaped(chr(int(token[1:], 8)), at + 1)
        return self._unescaped(_ESCAPES.get(kind, token), at + 1)

    def _behind_half(self, high: re.Match[str], behind: str, at: int) -> int:
        """Behind the first half of a surrogate pair: the pair, or U+FFFD in place of the half."""
        if low := _LOW_HALF.fullmatch(behind):
            return self._unescaped("", at + 1, f"\\u{high[1]}\\u{low[1]}".lower())
        if _LOW_BEGINS.fullmatch(behind):
            self._held += behind[-1]
            return at + 1
        held = behind[:-1]
        self._unescaped("", at - len(held), NO_HALF)
        if held:
            self._held = held
            self.phase = ArgumentState.ESCAPE
        return at

    def _unescaped(self, text: str, at: int, written: str = "") -> int:
        self._emit(written or escape_json(text), at)
        self._held = ""
        self.phase = ArgumentState.STRING
        return at

    def _delimited(self, text: str, at: int) -> int:
        """In a string between delimiters: nothing is escaped."""
        delimiter = self._delimiter
        if not delimiter:
            self._emit(escape_json(text[at:]), len(text))
            return len(text)
        run = read_until(delimiter, self._held, text, at)
        self._held = run.held
        if run.text:
            self._emit(escape_json(run.text), run.behind - len(run.held))
        if run.is_end:
            self._end_string(run.behind)
        return run.behind


def python_container_as_json(text: str) -> str | None:
    """A list or a dict as Python prints it, as JSON; None if `text` is not exactly one."""
    scanner = KeywordArgumentsScanner(KeywordArguments(), ScanContext("", None), is_single=True)
    end, status = scanner.feed(text, 0)
    while status is ScanStatus.BEGIN:
        end, status = scanner.feed(text, end)
    return scanner.take() if status is ScanStatus.DONE and end == len(text) else None
