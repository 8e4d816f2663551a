"""The base of scanners of arguments that are not written as JSON: they return pieces of JSON, each
with the place in the text behind which it is decided.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from json.encoder import encode_basestring
from typing import Any, NamedTuple

from slipstream_worker.formats.scanners.scanner import BLANKS, ScanContext, ScanStatus

__all__ = ["Run", "TypedScanner", "escape_json", "read_until"]


class TypedScanner(ABC):
    """A scanner of arguments. It begins the call with its first piece."""

    def __init__(self, context: ScanContext) -> None:
        self.name = ""
        self.call_id = ""
        self.num_held = 0
        self._held = ""  # text that may be the beginning of a tag or a literal
        self._unquotable = context.unquotable
        self._types = (context.tools or {}).get(context.name, {})  # of the function's properties
        self._is_first = True  # nothing of the arguments' object was given
        self._has_begun = False
        self._ends_at_once = False  # what begins the call ends it, too, and is taken once more
        self._pieces: list[str] = []
        self._decided_at: int | None = None  # in the text of the present step

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        if self._ends_at_once:
            return start + 1, ScanStatus.DONE
        at = start
        while (status := self._status) is ScanStatus.MORE and at < len(text):
            behind = self._step(text, at)
            if self._count(behind - at, behind):
                return behind - self._ends_at_once, ScanStatus.BEGIN
            at = behind
        return at, status

    def feed_delimiter(self, literal: str) -> tuple[bool, ScanStatus]:
        if self._ends_at_once:
            return True, ScanStatus.DONE
        if not self._step_delimiter(literal):
            if self._status is ScanStatus.DONE:
                self._count(0, 0)
            return False, self._status
        if self._count(len(literal), 0):
            return not self._ends_at_once, ScanStatus.BEGIN
        return True, self._status

    def _is_word(self, literal: str) -> bool:
        """True if a delimiter that is no part of this element may stand in its strings as text."""
        return literal not in self._unquotable

    @property
    def _before_key(self) -> str:
        return "{" if self._is_first else ", "

    def take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    @property
    @abstractmethod
    def string_hazards(self) -> frozenset[str] | None: ...

    @abstractmethod
    def break_off(self) -> str: ...

    @abstractmethod
    def save(self) -> list[Any]: ...

    @abstractmethod
    def load(self, saved: list[Any]) -> None: ...

    @property
    @abstractmethod
    def _status(self) -> ScanStatus: ...

    @abstractmethod
    def _step(self, text: str, at: int) -> int:
        """Take one or more characters from `at` on; returns the index behind them."""

    @abstractmethod
    def _step_delimiter(self, literal: str) -> bool:
        """Read a delimiter that is one token; return True if it was taken. One that is not taken
        may end the arguments.
        """

    def _read_tag(self, tags: Sequence[str], text: str, at: int) -> tuple[int, str | None]:
        """Read blanks from `at` on, and one of the tags. Returns the index behind what was taken,
        and the tag: empty while it is not complete, None where something else stands.
        """
        while at < len(text):
            char = text[at]
            if not self._held and char in BLANKS:
                at += 1
                self._drop(at)
                continue
            token = self._held + char
            if not any(tag.startswith(token) for tag in tags):
                return at, None
            at += 1
            if token in tags:
                self._held = ""
                return at, token
            self._held = token
        return at, ""

    def _emit(self, piece: str, at: int) -> None:
        """Give a piece that is decided at `at` in the text: what was taken behind it is held."""
        self._pieces.append(piece)
        self._decided_at = at

    def _drop(self, at: int) -> None:
        """Count the text before `at` as decided: blanks, which belong to the format."""
        if self._has_begun:
            self._decided_at = at

    def _count(self, num_taken: int, behind: int) -> bool:
        """Keep account of what is held behind a step; return True if the call has begun with it."""
        if self._decided_at is None:
            self.num_held += num_taken
            return False
        self.num_held = behind - self._decided_at
        self._decided_at = None
        if self._has_begun:
            return False
        self._has_begun = True
        self._ends_at_once = self._status is ScanStatus.DONE
        return True


def escape_json(text: str) -> str:
    """`text` as it stands inside the quotes of a JSON string."""
    return encode_basestring(text)[1:-1]


class Run(NamedTuple):
    """The result of `read_until`: decided text, the text held behind it, and the position behind
    both. is_end: the literal stood behind `text`.
    """

    text: str
    held: str
    behind: int
    is_end: bool


def read_until(literal: str, held: str, text: str, at: int, drops_newline: bool = False) -> Run:
    """Read from `at` on up to `literal`; `held` is what the last call held.

    Held is what may belong to the literal, with drops_newline also a line break before it. A run
    may end before the text does.
    """
    if held:
        buffer, pos = held, at
        while pos < len(text):
            buffer += text[pos]
            pos += 1
            if buffer.endswith(literal):
                before = buffer[: -len(literal)]
                return Run(before.removesuffix("\n") if drops_newline else before, "", pos, True)
            start = _held_from(buffer, 0, literal, drops_newline)
            if start:
                return Run(buffer[:start], buffer[start:], pos, False)
        return Run("", buffer, pos, False)
    found = text.find(literal, at)
    if found >= 0:
        before = text[at:found]
        before = before.removesuffix("\n") if drops_newline else before
        return Run(before, "", found + len(literal), True)
    start = _held_from(text, at, literal, drops_newline)
    return Run(text[at:start], text[start:], len(text), False)


def _held_from(text: str, at: int, literal: str, drops_newline: bool) -> int:
    """The start of the longest suffix of `text` that is a proper prefix of `literal`."""
    start = text.find(literal[0], max(at, len(text) - len(literal) + 1))
    while start >= 0 and not literal.startswith(text[start:]):
        start = text.find(literal[0], start + 1)
    if start < 0:
        start = len(text)
    return start - 1 if drops_newline and start > at and text[start - 1] == "\n" else start
