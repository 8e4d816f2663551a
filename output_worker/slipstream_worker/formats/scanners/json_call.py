"""Reads calls in JSON: the arguments alone, or an object that also holds the name."""

from __future__ import annotations

import json
from enum import IntEnum
from typing import Any

from slipstream_ipc.formats.answer_format import JsonCall
from slipstream_ipc.messages.answer import MAX_NAME_CHARS
from slipstream_worker.formats.scanners.json_scanner import JsonScanner
from slipstream_worker.formats.scanners.scanner import (
    BLANKS,
    MAX_HELD_CHARS,
    ScanStatus,
    skip_blanks,
)

_MAX_KEY_CHARS = 1024
_MAX_WORD_CHARS = 6 * MAX_NAME_CHARS + 2  # all characters escaped, and quotes
_NO_LIMIT = 2**62


class JsonObjectScanner:
    """Arguments that are one JSON object."""

    def __init__(self) -> None:
        self.name = ""
        self.call_id = ""
        self._json = JsonScanner(objects_only=True)
        self._has_begun = False

    @property
    def num_held(self) -> int:
        return self._json.num_held

    @property
    def string_hazards(self) -> frozenset[str] | None:
        return self._json.string_hazards

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        if self._has_begun:
            return self._json.feed(text, start)
        pos = skip_blanks(text, start)
        if pos == len(text):
            return pos, ScanStatus.MORE
        if text[pos] != "{":
            return pos, ScanStatus.FAILED
        self._has_begun = True
        self._json.feed("{", 0)
        return pos + 1, ScanStatus.BEGIN

    def feed_delimiter(self, literal: str) -> tuple[bool, ScanStatus]:
        return False, ScanStatus.FAILED

    def take(self) -> str:
        return self._json.take()

    def break_off(self) -> str:
        return self._json.break_off()

    def save(self) -> list[Any]:
        return self._json.save()

    def load(self, saved: list[Any]) -> None:
        self._has_begun = True
        self._json.load(saved)


class _JsonPhase(IntEnum):
    OPEN = 0
    KEY_OR_END = 1
    KEY = 2
    COLON = 3
    VALUE = 4
    AFTER = 5
    IN_KEY = 6
    IN_NAME = 7
    IN_ID = 8
    IN_OTHER = 9
    IN_ARGUMENTS = 10  # an object, passed through
    IN_PACKED = 11  # arguments that are a text which holds an object, or null


_LIMITS = {
    _JsonPhase.IN_KEY: _MAX_KEY_CHARS,
    _JsonPhase.IN_NAME: _MAX_WORD_CHARS,
    _JsonPhase.IN_ID: _MAX_WORD_CHARS,
    _JsonPhase.IN_OTHER: MAX_HELD_CHARS,
    _JsonPhase.IN_PACKED: MAX_HELD_CHARS,
}


