"""Reads one whole value that is no string, as JSON or as Python writes it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import msgspec

from slipstream_ipc.validation.json_nesting import is_nested_deeper
from slipstream_worker.formats.scanners.json_scanner import MAX_NESTING, without_halves
from slipstream_worker.formats.scanners.keyword_arguments import (
    WORDS_AS_JSON,
    python_container_as_json,
)
from slipstream_worker.formats.scanners.scanner import BLANKS

__all__ = ["WORD_CHARS", "escape_attribute", "unescape_attribute", "value_as_json"]

WORD_CHARS: Final = frozenset("0123456789+-.eE" + "truefalsenullTrueFalseNone" + BLANKS)
"""The characters of numbers and words; other values are strings or containers."""

_MAX_PYTHON_CHARS: Final = 2**15  # it is read at once, a character at a time


def value_as_json(text: str, types: Collection[str], python: bool = False) -> str | None:
    """`text` as one JSON value; None if it is none, or none that a property of `types` can have.

    types: as JSON Schema names them; empty: not known, so anything but a string in quotes.
    python: True, None and lists as Python prints them count, too.
    """
    text = text.strip(BLANKS)
    value = _json(text)
    if value is None and python:
        value = WORDS_AS_JSON.get(text)
        if value is None and text[:1] in ("[", "{") and len(text) <= _MAX_PYTHON_CHARS:
            value = python_container_as_json(text)
    if value is None:
        return None
    kinds = _kinds(value)
    if not types:
        return None if "string" in kinds else value
    if "string" in types and ("string" in kinds or kinds.isdisjoint(types)):
        return None
    return value


def escape_attribute(text: str) -> str:
    """`text` as it stands between the quotes of a tag's attribute."""
    return text.replace("&", "&amp;").replace('"', "&quot;")


def unescape_attribute(text: str) -> str:
    """The inverse of `escape_attribute`."""
    return text.replace("&quot;", '"').replace("&amp;", "&")


def _json(text: str) -> str | None:
    text = without_halves(text)
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return None
    return None if is_nested_deeper(text, MAX_NESTING) else text


def _kinds(value: str) -> frozenset[str]:
    """The types in JSON Schema that a JSON text has."""
    match value[0]:
        case '"':
            return frozenset({"string"})
        case "{":
            return frozenset({"object"})
        case "[":
            return frozenset({"array"})
        case "t" | "f":
            return frozenset({"boolean"})
        case "n":
            return frozenset({"null"})
        case _:
            whole = value.lstrip("-").isdigit()
            return frozenset({"number", "integer"} if whole else {"number"})
