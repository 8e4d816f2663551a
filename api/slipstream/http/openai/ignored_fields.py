"""Takes fields that a type does not know out of a body, and names them.

Clients add fields of other servers to every request. They are ignored, and the answer says which
(`X-Slipstream-Ignored-Fields`), so that a misspelt one is found. Pure.

- Names are clients' text: what is shown of them is cut and has no characters but letters, digits,
  `_`, `-` and `.`, and `$` within schemas. Indices are left out, so that a field of a hundred
  messages is named once.
- Cost is linear in the body; near names, which are slow to find, are looked up for the first few.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec import inspect

from slipstream.http.response_encoding import Headers
from slipstream.spelling import did_you_mean
from slipstream.vllm_names import structured_outputs_name

IGNORED_FIELDS = b"x-slipstream-ignored-fields"  # the answer's header
MAX_SHOWN = 16  # fields that are named; more are "..."
MAX_NAME_CHARS = 48
_MAX_HINTS = 4
_NOT_SHOWN = re.compile(r"[^A-Za-z0-9_.-]")
_NOT_IN_PATHS = re.compile(r"[^A-Za-z0-9_.$-]")


@dataclass(frozen=True, slots=True)
class KnownFields:
    """The fields of the objects that a value may hold: of itself, or of its items if it is a list.

    fields: by the object's tag, None if it has none; by name what the field's value may hold, None
    if nothing in it is looked at.
    """

    fields: dict[str | None, dict[str, KnownFields | None]] = field(default_factory=dict)
    tag_field: str = ""
    items: KnownFields | None = None


class IgnoredFields:
    """The unknown fields of one body: false if there are none."""

    def __init__(self) -> None:
        self._shown: dict[tuple[str, str], str] = {}  # by path and name
        self._has_more = False

    def __bool__(self) -> bool:
        return bool(self._shown)

    def __str__(self) -> str:
        """The fields with hints, as in a header's list: `top_kk (did you mean top_k?), x`."""
        shown = dict.fromkeys(self._shown.values())
        return ", ".join([*shown, "..."] if self._has_more else shown)

    def add(self, path: str, name: str, known: Mapping[str, object]) -> None:
        """Add the field `name` of an object at `path` that has the `known` fields."""
        if self._has_more or (path, name) in self._shown:
            return
        if len(self._shown) == MAX_SHOWN:
            self._has_more = True
            return
        cut = name if len(name) <= MAX_NAME_CHARS else name[: MAX_NAME_CHARS - 3] + "..."
        hint = _hint(cut, tuple(known)) if len(self._shown) < _MAX_HINTS else ""
        shown = _NOT_SHOWN.sub("_", f"{path}{cut}")
        self._shown[path, name] = f"{shown} ({hint})" if hint else shown


def told_fields(headers: Headers, names: Iterable[str]) -> Headers:
    """The answer's headers with these names, which are clients' text, added to what is ignored."""
    shown = [_NOT_IN_PATHS.sub("_", each) for each in names]
    before = next((value.decode() for name, value in headers if name == IGNORED_FIELDS), "")
    listed = [*(before.split(", ") if before else ()), *shown]
    if len(listed) > MAX_SHOWN:
        listed = [*listed[:MAX_SHOWN], "..."]
    others = [each for each in headers if each[0] != IGNORED_FIELDS]
    return (*others, (IGNORED_FIELDS, ", ".join(dict.fromkeys(listed)).encode()))


def known_fields(body_type: type) -> KnownFields:
    """The fields that a body of this type may contain."""
    found = _known(inspect.type_info(body_type))
    assert found is not None, "a body is an object"
    return found


def without_unknown(value: Any, known: KnownFields, ignored: IgnoredFields) -> Any:
    """The value without the fields that are not `known`, which are added to `ignored`.

    Objects with an unknown tag, and what has another type than it should, stay as they are.
    """
    return _without_unknown(value, known, ignored, "")


def _without_unknown(value: Any, known: KnownFields, ignored: IgnoredFields, path: str) -> Any:
    if isinstance(value, list) and known.items is not None:
        items = known.items
        return [_without_unknown(each, items, ignored, path) for each in value]
    if not (isinstance(value, dict) and known.fields):
        return value
    tag = value.get(known.tag_field) if known.tag_field else None
    fields = known.fields.get(tag) if tag is None or isinstance(tag, str) else None
    if fields is None:
        return value
    kept: dict[str, Any] = {}
    for name, each in value.items():
        if name in fields:
            inner = fields[name]
            if inner is not None:
                each = _without_unknown(each, inner, ignored, f"{path}{name}.")
            kept[name] = each
        elif name == known.tag_field:
            kept[name] = each
        else:
            ignored.add(path, name, fields)
    return kept


def _known(info: inspect.Type) -> KnownFields | None:
    """The fields that a value of this type may contain; None if it has no objects of known
    fields.
    """
    match info:
        case inspect.Metadata(type=inner):
            return _known(inner)
        case inspect.UnionType(types=types):
            parts = [found for each in types if (found := _known(each)) is not None]
            if not parts:
                return None
            fields = {tag: named for part in parts for tag, named in part.fields.items()}
            tag_field = next((part.tag_field for part in parts if part.tag_field), "")
            items = next((part.items for part in parts if part.items is not None), None)
            return KnownFields(fields, tag_field, items)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            items = _known(item)
            return None if items is None else KnownFields(items=items)
        case inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            named = {each.encode_name: _known(each.type) for each in fields}
            return KnownFields({None if tag is None else str(tag): named}, tag_field or "")
        case _:
            return None


@lru_cache(maxsize=1024)
def _hint(name: str, known: tuple[str, ...]) -> str:
    return (structured_outputs_name(name) or did_you_mean(name, known)).removeprefix("; ")
