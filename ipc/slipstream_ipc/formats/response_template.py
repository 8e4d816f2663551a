"""The entries of the table that a tokenizer's `response_template` describes.

transformers (from 5.19 on) reads answers by such a template, which checkpoints bring along. What it
says with literal delimiters about reasoning as text, and about calls as JSON, some entry of the
table says too; of the rest (patterns, XML, lines of keys and values) nothing is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from slipstream_ipc.formats.answer_format import (
    CallFormat,
    Delimiter,
    Element,
    JsonCall,
    LiteralText,
    ReasoningFormat,
    Repeat,
)

_VERSION = 1
_REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
_CALLS_FIELD = "tool_calls"
_PLACE = re.compile(r"\{(?:content\.)?(\w+)\}")
_PLAIN_CALL = ("name", "arguments")
_Literals = str | tuple[str, ...] | None


class _TemplateField(Struct):
    open: _Literals = None
    close: _Literals = None
    content: str = "text"
    content_args: dict[str, Any] = {}
    transform: Any = None
    transform_each: bool = False


class _Template(Struct):
    fields: dict[str, _TemplateField]
    version: int = _VERSION


def reasoning_entry(
    template: object, entries: Mapping[str, ReasoningFormat]
) -> ReasoningFormat | None:
    """The plainest entry with the template's delimiters of reasoning."""
    fields = _fields(template)
    field = next((fields[name] for name in _REASONING_FIELDS if name in fields), None)
    if field is None or field.content != "text":
        return None
    begins, ends = _literals(field.open), _literals(field.close)
    found = [
        entry
        for entry in entries.values()
        if begins == {each.literal for each in entry.begins}
        and ends == {each.literal for each in entry.ends}
        and not entry.label
    ]
    return min(found, key=lambda entry: (len(entry.dropped), entry.calls_within), default=None)


def calls_entry(template: object, entries: Mapping[str, CallFormat]) -> CallFormat | None:
    """The first entry whose calls are JSON between the template's delimiters, with its keys."""
    field = _fields(template).get(_CALLS_FIELD)
    if field is None or field.content != "json" or field.content_args:
        return None
    keys = _keys(field.transform)
    begins, ends = _literals(field.open), _literals(field.close)
    for entry in entries.values():
        for section in entry.sections:
            first, *inner = section.elements
            last = inner[-1] if inner else first
            if (
                isinstance(first, Delimiter)
                and isinstance(last, Delimiter)
                and begins == {first.literal}
                and ends == {last.literal}
                and _is_json_call(inner, keys, is_list=field.transform_each)
            ):
                return entry
    return None


def _fields(template: object) -> dict[str, _TemplateField]:
    """The template's fields; none where it is of another version, or not of this form."""
    try:
        found = msgspec.convert(template, _Template)
    except msgspec.ValidationError:
        return {}
    return found.fields if found.version == _VERSION else {}


def _literals(given: _Literals) -> set[str]:
    return {given} if isinstance(given, str) else set(given or ())


def _keys(transform: Any) -> tuple[str, str] | None:
    """The keys of a call's name and arguments; None where they are not told."""
    if transform is None:
        return _PLAIN_CALL
    function = transform.get("function") if isinstance(transform, dict) else None
    if function == "{content}":
        return _PLAIN_CALL
    if not isinstance(function, dict):
        return None
    places = [_PLACE.fullmatch(str(function.get(name))) for name in _PLAIN_CALL]
    name, arguments = (None if place is None else place[1] for place in places)
    return None if name is None or arguments is None else (name, arguments)


def _is_json_call(
    elements: Sequence[Element], keys: tuple[str, str] | None, *, is_list: bool
) -> bool:
    flat = list(_flattened(elements))
    calls = [each for each in flat if isinstance(each, JsonCall)]
    return (
        keys is not None
        and len(calls) == 1
        and keys[0] in calls[0].names
        and keys[1] in calls[0].arguments
        and is_list == (LiteralText("[") in flat)
    )


def _flattened(elements: Sequence[Element]) -> Iterator[Element]:
    for each in elements:
        if isinstance(each, Repeat):
            yield from _flattened(each.elements)
        else:
            yield each
