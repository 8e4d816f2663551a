"""A JSON Schema as a graph: the schemas within it, what they refer to, and which no JSON fits.

Pure; the cost is linear in the schema, and bounded where schemas multiply.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

Schema = dict[str, Any]

# of strings, which the grammar library knows; any other is an annotation
FORMATS = frozenset(
    ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")
)
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_SCALARS = frozenset(("null", "boolean", "number", "string"))
_TYPES = _SCALARS | {"array", "object"}
_ASSERTIONS = (
    "type",
    "const",
    "enum",
    "items",
    "prefixItems",
    "minItems",
    "maxItems",
    "properties",
    "required",
    "additionalProperties",
    "patternProperties",
    "minProperties",
)
_MAX_NODES = 2**14
_MAX_PATH_CHARS = 160


class EndlessSchemaError(ValueError):
    """No finite JSON fits the schema; the message says which reference never ends."""


class Place(NamedTuple):
    """The place of a schema: its path, its container and key there, the schema around it, and the
    resource (a schema with an `$id`, or the whole) that its references are within.
    """

    schema: Any
    path: tuple[str, ...]
    container: Any
    key: Any
    parent: int | None
    resource: Schema


class SchemaDocument:
    """A decoded JSON Schema, in which no object occurs twice, and the schemas within it."""

    def __init__(self, root: Schema) -> None:
        self.root = root
        self.places: dict[int, Place] = {}  # by id of the schema, outer ones first
        self._resources: dict[str, Schema] = {}
        self._anchors: dict[tuple[int, str], Schema] = {}
        self._targets: dict[int, Any] = {}
        self._walk(Place(root, (), None, None, None, root))
        waiting = list(self.places.values())
        while waiting:
            place = waiting.pop()
            if not isinstance(reference := place.schema.get("$ref"), str):
                continue
            target = self._resolved(reference, place.resource)
            self._targets[id(place.schema)] = target
            if target is not None and id(target.schema) not in self.places:
                known = len(self.places)  # it is where no keyword has schemas
                self._walk(target)
                waiting += list(self.places.values())[known:]

    def target(self, schema: Schema) -> Any:
        """The schema or boolean that the schema's `$ref` refers to; None if there is none."""
        found = self._targets.get(id(schema))
        return None if found is None else found.schema

    def pointer(self, schema: Schema) -> str:
        """The `$ref` that refers to a schema of the document."""
        steps = [each.replace("~", "~0").replace("/", "~1") for each in self.path(schema)]
        return "/".join(["#", *steps])

    def path(self, schema: Schema) -> tuple[str, ...]:
        """The keys that lead to a schema of the document."""
        return self.places[id(schema)].path

    def retarget(self, schema: Schema, target: bool) -> None:
        """Note that a schema's `$ref` refers to this boolean."""
        self._targets[id(schema)] = Place(target, (), None, None, None, self.root)

    def move(self, schema: Schema, name: str) -> set[int]:
        """Put a schema under `name` in the whole one's `$defs`; the ids of what that moves."""
        steps, num = ("$defs", name), len(self.path(schema))
        definitions = self.root.setdefault("$defs", {})
        definitions[name] = schema
        place = self.places[id(schema)]
        self.places[id(schema)] = place._replace(
            path=steps, container=definitions, key=name, parent=id(self.root)
        )
        moved = {id(schema)}
        for number, each in self.places.items():
            if each.parent in moved:
                moved.add(number)
                self.places[number] = each._replace(path=(*steps, *each.path[num:]))
        return moved

    def is_referred(self, schema: Schema) -> bool:
        """True if a `$ref` refers to the schema or to what is within it."""
        for target in self._targets.values():
            number = None if target is None else id(target.schema)
            while number is not None and number != id(schema):
                place = self.places.get(number)
                number = None if place is None else place.parent
            if number is not None:
                return True
        return False

    def move_with_references(self, schema: Schema, name: str) -> None:
        """Move a schema as `move` does, and write anew what refers to it or to what is in it."""
        moved = self.move(schema, name)
        for place in self.places.values():
            target = self.target(place.schema)
            if isinstance(target, dict) and id(target) in moved:
                place.schema["$ref"] = self.pointer(target)

    def _walk(self, first: Place) -> None:
        waiting = [first]
        while waiting:
            place = waiting.pop()
            schema = place.schema
            if not isinstance(schema, dict) or id(schema) in self.places:
                continue
            name = schema.get("$id")
            resource = place.resource
            if isinstance(name, str) and not name.startswith("#"):
                resource = schema
                self._resources[name.rstrip("#")] = schema
            elif isinstance(name, str):
                self._anchors[id(resource), name[1:]] = schema
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(anchor := schema.get(word), str):
                    self._anchors[id(resource), anchor] = schema
            self.places[id(schema)] = place._replace(resource=resource)
            inner = [
                Place(each, (*place.path, *steps), container, key, id(schema), resource)
                for each, steps, container, key in _within(schema)
            ]
            waiting += reversed(inner)

    def _resolved(self, reference: str, resource: Schema) -> Place | None:
        name, _, fragment = reference.partition("#")
        found: Any = self._resources.get(name) if name else resource
        if found is None:
            return None
        if fragment and not fragment.startswith("/"):
            found = self._anchors.get((id(found), unquote(fragment)))
            return None if found is None else self.places[id(found)]
        place = self.places[id(found)]
        for step in fragment.split("/")[1:]:
            key: Any = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
                key = int(key)
            elif not (isinstance(found, dict) and key in found):
                return None
            place = Place(
                found[key], (*place.path, str(key)), found, key, place.parent, place.resource
            )
            found = found[key]
            place = self.places.get(id(found), place)
        return place if isinstance(found, dict | bool) else None


