"""Reads the arguments of a call that is written as tagged parameters and gives them as JSON.

`<parameter=K>V</parameter>`, `<arg_key>K</arg_key><arg_value>V</arg_value>`, `<parameter name="K">`
and their like. Values are not quoted, so the function's property types say what a value is. A
string leaves as it comes; any other value when it is complete, and as a string if it cannot be read.

- The output is always a prefix of a JSON object, and a whole object once the reading has ended.
- The result does not depend on how the text is split into calls.
- Of text that breaks the rules, what came before the fault has been emitted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Set
from enum import IntEnum
from json.encoder import encode_basestring
from typing import Final

from slipstream_ipc.formats.typed import TaggedSyntax
from slipstream_worker.formats.keyword_arguments import escape_json, held_from
from slipstream_worker.formats.values import value_as_json

__all__ = ["TagPhase", "TaggedParameters"]

_MAX_TAG_CHARS: Final = 1024  # of a key with its attributes
_MAX_WORD_CHARS: Final = 4096  # of a number
_BLANKS: Final = " \t\r\n"
_WORD_CHARS: Final = frozenset("0123456789+-.eE" + "truefalsenullTrueFalseNone" + _BLANKS)
_STRING_ALONE: Final = frozenset({"string"})


class TagPhase(IntEnum):
    """What the next character is part of."""

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


class TaggedParameters:
    """The arguments of one call, from behind the function's name up to the literal that ends it.

    `out` collects (piece of JSON, index in the text behind which it is decided); the caller takes
    them and clears it.
    """

    __slots__ = (
        "_has_begun",
        "_ids",
        "_is_first",
        "_parts",
        "_syntax",
        "_token",
        "_types",
        "_value_len",
        "_value_types",
        "out",
        "phase",
    )

    def __init__(
        self,
        syntax: TaggedSyntax,
        types: Mapping[str, Collection[str]] | None = None,
        ids: Set[str] = frozenset(),
    ) -> None:
        """`types`: of the function's properties, as JSON Schema names them; None: not known.
        `ids`: the literals that come through `feed_literal` alone.
        """
        self._syntax = syntax
        self._types = types
        self._ids = ids
        self._is_first = True
        self._token = ""  # what is held: of a tag, a key, or the end of a value
        self._parts: list[str] = []  # of a value that is not decided
        self._value_len = 0
        self._has_begun = False  # a character of it that is no blank was seen
        self._value_types: Collection[str] | None = None
        self.phase = TagPhase.GAP
        self.out: list[tuple[str, int]] = []

    @property
    def is_over(self) -> bool:
        return self.phase >= TagPhase.ENDED

    @property
    def is_held(self) -> bool:
        """Whether characters that were fed wait for the next ones."""
        return bool(self._token or self._parts)

    def feed(self, text: str, start: int = 0) -> int:
        """Read `text` from `start`; returns how far. Less than its length only once it is over."""
        at = start
        while at < len(text) and self.phase < TagPhase.ENDED:
            match self.phase:
                case TagPhase.GAP | TagPhase.BEHIND_KEY:
                    at = self._gap(text, at)
                case TagPhase.KEY | TagPhase.TAG:
                    at = self._tag(text, at)
                case TagPhase.VALUE_BEGINS:
                    at = self._value_begins(text, at)
                case _:
                    at = self._value(text, at)
        return at

    def feed_literal(self, literal: str, at: int) -> None:
        """A literal that was read as a token; `at` is the index behind it. One that means nothing
        here is part of a value, else a fault.
        """
        syntax = self._syntax
        match self.phase:
            case TagPhase.GAP if not self._token and literal in (syntax.opening, syntax.end):
                self._enter(literal, at)
            case TagPhase.KEY if literal == syntax.key_end:
                key, self._token = self._token, ""
                self._key_ends(key, at)
            case TagPhase.BEHIND_KEY if literal == syntax.value_opening and not self._token:
                self._enter(literal, at)
            case TagPhase.VALUE_BEGINS if literal == syntax.closing:
                self._choose(at)
                self._value_ends(at)
            case TagPhase.STRING | TagPhase.WORD | TagPhase.CONTAINER if literal == syntax.closing:
                self._take(self._token.removesuffix("\n") if syntax.trims_newline else self._token, at)
                self._value_ends(at)
            case TagPhase.VALUE_BEGINS:
                self._choose(at)
                self._take(literal, at)
            case TagPhase.STRING | TagPhase.WORD | TagPhase.CONTAINER:
                held, self._token = self._token, ""
                self._take(held + literal, at)
            case _:
                self.phase = TagPhase.FAILED

    # -- tags

    def _gap(self, text: str, at: int) -> int:
        """Between parameters, and between a key and its value: blanks, then one of the tags."""
        syntax = self._syntax
        tags = (
            (syntax.opening, syntax.end)
            if self.phase == TagPhase.GAP
            else (syntax.value_opening,)
        )
        tags = tuple(tag for tag in tags if tag not in self._ids)
        while at < len(text):
            char = text[at]
            if not self._token and char in _BLANKS:
                at += 1
                continue
            token = self._token + char
            if not any(tag.startswith(token) for tag in tags):
                self.phase = TagPhase.FAILED
                return at
            at += 1
            if token in tags:
                self._token = ""
                self._enter(token, at)
                return at
            self._token = token
        return at

    def _enter(self, tag: str, at: int) -> None:
        syntax = self._syntax
        if self.phase == TagPhase.BEHIND_KEY:
            self.phase = TagPhase.VALUE_BEGINS
        elif tag == syntax.opening:
            self.phase = TagPhase.KEY
        else:
            self.out.append(("{}" if self._is_first else "}", at))
            self.phase = TagPhase.ENDED

    def _tag(self, text: str, at: int) -> int:
        """A key, or attributes behind it, up to the literal that ends it."""
        syntax = self._syntax
        end = syntax.key_end if self.phase == TagPhase.KEY else ">"
        if end in self._ids:
            self._token += text[at : at + _MAX_TAG_CHARS + 1]
            if len(self._token) > _MAX_TAG_CHARS:
                self.phase = TagPhase.FAILED
            return len(text)
        held = len(self._token)
        buffer = self._token + text[at : at + _MAX_TAG_CHARS + len(end)]
        found = buffer.find(end, max(0, held - len(end) + 1))
        if (len(buffer) - len(end) + 1 if found < 0 else found) > _MAX_TAG_CHARS:
            self.phase = TagPhase.FAILED
            return at
        if found < 0:
            self._token = buffer
            return len(text)
        self._token = ""
        behind = at + found + len(end) - held
        if self.phase == TagPhase.KEY:
            self._key_ends(buffer[:found], behind)
        else:
            if 'string="true"' in buffer[:found]:
                self._value_types = _STRING_ALONE
            elif 'string="false"' in buffer[:found]:
                self._value_types = ()
            self._behind_tag()
        return behind

    def _key_ends(self, key: str, at: int) -> None:
        self.out.append((("{" if self._is_first else ", ") + encode_basestring(key) + ": ", at))
        self._is_first = False
        self._value_types = self._types.get(key) if self._types is not None else None
        if self._syntax.has_attributes:
            self.phase = TagPhase.TAG
        else:
            self._behind_tag()

    def _behind_tag(self) -> None:
        opening = self._syntax.value_opening
        self.phase = TagPhase.BEHIND_KEY if opening else TagPhase.VALUE_BEGINS

    # -- values

    def _value_begins(self, text: str, at: int) -> int:
        """Skip the one line break that belongs to the tag, then choose by type and character."""
        if self._syntax.trims_newline and not self._token and text[at] == "\n":
            self._token = "\n"  # dropped, and remembered: only the first one is
            at += 1
            if at == len(text):
                return at
        self._token = ""
        self._choose(at)
        return at

    def _choose(self, at: int) -> None:
        types = self._value_types
        self._value_len = 0
        self._has_begun = False
        if types is not None and set(types) == _STRING_ALONE:
            self.out.append(('"', at))
            self.phase = TagPhase.STRING
        else:
            self.phase = TagPhase.WORD

    def _value(self, text: str, at: int) -> int:
        """Up to the tag that closes the value."""
        closing = self._syntax.closing
        if closing in self._ids:
            closing = ""
        held = len(self._token)
        buffer = self._token + text[at:]
        self._token = ""
        if closing:
            found = buffer.find(closing)
            if found >= 0:
                end = found
                if self._syntax.trims_newline and buffer[end - 1 : end] == "\n":
                    end -= 1
                behind = at + found + len(closing) - held
                self._take(buffer[:end], behind)
                self._value_ends(behind)
                return behind
            end = held_from(buffer, closing)
        else:
            end = len(buffer)
        if self._syntax.trims_newline and buffer[end - 1 : end] == "\n":
            end -= 1
        self._token = buffer[end:]
        self._take(buffer[:end], len(text))
        return len(text)

    def _take(self, text: str, at: int) -> None:
        """Characters that belong to the value."""
        if self.phase == TagPhase.STRING:
            if text:
                self.out.append((escape_json(text), at))
            return
        self._value_len += len(text)
        if self.phase == TagPhase.WORD:
            first = "" if self._has_begun else text.lstrip(_BLANKS)[:1]
            self._has_begun = self._has_begun or bool(first)
            if first and first in '{["':
                self.phase = TagPhase.CONTAINER
            elif not _WORD_CHARS.issuperset(text) or self._value_len > _MAX_WORD_CHARS:
                self._become_string(text, at)
                return
        self._parts.append(text)

    def _become_string(self, text: str, at: int) -> None:
        self.out.append(('"' + escape_json("".join(self._parts) + text), at))
        self._parts.clear()
        self.phase = TagPhase.STRING

    def _value_ends(self, at: int) -> None:
        if self.phase == TagPhase.STRING:
            self.out.append(('"', at))
        else:
            raw = "".join(self._parts)
            self._parts.clear()
            value = value_as_json(raw, self._value_types, self._syntax.writes_python)
            self.out.append((encode_basestring(raw) if value is None else value, at))
        self._token = ""
        self.phase = TagPhase.GAP
