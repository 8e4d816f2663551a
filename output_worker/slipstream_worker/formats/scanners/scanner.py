"""The interface of scanners, and the scanners of single words: a name, an id.

A scanner reads one element of a call and is fed text in pieces of any size. What it gives does not
depend on how the text was divided.
"""

from __future__ import annotations

import re
from collections.abc import Set
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from slipstream_ipc.formats.answer_format import CallId, CallIndex, Name, NamedCallId
from slipstream_ipc.formats.tool_types import ToolTypes
from slipstream_ipc.messages.answer import MAX_NAME_CHARS

BLANKS = " \t\r\n"
MAX_HELD_CHARS = 2**18  # of one value; all that is held leaves in one message

_BLANKS = re.compile(f"[{BLANKS}]*")


class ScanStatus(IntEnum):
    """A scanner's verdict on the text that it was just fed."""

    MORE = 0  # all of it was taken; more is expected
    BEGIN = 1  # the call has begun: its name is complete, and it is certain that there is one
    DONE = 2  # the element is complete; what follows was not taken
    FAILED = 3  # what follows cannot continue the element; it was not taken


class ScanContext(NamedTuple):
    """The context of a scanner: its call and its format. name: what was read of it before; empty:
    nothing. tokens: the delimiters that come by `feed_delimiter`. unquotable: those that cannot be
    words within an argument.
    """

    name: str
    tools: ToolTypes | None
    tokens: frozenset[str] = frozenset()
    unquotable: Set[str] = frozenset()


class Scanner(Protocol):
    """Reads one element. After DONE or FAILED nothing more is fed.

    name, call_id: what was read of them; empty: nothing. A scanner of arguments says BEGIN exactly
    once, before DONE. num_held: characters at the end of what was taken whose output is not decided
    yet; it counts only after BEGIN.

    string_hazards: not None while the scanner is within a string with nothing held, where text
    without these characters is output as it stands and changes nothing.
    """

    name: str
    call_id: str

    @property
    def num_held(self) -> int: ...

    @property
    def string_hazards(self) -> frozenset[str] | None: ...

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        """Take text from `start` on; returns the position behind what was taken."""

    def feed_delimiter(self, literal: str) -> tuple[bool, ScanStatus]:
        """A delimiter that is one token; returns whether it was taken."""

    def take(self) -> str:
        """The output since the last call: a piece of the arguments."""

    def break_off(self) -> str:
        """The answer goes on no more, or not as the element: all that is held if it is a valid
        beginning of what was expected, as output; else nothing.
        """

    def save(self) -> list[Any]:
        """Plain values from which a scanner of this element can go on; asked while nothing is held
        and the call has begun.
        """

    def load(self, saved: list[Any]) -> None:
        """Go on from what `save` gave."""


class WordScanner:
    """Reads a name, an id or a number: the characters up to one that stops it."""

    def __init__(self, element: Name | CallId | NamedCallId | CallIndex) -> None:
        self.name = ""
        self.call_id = ""
        self.num_held = 0
        self.string_hazards = None
        self._element = element
        self._stops = frozenset(element.stops)
        self._word: list[str] = []
        self._len = 0

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        pos = end = start if self._len else skip_blanks(text, start)
        stops = self._stops
        bound = pos + MAX_NAME_CHARS - self._len
        while end < len(text) and text[end] not in stops:
            if end == bound:
                return end, ScanStatus.FAILED
            end += 1
        self._word.append(text[pos:end])
        self._len += end - pos
        if end == len(text):
            return end, ScanStatus.MORE
        return end, self._done()

    def feed_delimiter(self, literal: str) -> tuple[bool, ScanStatus]:
        return False, self._done()

    def take(self) -> str:
        return ""

    def break_off(self) -> str:
        return ""

    def save(self) -> list[Any]:
        return []

    def load(self, saved: list[Any]) -> None:
        pass

    def _done(self) -> ScanStatus:
        word = "".join(self._word)
        match self._element:
            case Name():
                self.name = word
            case CallId():
                self.call_id = word
            case NamedCallId(prefix, separator):
                self.call_id = word
                self.name = word.removeprefix(prefix).rpartition(separator)[0] or word
        return ScanStatus.DONE if word else ScanStatus.FAILED


def skip_blanks(text: str, pos: int) -> int:
    """The position behind the blanks at `pos`."""
    match = _BLANKS.match(text, pos)
    assert match is not None
    return match.end()