def shown_path(path: Iterable[str]) -> str:
    """A path for an answer's header or an error, cut where it is very long."""
    shown = ".".join(path).encode(errors="replace").decode()
    half = _MAX_PATH_CHARS // 2
    return shown if len(shown) <= 2 * half else f"{shown[:half]}...{shown[-half:]}"


def _within(schema: Schema) -> Iterator[tuple[Any, tuple[str, ...], Any, Any]]:
    """The schemas directly within one, with steps, container and key."""
    for word in _NAMED:
        if isinstance(inner := schema.get(word), dict):
            for key, each in inner.items():
                yield each, (word, key), inner, key
    for word in _LISTED:
        if isinstance(inner := schema.get(word), list):
            for index, each in enumerate(inner):
                yield each, (word, str(index)), inner, index
    for word in _SINGLE:
        if isinstance(inner := schema.get(word), dict):
            yield inner, (word,), schema, word


def check_ends(document: SchemaDocument) -> set[int]:
    """The ids of the schemas within the document that no finite JSON fits.

    Raises EndlessSchemaError if it is the whole one, and a reference is why.
    """
    endless = _Solver(document).endless()
    if id(document.root) in endless:
        for place in document.places.values():
            target = document.target(place.schema)
            if isinstance(target, dict) and id(target) in endless:
                given = place.schema["$ref"][:100]
                why = f'no JSON that ends fits it: what "$ref": "{given}" refers to leads to itself'
                raise EndlessSchemaError(f"{why}, or requires itself")
    return endless


# A conjunction of schemas. An element with True is a whole schema; with False it is what the schema
# says beside its `$ref`, `allOf`, `anyOf` and `oneOf`, which are elements of their own by then.
_Node = frozenset[tuple[int, bool]]


class _TooComplex(Exception):  # noqa: N818  (an outcome)
    """There are more conjunctions than are looked at."""


