"""The types of functions' properties, told by their JSON Schemas, as a reader needs them.

Schemas may have any form: what says nothing about a type is left without one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream_ipc.formats.tool_types import LIST_ITEM, nested_key

_JSON_TYPES = ("string", "integer", "number", "boolean", "null", "array", "object")
_MAX_DEPTH = 8  # of references and alternatives within a property's schema
_MAX_LOOKS = 2**15  # at schemas, of all functions of a request
_MAX_WITHIN_CHARS = 2**14  # of the names in `ToolTypes` of one function's nested properties


class Looks:
    """A bound on the number of schemas that are looked at, for all functions of a request
    together.
    """

    def __init__(self, num: int = _MAX_LOOKS) -> None:
        self.num_left = num

    def take(self) -> bool:
        """Count one more schema; return True if it may be looked at."""
        self.num_left -= 1
        return self.num_left >= 0


def property_types(
    function: Mapping[str, Any], *, is_nested: bool = False, looks: Looks | None = None
) -> dict[str, str]:
    """The types of a function's properties by name, see `ToolTypes`. is_nested: also of properties
    of properties, those that are least deep if there are very many. looks: of the request; what is
    not looked at has no type.
    """
    parameters = function.get("parameters")
    if not isinstance(parameters, dict):
        return {}
    properties = parameters.get("properties")
    if not isinstance(properties, dict):
        return {}
    schemas = _Schemas(parameters, Looks() if looks is None else looks)
    found = {name: _joined(schemas.types(schema)) for name, schema in properties.items()}
    if is_nested:
        waiting = deque(properties.items())
        num_chars = 0
        while waiting and schemas.has_looks:
            path, schema = waiting.popleft()
            for step, inner in schemas.within(schema):
                inner_path = nested_key(path, step)
                if inner_path in found:
                    continue
                num_chars += len(inner_path)
                if num_chars > _MAX_WITHIN_CHARS:  # references can make very many
                    return found
                found[inner_path] = _joined(schemas.types(inner))
                waiting.append((inner_path, inner))
    return found


def _joined(types: frozenset[str] | None) -> str:
    return "|".join(each for each in _JSON_TYPES if each in (types or ()))


def referred(path: str, root: Mapping[str, Any]) -> object:
    """The schema that a `$ref` within `root` names; None where there is none."""
    found: object = root
    for step in filter(None, path.removeprefix("#").split("/")):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def type_of(value: object) -> str:
    """The type in JSON Schema of a decoded value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


class _Schemas:
    """The schemas within `root`. What each says is found once: references make many paths to it."""

    def __init__(self, root: Mapping[str, Any], looks: Looks) -> None:
        self._root = root
        self._looks = looks
        self._found: dict[int, frozenset[str] | None] = {}
        self._within: dict[int, list[tuple[str, object]]] = {}

    @property
    def has_looks(self) -> bool:
        """True if further schemas may be looked at."""
        return self._looks.num_left > 0

    def types(self, schema: object, depth: int = 0) -> frozenset[str] | None:
        """The types that a schema allows; None for any."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return None
        if id(schema) not in self._found:
            if not self._looks.take():
                return None
            self._found[id(schema)] = None  # to itself, if it refers to itself
            self._found[id(schema)] = self._types(schema, depth)
        return self._found[id(schema)]

    def within(self, schema: object) -> list[tuple[str, object]]:
        """The schemas of a list's items and of an object's properties, by the names that
        `nested_key` takes; not all once very many schemas were looked at.
        """
        found = self._within.get(id(schema))
        if found is None:
            found = self._within[id(schema)] = list(self._walk(schema, 0, {}))
        return found

    def _walk(
        self, schema: object, depth: int, walked: dict[int, int]
    ) -> Iterator[tuple[str, object]]:
        """walked: the schemas so far, and the least depth of each."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return
        if walked.get(id(schema), _MAX_DEPTH + 1) <= depth or not self._looks.take():
            return
        walked[id(schema)] = depth
        if isinstance(properties := schema.get("properties"), dict):
            yield from properties.items()
        if "items" in schema:
            yield LIST_ITEM, schema["items"]
        if isinstance(path := schema.get("$ref"), str):
            yield from self._walk(referred(path, self._root), depth + 1, walked)
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(word), list):
                for each in branches:
                    yield from self._walk(each, depth + 1, walked)

    def _types(self, schema: dict[str, Any], depth: int) -> frozenset[str] | None:
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset((given,))
        if isinstance(given, list):
            return frozenset(each for each in given if isinstance(each, str))
        if isinstance(values := schema.get("enum"), list):
            return frozenset(map(type_of, values))
        if "const" in schema:
            return frozenset((type_of(schema["const"]),))
        if isinstance(path := schema.get("$ref"), str):
            return self.types(referred(path, self._root), depth + 1)
        for word in ("anyOf", "oneOf", "allOf"):
            if isinstance(branches := schema.get(word), list):
                found = [self.types(each, depth + 1) for each in branches]
                known = [each for each in found if each is not None]
                if word == "allOf":
                    return frozenset.intersection(*known) if known else None
                return frozenset().union(*known) if len(known) == len(found) else None
        return None
