"""Reads the arguments of a call that is written as tagged parameters and gives them as JSON.

`<parameter=K>V</parameter>`, `<arg_key>K</arg_key><arg_value>V</arg_value>`, `<parameter name="K">`
and their like. Values are not quoted, so the function's property types say what a value is. A
string leaves as it comes; any other value when it is complete, and as a string if it is none.

- The output is always a prefix of a JSON object, and a whole object once the reading is done.
- Models forget the tag that closes the last value. The tag that ends the arguments ends it, too,
  where only blanks and the token behind the call follow.
- Of text that breaks the rules, what came before the fault has been given.
"""

from __future__ import annotations

from enum import IntEnum
from json.encoder import encode_basestring
from typing import Any, Final

from slipstream_ipc.formats.answer_format import TaggedParameters, delimiters
from slipstream_worker.formats.scanners.json_scanner import STRING_HAZARDS, JsonScanner
from slipstream_worker.formats.scanners.scanner import (
    BLANKS,
    MAX_HELD_CHARS,
    ScanContext,
    ScanStatus,
)
from slipstream_worker.formats.scanners.typed_scanner import (
    Run,
    TypedScanner,
    escape_json,
    read_until,
)
from slipstream_worker.formats.scanners.values import WORD_CHARS, unescape_attribute, value_as_json

__all__ = ["TagPhase", "TaggedParametersScanner"]

_MAX_TAG_CHARS: Final = 1024  # of a key with its attributes
_MAX_TAIL_CHARS: Final = 64  # of the tag that ends the arguments within a value, with blanks
_MAX_WORD_CHARS: Final = 4096  # of a number
_STRING_ALONE: Final = ("string",)


class TagPhase(IntEnum):
    """The element that the next character belongs to."""

    GAP = 1  # between parameters
    KEY = 2
    TAG = 3  # attributes behind the key
    BEHIND_KEY = 4  # up to the tag that opens the value
    VALUE_BEGINS = 5
    STRING = 6
    WORD = 7  # a number, true, null …
    CONTAINER = 8  # a list, an object or a quoted string
    ENDED = 9
    FAILED = 10