class JsonCallScanner:
    """An object with the keys of a `JsonCall`. Other keys are skipped.

    Arguments that come before the name are kept until it is known. Arguments may also be a string
    that holds a JSON object. None, or null, are an empty object.
    """

    def __init__(self, element: JsonCall) -> None:
        self.name = ""
        self.call_id = ""
        self._element = element
        self._phase = _JsonPhase.OPEN
        self._json = JsonScanner()
        self._key = ""
        self._word: list[str] = []
        self._num_taken = 0  # of the present value
        self._has_arguments = False
        self._out: list[str] = []

    @property
    def num_held(self) -> int:
        if self._phase is _JsonPhase.IN_ARGUMENTS:
            return self._json.num_held
        return self._num_taken if self._phase >= _JsonPhase.IN_KEY else 0

    @property
    def string_hazards(self) -> frozenset[str] | None:
        return self._json.string_hazards if self._phase is _JsonPhase.IN_ARGUMENTS else None

    def take(self) -> str:
        text = "".join(self._out)
        self._out.clear()
        return text

    def break_off(self) -> str:
        return self._json.break_off() if self._phase is _JsonPhase.IN_ARGUMENTS else ""

    def feed_delimiter(self, literal: str) -> tuple[bool, ScanStatus]:
        return False, ScanStatus.FAILED

    def save(self) -> list[Any]:
        inner = self._json.save() if self._phase is _JsonPhase.IN_ARGUMENTS else []
        return [self.name, int(self._phase), self._has_arguments, self._key, inner]

    def load(self, saved: list[Any]) -> None:
        self.name, phase, self._has_arguments, self._key, inner = saved
        self._phase = _JsonPhase(phase)
        if inner:
            self._json = JsonScanner(objects_only=True)
            self._json.load(inner)

    def feed(self, text: str, start: int) -> tuple[int, ScanStatus]:
        pos = start
        if self._phase is _JsonPhase.IN_ARGUMENTS:
            pos, status = self._json.feed(text, pos)
            self._out.append(self._json.take())
            if status is not ScanStatus.DONE:
                return pos, status
            self._value_ended()
        while pos < len(text):
            if self._phase >= _JsonPhase.IN_KEY:
                pos, status = self._value(text, pos)
            else:
                pos = skip_blanks(text, pos)
                if pos == len(text):
                    break
                pos, status = self._structure(text, pos)
            if status is not ScanStatus.MORE:
                return pos, status
        return pos, ScanStatus.MORE

    def _structure(self, text: str, pos: int) -> tuple[int, ScanStatus]:
        char = text[pos]
        match self._phase, char:
            case _JsonPhase.OPEN, "{":
                self._phase = _JsonPhase.KEY_OR_END
            case ((_JsonPhase.KEY_OR_END | _JsonPhase.KEY), '"'):
                self._enter(_JsonPhase.IN_KEY)
                return pos, ScanStatus.MORE
            case _JsonPhase.COLON, ":":
                self._phase = _JsonPhase.VALUE
            case _JsonPhase.VALUE, _:
                return pos, self._enter_value(char)
            case _JsonPhase.AFTER, ",":
                self._phase = _JsonPhase.KEY
            case _JsonPhase.AFTER, "}" if self.name:
                if not self._has_arguments:
                    self._out.append("{}")
                return pos + 1, ScanStatus.DONE
            case _:
                return pos, ScanStatus.FAILED
        return pos + 1, ScanStatus.MORE

    def _enter(self, phase: _JsonPhase) -> None:
        self._phase = phase
        self._json = JsonScanner(objects_only=phase is _JsonPhase.IN_ARGUMENTS)
        self._num_taken = 0
        self._word.clear()

    def _enter_value(self, char: str) -> ScanStatus:
        element = self._element
        if self._key in element.names:
            if self.name or char != '"':
                return ScanStatus.FAILED
            self._enter(_JsonPhase.IN_NAME)
        elif self._key in element.arguments:
            if self._has_arguments or char not in '{"n':
                return ScanStatus.FAILED
            self._enter(_JsonPhase.IN_ARGUMENTS if char == "{" else _JsonPhase.IN_PACKED)
        else:
            self._enter(_JsonPhase.IN_ID if self._key in element.ids else _JsonPhase.IN_OTHER)
        return ScanStatus.MORE

    def _value(self, text: str, pos: int) -> tuple[int, ScanStatus]:
        phase = self._phase
        room = _LIMITS.get(phase, _NO_LIMIT) - self._num_taken
        if room < len(text) - pos:
            taken, status = self._json.feed(text[pos : pos + room], 0)
            end = pos + taken
        else:
            end, status = self._json.feed(text, pos)
        self._num_taken += end - pos
        if phase is _JsonPhase.IN_ARGUMENTS:
            self._out.append(self._json.take())
        elif phase is not _JsonPhase.IN_OTHER:
            self._word.append(self._json.take())
        else:
            self._json.take()
        if status is ScanStatus.MORE and end < len(text):
            return end, ScanStatus.FAILED  # longer than is allowed
        if status is not ScanStatus.DONE:
            return end, status
        return end, self._value_ended()

    def _value_ended(self) -> ScanStatus:
        phase = self._phase
        word: Any = json.loads("".join(self._word)) if self._word else None
        self._phase = _JsonPhase.AFTER
        match phase:
            case _JsonPhase.IN_KEY:
                self._key = word
                self._phase = _JsonPhase.COLON
            case _JsonPhase.IN_NAME:
                if not word:
                    return ScanStatus.FAILED
                self.name = word
                return ScanStatus.BEGIN
            case _JsonPhase.IN_ID if isinstance(word, str):
                self.call_id = word[:MAX_NAME_CHARS]
            case _JsonPhase.IN_ARGUMENTS:
                self._has_arguments = True
            case _JsonPhase.IN_PACKED if word is not None and (word := word.strip(BLANKS)):
                scanner = JsonScanner(objects_only=True)
                if scanner.feed(word, 0) != (len(word), ScanStatus.DONE):
                    self._phase = phase  # what was taken stays held
                    return ScanStatus.FAILED
                self._out.append(scanner.take())
                self._has_arguments = True
        return ScanStatus.MORE