class _Solver:
    """Finds the schemas with a finite instance: the least fixed point of rules "this conjunction
    has one if `need` of those have".

    It is generous: keywords of numbers and strings are not looked at, nor patterns of names.
    """

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._missing: list[int] = []  # by rule: how many more it needs
        self._heads: list[object] = []
        self._users: dict[object, list[int]] = {}  # rules by what they need
        self._finite: set[object] = set()
        self._seen: set[_Node] = set()
        self._waiting: list[_Node] = []

    def endless(self) -> set[int]:
        """The ids of the schemas without one; none are known where there is too much to look at."""
        ids = list(self._document.places)
        try:
            for each in ids:
                self._add(frozenset(((each, True),)))
            while self._waiting:
                self._expand(self._waiting.pop())
        except _TooComplex:
            return set()
        return {each for each in ids if frozenset(((each, True),)) not in self._finite}

    def _add(self, node: _Node) -> _Node:
        if node not in self._seen:
            if len(self._seen) >= _MAX_NODES:
                raise _TooComplex
            self._seen.add(node)
            self._waiting.append(node)
        return node

    def _rule(self, head: object, needed: Iterable[object], need: int | None = None) -> None:
        needed = set(needed)
        missing = (len(needed) if need is None else need) - len(needed & self._finite)
        if missing > 0:
            number = len(self._missing)
            self._missing.append(missing)
            self._heads.append(head)
            for each in needed - self._finite:
                self._users.setdefault(each, []).append(number)
            return
        reached = [head]
        while reached:
            each = reached.pop()
            if each in self._finite:
                continue
            self._finite.add(each)
            for number in self._users.pop(each, ()):
                self._missing[number] -= 1
                if self._missing[number] == 0:
                    reached.append(self._heads[number])

    def _schema(self, number: int) -> Schema:
        schema: Schema = self._document.places[number].schema
        return schema

    def _conjunction(self, parts: Iterable[Any]) -> _Node | None:
        """A node of these schemas or booleans; None where one is false."""
        found = list(parts)
        if any(each is False for each in found):
            return None
        return frozenset((id(each), True) for each in found if id(each) in self._document.places)

    def _expand(self, node: _Node) -> None:
        whole = next((each for each in sorted(node) if each[1]), None)
        if whole is None:
            self._expand_own(node, [self._schema(number) for number, _ in node])
            return
        schema = self._schema(whole[0])
        rest = node - {whole}
        if any(word in schema for word in _ASSERTIONS):
            rest |= {(whole[0], False)}
        parts = list(given) if isinstance(given := schema.get("allOf"), list) else []
        if isinstance(schema.get("$ref"), str):
            target = self._document.target(schema)
            parts.append(True if target is None else target)
        together = self._conjunction(parts)
        if together is None:
            return
        choices = [rest | together]
        for word in ("anyOf", "oneOf"):
            if isinstance(branches := schema.get(word), list):
                found = [self._conjunction((each,)) for each in branches]
                choices = [one | each for one in choices for each in found if each is not None]
        for each in choices:
            self._rule(node, (self._add(each),))

    def _expand_own(self, node: _Node, parts: list[Schema]) -> None:
        if not parts:
            self._rule(node, ())
            return
        types = frozenset.intersection(*map(schema_types, parts))
        for part in parts:
            values = [part["const"]] if "const" in part else part.get("enum")
            if isinstance(values, list):
                if any(type_of(each) in types for each in values):
                    self._rule(node, ())
                return
        if types & _SCALARS:
            self._rule(node, ())
        if "array" in types:
            self._expand_array(node, parts)
        if "object" in types:
            self._expand_object(node, parts)

    def _expand_array(self, node: _Node, parts: list[Schema]) -> None:
        least = max(_count(part, "minItems") for part in parts)
        if any(isinstance(most := part.get("maxItems"), int) and most < least for part in parts):
            return
        prefixes = [_prefix(part) for part in parts]
        needed: list[_Node] = []
        for index in range(min(least, max(map(len, prefixes)) + 1)):
            items = [
                prefix[index] if index < len(prefix) else _rest(part)
                for part, prefix in zip(parts, prefixes, strict=True)
            ]
            together = self._conjunction(items)
            if together is None:
                return
            needed.append(self._add(together))
        self._rule(node, needed)

    def _expand_object(self, node: _Node, parts: list[Schema]) -> None:
        given = [part.get("required") for part in parts]
        names = {name for some in given if isinstance(some, list) for name in some}
        required = sorted(name for name in names if isinstance(name, str))
        needed: list[object] = []
        for name in required:
            together = self._conjunction([_property(part, name) for part in parts])
            if together is None:
                return
            needed.append(self._add(together))
        more = max(_count(part, "minProperties") for part in parts) - len(required)
        if more > 0 and not any(part.get("patternProperties") for part in parts):
            others = {name for part in parts for name in _properties(part)}.difference(required)
            found = [self._conjunction([_property(p, name) for p in parts]) for name in others]
            extra = self._conjunction([part.get("additionalProperties", True) for part in parts])
            enough = (node, "enough properties")
            named = {(self._add(each), n) for n, each in enumerate(found) if each is not None}
            for each, n in named:
                self._rule((each, n), (each,))  # counted once for each name
            if len(named) >= more:
                self._rule(enough, named, more)
            if extra is not None:
                self._rule(enough, (self._add(extra),))
            needed.append(enough)
        self._rule(node, needed)


def schema_types(schema: Schema) -> frozenset[str]:
    """The types that the schema's `type` names, all if it has none; integers are numbers."""
    given = schema.get("type")
    listed = given if isinstance(given, list) else [given]
    found = {"number" if each == "integer" else each for each in listed if isinstance(each, str)}
    return frozenset(found & _TYPES) or _TYPES


def type_of(value: object) -> str:
    """The type of a decoded value; integers are numbers."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _count(schema: Schema, word: str) -> int:
    given = schema.get(word)
    return int(given) if isinstance(given, int | float) and given > 0 else 0


def _prefix(schema: Schema) -> list[Any]:
    for word in ("prefixItems", "items"):
        if isinstance(given := schema.get(word), list):
            return given
    return []


def _rest(schema: Schema) -> Any:
    """The schema of the items behind the first ones."""
    given = schema.get("items", True)
    return schema.get("additionalItems", True) if isinstance(given, list) else given


def _properties(schema: Schema) -> Mapping[str, Any]:
    given = schema.get("properties")
    return given if isinstance(given, dict) else {}


def _property(schema: Schema, name: str) -> Any:
    """The schema of the property of this name; True, which fits anything, where a pattern may
    apply.
    """
    properties = _properties(schema)
    if name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)