class TaggedParametersScanner(TypedScanner):
    """Reads the element `TaggedParameters`: from behind the function's name up to the literal that
    ends the arguments.
    """

    def __init__(self, element: TaggedParameters, context: ScanContext) -> None:
        super().__init__(context)
        self._element = element
        self._opening = element.opening.literal
        self._key_end = element.key_end.literal
        self._closing = element.closing.literal
        self._end = element.end.literal
        self._value_opening = element.value_opening.literal if element.value_opening else ""
        self._ids = frozenset(  # that are no tags where they stand as text
            part.literal
            for part in delimiters(element)
            if part.literal in context.tokens and not part.as_text
        )
        by_text = "" if self._closing in self._ids else self._closing[0]
        self._hazards = STRING_HAZARDS | frozenset(by_text)
        self._held = ""  # what is held: of a tag, a key, or the end of a value
        self._tail = ""  # of a value, before `_held`: it may be the tag that ends the arguments
        self._can_end_open = self._closing not in self._ids and self._end not in self._ids
        self._parts: list[str] = []  # of a value that is not decided
        self._value_len = 0
        self._has_value_begun = False  # a character of it that is no blank was seen
        self._value_types: tuple[str, ...] = ()
        self.phase = TagPhase.GAP

    @property
    def string_hazards(self) -> frozenset[str] | None:
        if self.phase != TagPhase.STRING or self.num_held:
            return None
        return self._hazards

    def break_off(self) -> str:
        match self.phase:
            case TagPhase.KEY:
                key = self._unescaped(self._held)
                self._emit(self._before_key + '"' + escape_json(key), 0)
            case TagPhase.STRING:
                self._emit(escape_json(self._tail + self._held), 0)
            case TagPhase.WORD | TagPhase.CONTAINER:
                raw = ("".join(self._parts) + self._tail).lstrip(BLANKS)
                scanner = JsonScanner()
                if scanner.feed(raw, 0)[1] is ScanStatus.FAILED:
                    self._emit('"' + escape_json(raw + self._held), 0)
                else:
                    self._emit(scanner.take() + scanner.break_off(), 0)
        return self.take()

    def save(self) -> list[Any]:
        return [int(self.phase), self._is_first, self._value_types]

    def load(self, saved: list[Any]) -> None:
        phase, self._is_first, value_types = saved
        self._value_types = tuple(value_types)
        self.phase = TagPhase(phase)
        self._has_begun = True

    @property
    def _status(self) -> ScanStatus:
        if self.phase == TagPhase.ENDED:
            return ScanStatus.DONE
        return ScanStatus.FAILED if self.phase == TagPhase.FAILED else ScanStatus.MORE

    def _step(self, text: str, at: int) -> int:
        match self.phase:
            case TagPhase.GAP | TagPhase.BEHIND_KEY:
                return self._gap(text, at)
            case TagPhase.KEY | TagPhase.TAG:
                return self._tag(text, at)
            case TagPhase.VALUE_BEGINS:
                return self._value_begins(text, at)
            case _:
                return self._value(text, at)

    def _step_delimiter(self, literal: str) -> bool:
        """A delimiter that means nothing here is part of a value, else a fault."""
        match self.phase:
            case TagPhase.GAP if not self._held and literal in (self._opening, self._end):
                self._enter(literal, 0)
            case TagPhase.KEY if literal == self._key_end:
                key, self._held = self._held, ""
                self._key_ends(key, 0)
            case TagPhase.BEHIND_KEY if literal == self._value_opening and not self._held:
                self._enter(literal, 0)
            case TagPhase.VALUE_BEGINS if literal == self._closing:
                self._choose(0)
                self._value_ends(0)
            case TagPhase.STRING | TagPhase.WORD | TagPhase.CONTAINER if literal == self._closing:
                self._take(self._held.removesuffix("\n"), 0)
                self._value_ends(0)
            case TagPhase.VALUE_BEGINS if self._is_word(literal):
                self._choose(0)
                self._take(literal, 0)
            case TagPhase.STRING | TagPhase.WORD | TagPhase.CONTAINER if self._is_word(literal):
                held, self._held, self._tail = self._tail + self._held, "", ""
                self._take(held + literal, 0)
            case TagPhase.STRING | TagPhase.WORD | TagPhase.CONTAINER if self._has_end_tag:
                self._value_ends(0)
                self._emit("}", 0)
                self.phase = TagPhase.ENDED
                return False
            case TagPhase.WORD | TagPhase.CONTAINER if self._is_closed_by_end():
                return False
            case _:
                self.phase = TagPhase.FAILED
                return False
        return True

    def _is_closed_by_end(self) -> bool:
        """End the arguments if the last value, with no tag of its own behind it, is followed by
        their end; return True if they ended. For a string this is not known: it was emitted
        already.
        """
        raw = ("".join(self._parts) + self._held).rstrip(BLANKS)
        if not raw.endswith(self._end):
            return False
        self._parts = [raw.removesuffix(self._end)]
        self._value_ends(0)
        self._emit("}", 0)
        self.phase = TagPhase.ENDED
        return True

    # -- tags

    def _gap(self, text: str, at: int) -> int:
        """Between tags: blanks, then the next one."""
        is_behind_key = self.phase == TagPhase.BEHIND_KEY
        tags = [self._value_opening] if is_behind_key else [self._opening, self._end]
        at, tag = self._read_tag([tag for tag in tags if tag not in self._ids], text, at)
        if tag is None:
            self.phase = TagPhase.FAILED
        elif tag:
            self._enter(tag, at)
        return at

    def _enter(self, tag: str, at: int) -> None:
        if self.phase == TagPhase.BEHIND_KEY:
            self.phase = TagPhase.VALUE_BEGINS
        elif tag == self._opening:
            self.phase = TagPhase.KEY
        else:
            self._emit("{}" if self._is_first else "}", at)
            self.phase = TagPhase.ENDED

    def _tag(self, text: str, at: int) -> int:
        """A key, or attributes behind it, up to the literal that ends it."""
        attribute = self._element.attribute
        end = attribute.end if attribute and self.phase == TagPhase.TAG else self._key_end
        held = len(self._held)
        if end in self._ids:
            bound = at + _MAX_TAG_CHARS - held
            self._held += text[at:bound]
            if len(text) <= bound:
                return len(text)
            self.phase = TagPhase.FAILED
            return bound
        bound = at + _MAX_TAG_CHARS + len(end) - 1 - held  # here the tag has to end
        buffer = self._held + text[at : bound + 1]
        found = buffer.find(end, max(0, held - len(end) + 1))
        if found < 0 and len(text) <= bound:
            self._held = buffer
            return len(text)
        if found < 0:
            self.phase = TagPhase.FAILED
            return bound
        self._held = ""
        behind = at + found + len(end) - held
        if self.phase == TagPhase.KEY:
            self._key_ends(buffer[:found], behind)
        else:
            assert attribute is not None
            if f'{attribute.name}="{attribute.string}"' in buffer[:found]:
                self._value_types = _STRING_ALONE
            elif f'{attribute.name}="' in buffer[:found]:
                self._value_types = ()
            self._behind_tag()
        return behind

    def _key_ends(self, key: str, at: int) -> None:
        key = self._unescaped(key)
        self._emit(self._before_key + encode_basestring(key) + ": ", at)
        self._is_first = False
        types = self._types.get(key, "")
        self._value_types = tuple(types.split("|")) if types else ()
        if self._element.attribute is not None:
            self.phase = TagPhase.TAG
        else:
            self._behind_tag()

    def _unescaped(self, key: str) -> str:
        attribute = self._element.attribute
        if attribute is None or not attribute.is_escaped:
            return key
        return unescape_attribute(key)

    def _behind_tag(self) -> None:
        opening = self._value_opening
        self.phase = TagPhase.BEHIND_KEY if opening else TagPhase.VALUE_BEGINS

    # -- values

    def _value_begins(self, text: str, at: int) -> int:
        """Skip the one line break that belongs to the tag, then choose by type."""
        if self._element.trims_newline and text[at] == "\n":
            at += 1
            self._drop(at)
        self._choose(at)
        return at

    def _choose(self, at: int) -> None:
        types = self._value_types
        self._value_len = 0
        self._has_value_begun = False
        if types == _STRING_ALONE:
            self._emit('"', at)
            self.phase = TagPhase.STRING
        else:
            self.phase = TagPhase.WORD

    def _value(self, text: str, at: int) -> int:
        """Up to the tag that closes the value."""
        if self._closing in self._ids:
            run = self._up_to_newline(text, at)
        else:
            drops_newline = self._element.trims_newline
            run = read_until(self._closing, self._held, text, at, drops_newline)
        self._held = run.held
        taken = self._tail + run.text
        cut = self._tail_begins(taken) if self._can_end_open and not run.is_end else len(taken)
        self._tail = taken[cut:]
        self._take(taken[:cut], run.behind - len(run.held) - len(self._tail))
        if run.is_end:
            self._value_ends(run.behind)
        return run.behind

    def _tail_begins(self, text: str) -> int:
        """The position, in the text of a value that may go on, of the tag that ends the arguments;
        the end of the text if there is none.
        """
        begin = text.rfind("<")
        if begin < 0 or len(text) - begin > _MAX_TAIL_CHARS:
            return len(text)
        tail = text[begin:]
        if not self._end.startswith(tail.rstrip(BLANKS) if self._end in tail else tail):
            return len(text)
        return begin - (self._element.trims_newline and text[:begin].endswith("\n"))

    @property
    def _has_end_tag(self) -> bool:
        """True if all that is held is the tag that ends the arguments, and blanks."""
        return (self._tail + self._held).strip(BLANKS) == self._end

    def _up_to_newline(self, text: str, at: int) -> Run:
        """All of the text, but a line break at its end, which may be the last before the tag."""
        taken = self._held + text[at:]
        held = "\n" if self._element.trims_newline and taken.endswith("\n") else ""
        return Run(taken.removesuffix(held), held, len(text), False)

    def _take(self, text: str, at: int) -> None:
        """Characters that belong to the value."""
        if self.phase == TagPhase.STRING:
            if text:
                self._emit(escape_json(text), at)
            return
        self._value_len += len(text)
        if self.phase == TagPhase.WORD:
            first = "" if self._has_value_begun else text.lstrip(BLANKS)[:1]
            self._has_value_begun = self._has_value_begun or bool(first)
            if first and first in '{["':
                self.phase = TagPhase.CONTAINER
            elif not WORD_CHARS.issuperset(text) or self._value_len > _MAX_WORD_CHARS:
                self._become_string(text, at)
                return
        if self._value_len > MAX_HELD_CHARS:
            self._become_string(text, at)
            return
        self._parts.append(text)

    def _become_string(self, text: str, at: int) -> None:
        self._emit('"' + escape_json("".join(self._parts) + text), at)
        self._parts.clear()
        self.phase = TagPhase.STRING

    def _value_ends(self, at: int) -> None:
        if self.phase == TagPhase.STRING:
            self._emit('"', at)
        else:
            raw = "".join(self._parts)
            self._parts.clear()
            value = value_as_json(raw, self._value_types, self._element.writes_python)
            self._emit(encode_basestring(raw) if value is None else value, at)
        self._held = self._tail = ""
        self.phase = TagPhase.GAP
