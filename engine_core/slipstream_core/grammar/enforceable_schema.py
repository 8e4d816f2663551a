"""Makes of a JSON Schema one that the grammar library can enforce, and says what that leaves out.

- What says nothing goes silently: a `format` that is not known is an annotation, and so is a
  `propertyNames` of any strings.
- What no finite JSON fits is `false`, so that an answer never begins it.
- A keyword that cannot be enforced is left out and named, or refused where the schema is strict.
- References become pointers into the whole schema.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from slipstream_core.grammar.exact_numbers import (
    ANNOTATIONS,
    BOUNDS,
    ExactGrammar,
    NotExact,
    exact_grammar,
    is_large,
)
from slipstream_core.grammar.name_patterns import CONTROLS, escaped, names_outside, takes
from slipstream_ipc.validation.json_schema import (
    FORMATS,
    Schema,
    SchemaDocument,
    check_ends,
    schema_types,
    shown_path,
    type_of,
)

_TYPE_NAMES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
_APPLICATORS = (
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "dependencies",
    "patternProperties",
)
_NAMES_OF_PLACES = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_MEET = ("patternProperties", "minProperties", "maxProperties")
_MORE, _PATTERNS = "additionalProperties", "patternProperties"
_PLAIN = f"[^{CONTROLS}]*"
_PLAIN_NAME = f"^{_PLAIN}$"
_LITERAL = re.compile(rf"\^([^\\^$.|?*+()\[\]{{}}{CONTROLS}]+)(\$?)")
_ALL_NAMES = frozenset(("", "^", "$", ".*", "^.*", ".*$", "^.*$"))
_CONTROL = re.compile(f"[{CONTROLS}]")
_END, _REST = "end", "rest"  # longer than a character
_MAX_LOOKS = 2**14  # at pairs of schemas, for one schema
_MAX_DEPTH = 8  # of schemas within each other that are told apart

WhyNot = Callable[[Schema], str]
"""Why the library does not compile a schema; empty if it does."""


class StrictSchemaError(ValueError):
    """A strict schema has a keyword that cannot be enforced; the message names it."""


class Enforceable(NamedTuple):
    """A schema whose keywords can all be enforced. left_out: paths of those that it lacks.

    exact: its grammar where the library would round some of its numbers, else None.
    """

    schema: Schema | bool
    left_out: tuple[str, ...] = ()
    exact: ExactGrammar | None = None


def enforceable(
    root: Any,
    why_not: WhyNot,
    *,
    is_strict: bool,
    options: Mapping[str, Any] = MappingProxyType({}),
    overrides: Mapping[str, Any] = MappingProxyType({}),
    prefix: str = "x",
) -> Enforceable:
    """`root`, which is changed in place: decoded JSON.

    options: the library's; the schema's own `x-guidance` goes before them, and `overrides` before
    that. prefix: of the names of rules.

    Raises StrictSchemaError, EndlessSchemaError, or ValueError for what is no schema.
    """
    if isinstance(root, bool):
        return Enforceable(root)
    if not isinstance(root, dict):
        raise ValueError("a schema is an object or a boolean")
    document = SchemaDocument(root)
    without = _without_endless(document, check_ends(document))
    cleaner = _Cleaner(document, why_not, is_strict=is_strict)
    for number in list(document.places):
        if number not in without:
            cleaner.clean(document.places[number].schema)
    cleaner.leave_what_meets(without)
    own = root.get("x-guidance")
    always = {"coerce_one_of": True, "lenient": not is_strict}
    root["x-guidance"] = {
        **options,
        **(own if isinstance(own, dict) else {}),
        **overrides,
        **always,
    }
    exact = None

    def not_exact(*_: object) -> NoReturn:
        raise NotExact(cleaner.inexact)

    while cleaner.inexact and exact is None:
        try:
            exact = exact_grammar(
                document,
                cleaner.inexact,
                prefix,
                lambda each: _spell_names_once(SchemaDocument(each), set(), why_not, not_exact),
            )
        except NotExact as error:
            cleaner.leave_numbers(tuple(error.numbers))
    if exact is None:
        _spell_names_once(document, without, why_not, cleaner.leave)
    return Enforceable(root, tuple(dict.fromkeys(cleaner.left_out)), exact)


class _Names(NamedTuple):
    """The names that an object's schemas speak of: those of properties and of patterns that ask
    for one name, the beginnings that patterns ask for, and patterns that ask for more.
    """

    whole: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()


def _spell_names_once(
    document: SchemaDocument,
    without: set[int],
    why_not: WhyNot,
    leave: Callable[[Schema, str, str], object],
) -> None:
    """Write properties of any other name as those that a pattern takes: the library spells what a
    pattern takes in one way, but lets any character of another name be escaped, those of a known
    one, too: `{"a": 1, "\\u0061": 2}`. The pattern takes no control characters: they would have
    two spellings, and masks would cost more (decision 021).

    Where several schemas apply to one object their patterns must not meet, unless they are the
    same: then all are written with the names and patterns of all. leave: is handed the keyword of a
    schema that can be written in neither way, and why, and leaves it out.
    """
    schemas = [place.schema for each, place in document.places.items() if each not in without]
    while True:
        known = [
            each
            for each in schemas
            if any(each.get(word) for word in ("properties", "required", _PATTERNS))
            and each.get(_MORE, True) is not False
        ]
        plain = [each for each in known if _is_any(each.get(_MORE, True))]
        if len(plain) == len(known) and not any(word in each for word in _MEET for each in schemas):
            for schema in plain:
                _spell_once(document, schema, None)
            return
        before = [(each, dict(each)) for each in schemas]
        for are_shared in (False, True):
            shared: Mapping[int, _Names] = {}
            if are_shared:
                objects = _objects(document, schemas)
                for of_one in objects:
                    _divide_patterns(of_one)
                shared = _shared_names(objects)
            is_spelled = all(_spell_once(document, each, shared.get(id(each))) for each in known)
            if is_spelled and not why_not(document.root):
                return
            for each, was in before:
                each.clear()
                each.update(was)
        if why_not(document.root):
            return
        word = _PATTERNS if any(each.get(_PATTERNS) for each in known) else _MORE
        for each in known:
            if each.get(word) and not (word == _MORE and _is_any(each[word])):
                leave(each, word, "a name's other spellings cannot be told from it")
        if word == _MORE:  # all others have any value now, and one pattern
            for each in known:
                _spell_once(document, each, None)
            return


def _objects(document: SchemaDocument, schemas: Iterable[Schema]) -> list[list[Schema]]:
    """The schemas that may apply to one object, for each object."""
    object_of = {id(schema): id(schema) for schema in schemas}

    def found(number: int) -> int:
        while object_of[number] != number:
            number = object_of[number]
        return number

    for schema in schemas:
        beside = [document.target(schema)]
        for word in ("allOf", "anyOf", "oneOf"):
            beside += schema[word] if isinstance(schema.get(word), list) else []
        for each in beside:
            if id(each) in object_of:
                object_of[found(id(each))] = found(id(schema))
    is_joined = True
    while is_joined:  # values of one name in one object are one object
        is_joined = False
        values: dict[tuple[int, str], int] = {}
        for schema in schemas:
            for name, each in (schema.get("properties") or {}).items():
                if id(each) not in object_of:
                    continue
                one = values.setdefault((found(id(schema)), name), id(each))
                if found(one) != found(id(each)):
                    object_of[found(id(each))] = found(one)
                    is_joined = True
    objects: dict[int, list[Schema]] = {}
    for schema in schemas:
        objects.setdefault(found(id(schema)), []).append(schema)
    return list(objects.values())


def _shared_names(objects: Iterable[Sequence[Schema]]) -> dict[int, _Names]:
    """The names of all schemas of an object, by the id of each of them, where they are several."""
    shared: dict[int, _Names] = {}
    for schemas in objects:
        if len(schemas) > 1:
            each_names = zip(*map(_known_names, schemas), strict=True)
            names = _Names(*(tuple(dict.fromkeys(itertools.chain(*each))) for each in each_names))
            shared |= {id(schema): names for schema in schemas}
    return shared


def _divide_patterns(schemas: Sequence[Schema]) -> None:
    """Write a pattern of an object's schemas as one for each of some names, and one for the rest of
    what it takes: names that a schema without it has itself beside a schema of all others. That
    one is to be a pattern's, too, which must not take what the schema says of its own names.
    """
    patterns = dict.fromkeys(itertools.chain(*(each.get(_PATTERNS) or () for each in schemas)))
    for pattern in patterns:
        literal = _LITERAL.fullmatch(pattern)
        if literal and literal[2]:
            continue
        names = {
            name: None
            for schema in schemas
            if pattern not in (schema.get(_PATTERNS) or ())
            and schema.get(_MORE, True) is not False
            and not _is_any(schema.get(_MORE, True))
            for name in schema.get("properties") or ()
            if takes(pattern, name)
        }
        outside = names_outside((), [pattern]) if names else None
        rest = None if outside is None else names_outside(names, [outside] if outside else ())
        if rest is None:
            continue
        for schema in schemas:
            own = dict(schema.get(_PATTERNS) or {})
            if pattern in own:
                value = own.pop(pattern)
                parts = [f"{_literal(name)}$" for name in names] + ([rest] if rest else [])
                schema[_PATTERNS] = dict.fromkeys(parts, value) | own


def _known_names(schema: Schema) -> _Names:
    whole = list(schema.get("properties") or ())
    begun: list[str] = []
    patterns: list[str] = []
    for pattern in schema.get(_PATTERNS) or ():
        if found := _LITERAL.fullmatch(pattern):
            (whole if found[2] else begun).append(found[1])
        else:
            patterns.append(pattern)
    return _Names(tuple(whole), tuple(begun), tuple(patterns))


def _spell_once(document: SchemaDocument, schema: Schema, shared: _Names | None) -> bool:
    """Write other properties of a schema as a pattern's; False, if that cannot be. shared: names
    and patterns that are to have patterns of their own, where the schema says nothing of them.
    """
    more, patterns = schema.get(_MORE, True), dict(schema.get(_PATTERNS) or {})
    whole, begun, asked = _known_names(schema)
    takes_all = any(each in _ALL_NAMES for each in patterns)
    if isinstance(more, dict) and document.is_referred(more):
        document.move_with_references(more, f"others_{len(document.root.get('$defs') or ())}")
        more = {"$ref": document.pointer(more)}
    is_any = not patterns and _is_any(more)
    if shared is not None and not takes_all:
        new = [each for each in shared.patterns if each not in asked]
        begins = [each for each in shared.begun if each not in begun]
        asked, begun = (*asked, *new), (*begun, *begins)
        names = [
            each
            for each in shared.whole
            if each not in whole
            and not each.startswith(begun)
            and not any(takes(pattern, each) for pattern in asked)
        ]
        whole = (*whole, *names)
        new += [_literal(each) for each in begins] + [f"{_literal(each)}$" for each in names]
        patterns.update(dict.fromkeys(new, more))
    if shared is not None:  # in one order everywhere: patterns that are the same read the same
        whole, begun, asked = shared
    others: str | None
    if takes_all:
        others = ""
    elif asked:
        others = names_outside(whole, [*map(_literal, begun), *asked])
    elif is_any and shared is None:
        others = _PLAIN_NAME
    else:
        others = other_names(dict.fromkeys(whole, True) | dict.fromkeys(begun, False))
    if others is None:
        return False
    if others:
        patterns[others] = more
    rest = {word: each for word, each in schema.items() if word not in (_MORE, _PATTERNS)}
    schema.clear()  # in front: the library reads what stands before `allOf` by itself
    schema.update({_PATTERNS: patterns, _MORE: False, **rest})
    return True


def _literal(name: str) -> str:
    """A pattern of names that begin with this one, as people write it."""
    as_it_is = f"^{name}"
    return as_it_is if _LITERAL.fullmatch(as_it_is) else f"^{''.join(map(escaped, name))}"


def other_names(names: Mapping[str, bool]) -> str:
    """A regular expression of the names without control characters that are none of `names`, and do
    not begin with those that are False.
    """
    root: dict[str, Any] = {}
    for name, is_whole in names.items():
        if _CONTROL.search(name):
            continue
        node = root
        for character in name:
            node = node.setdefault(character, {})
        node[_END if is_whole else _REST] = {}
    return f"^{_outside(root)}$"


def _outside(node: dict[str, Any]) -> str:
    if _REST in node:
        return ""
    inner = {each: found for each, found in node.items() if each != _END}
    ways = [f"[^{''.join(map(escaped, inner))}{CONTROLS}]{_PLAIN}"]
    ways += [escaped(each) + rest for each, found in inner.items() if (rest := _outside(found))]
    return f"(?:{'|'.join(ways)}){'' if _END in node else '?'}"


def _without_endless(document: SchemaDocument, endless: set[int]) -> set[int]:
    """Write `false` in place of endless schemas; what is within them, by id, except for what is
    referred to from elsewhere, which moves to `$defs`.
    """
    without: set[int] = set()
    for number, place in document.places.items():
        if number in endless or place.parent in without:
            without.add(number)
    for number in without:
        place = document.places[number]
        if number in endless and place.parent not in without and place.container is not None:
            place.container[place.key] = False
    for number, place in document.places.items():
        target = document.target(place.schema)
        if number in without or not isinstance(target, dict):
            continue
        if id(target) in endless:
            place.schema["$ref"] = "#/$defs/nothing"
            document.root.setdefault("$defs", {})["nothing"] = False
            document.retarget(place.schema, False)
        elif id(target) in without:
            without -= document.move(target, f"kept_{len(without)}")
    return without


class _Cleaner:
    def __init__(self, document: SchemaDocument, why_not: WhyNot, *, is_strict: bool) -> None:
        self._document = document
        self._why_not = why_not
        self._is_strict = is_strict
        self._known: dict[str, str] = {}  # why a pattern is not taken
        self._disjoint = _Disjoint(document)
        self._names_with_controls = {
            name
            for place in document.places.values()
            for name in (place.schema.get("properties") or ())
            if _CONTROL.search(name)
        }
        self.left_out: list[str] = []
        self.inexact: set[int] = set()

    def clean(self, schema: Schema) -> None:
        """Clean this schema, but not those within it."""
        self._references(schema)
        self._says_nothing(schema)
        self._unevaluated(schema)
        for word in _UNENFORCED:
            if word in schema:
                self.leave(schema, word)
        self._types(schema)
        self._choices(schema)
        self._strings(schema)
        self._members(schema)
        self._numbers(schema)

    def leave(self, schema: Schema, word: str, why: str = "", *, is_kept: bool = False) -> None:
        """Leave a keyword of a schema out; raise StrictSchemaError if the schema is strict."""
        name = shown_path((*self._document.path(schema), word))
        if self._is_strict:
            reason = f" ({why})" if why else ""
            raise StrictSchemaError(f"{name} cannot be enforced, and the schema is strict{reason}")
        if not is_kept:
            schema.pop(word, None)
        self.left_out.append(name)

    def _leave_patterns(self, schema: Schema, why: str) -> None:
        """Leave `patternProperties` out, and what says which names are others beside it."""
        self.leave(schema, _PATTERNS, why)
        if schema.get(_MORE, True) is not True:
            self.leave(schema, _MORE, "it is beside patternProperties")

    def leave_what_meets(self, without: set[int]) -> None:
        """Leave keywords out that the library takes in one schema, but not in several that apply to
        one value: as few as change its reason, the inner and later ones first.

        without: ids of schemas that are not looked at.
        """
        document = self._document
        schemas = [place.schema for each, place in document.places.items() if each not in without]
        if not _may_meet(schemas):
            return
        while why := self._why_not(document.root):
            word = next((each for text, each in _MEETING.items() if why.startswith(text)), None)
            having = [each for each in reversed(schemas) if word in each]
            if word is None or not having:
                return
            found = next((each for each in having if self._reason_without(each, word) != why), None)
            schema = having[0] if found is None else found
            if word == _PATTERNS:
                self._leave_patterns(schema, why)
            else:
                self.leave(schema, word, why)
            if word == "$ref":
                document.retarget(schema, True)

    def _reason_without(self, schema: Schema, word: str) -> str:
        before = dict(schema)
        del schema[word]
        try:
            return self._why_not(self._document.root)
        finally:  # with its keywords in their order
            schema.clear()
            schema.update(before)

    def _references(self, schema: Schema) -> None:
        given = schema.get("$ref")
        if isinstance(given, str):
            target = self._document.target(schema)
            if target is None:
                self.leave(schema, "$ref", f"nothing is at {given[:100]!r}")
            elif isinstance(target, dict):
                schema["$ref"] = self._document.pointer(target)
        for word in _NAMES_OF_PLACES:
            schema.pop(word, None)
        version = schema.get("$schema")
        if isinstance(version, str) and _DRAFT.fullmatch(version) is None:
            del schema["$schema"]

    def _says_nothing(self, schema: Schema) -> None:
        given = schema.get("format")
        if isinstance(given, str) and given not in FORMATS:
            del schema["format"]
        for word, is_nothing in _NOTHING.items():
            if word in schema and is_nothing(schema[word]):
                del schema[word]
        if "if" not in schema:
            schema.pop("then", None)
            schema.pop("else", None)
        elif "then" not in schema and "else" not in schema:
            del schema["if"]
        if "contains" not in schema:
            schema.pop("minContains", None)
            schema.pop("maxContains", None)
        elif schema.get("minContains") == 0 and "maxContains" not in schema:
            del schema["contains"], schema["minContains"]
        if (most := schema.get("maxItems")) in (0, 1) and not isinstance(most, bool):
            schema.pop("uniqueItems", None)

    def _unevaluated(self, schema: Schema) -> None:
        """Replace unevaluated parts by additional ones, where nothing else evaluates anything."""
        evaluates_alone = not any(word in schema for word in _APPLICATORS)
        if "unevaluatedProperties" in schema:
            if "additionalProperties" in schema:
                del schema["unevaluatedProperties"]
            elif evaluates_alone:
                schema["additionalProperties"] = schema.pop("unevaluatedProperties")
        if "unevaluatedItems" in schema:
            if isinstance(schema.get("items"), dict | bool) or "additionalItems" in schema:
                del schema["unevaluatedItems"]
            elif evaluates_alone and "contains" not in schema:
                word = "additionalItems" if "items" in schema else "items"
                schema[word] = schema.pop("unevaluatedItems")

    def _types(self, schema: Schema) -> None:
        given = schema.get("type")
        if isinstance(given, str | list):
            listed = given if isinstance(given, list) else [given]
            if any(isinstance(each, str) and each not in _TYPE_NAMES for each in listed):
                self.leave(schema, "type", "there is no such type")

    def _choices(self, schema: Schema) -> None:
        branches = schema.get("oneOf")
        if isinstance(branches, list) and not self._disjoint.are_all(branches):
            # it stays, and the library allows what fits any of them
            self.leave(schema, "oneOf", "several of its schemas may fit one value", is_kept=True)

    def _strings(self, schema: Schema) -> None:
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and (why := self._why_no_pattern(pattern)):
            self.leave(schema, "pattern", why)

    def _why_no_pattern(self, pattern: str) -> str:
        if pattern not in self._known:
            self._known[pattern] = self._why_not({"type": "string", "pattern": pattern})
        return self._known[pattern]

    def _members(self, schema: Schema) -> None:
        patterns = schema.get("patternProperties")
        if isinstance(patterns, dict) and patterns:
            why = next(filter(None, map(self._why_no_pattern, patterns)), "")
            if not why and len(patterns) > 1:
                alone = dict.fromkeys(patterns, True)
                why = self._why_not({"type": "object", "patternProperties": alone})
            if not why and any(
                takes(pattern, name) is not False
                for pattern in patterns
                for name in self._names_with_controls
            ):
                why = "a name with control characters has several spellings"
            if why:
                self._leave_patterns(schema, why)
        given = schema.get("required")
        required = (
            {each for each in given if isinstance(each, str)} if isinstance(given, list) else ()
        )
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        properties = schema.get("properties")
        names = properties if isinstance(properties, dict) else {}
        if isinstance(least, int) and least <= len(required):
            del schema["minProperties"]
        is_closed = schema.get("additionalProperties") is False
        is_closed = is_closed and not schema.get("patternProperties")
        if isinstance(most, int) and is_closed and most >= len(names):
            del schema["maxProperties"]
        if not names.keys() <= set(required):
            for word in ("minProperties", "maxProperties"):
                if word in schema:
                    self.leave(schema, word, "there are properties that are not required")

    def _numbers(self, schema: Schema) -> None:
        for word in _COUNTS:
            if isinstance(value := schema.get(word), float) and value.is_integer():
                schema[word] = int(value)
        if any(is_large(schema[word]) for word in BOUNDS if word in schema):
            self.inexact.add(id(schema))
        else:
            self._bounds(schema)
        if "multipleOf" in schema:
            why = self._why_not({"type": "number", "multipleOf": schema["multipleOf"]})
            if why:
                self.leave(schema, "multipleOf", why)
        for word in ("const", "enum"):
            if word in schema and any(map(is_large, _leaves(schema[word]))):
                self.inexact.add(id(schema))

    def _bounds(self, schema: Schema) -> None:
        words = {word: schema[word] for word in BOUNDS if word in schema}
        if any(isinstance(value, float) for value in words.values()):
            why = self._why_not({"type": "number", **words})
            if why and not why.startswith(_NONE_FITS):
                for word in words:
                    self.leave(schema, word, why)

    def leave_numbers(self, numbers: Iterable[int]) -> None:
        """Leave out the large numbers of these schemas, which stand where they cannot be kept."""
        why = "of integers from 2**53 on, beside what they stand in"
        for number in numbers:
            schema = self._document.places[number].schema
            for word in (*BOUNDS, "const", "enum"):
                if word in schema and any(map(is_large, _leaves(schema[word]))):
                    self.leave(schema, word, why)
            self._bounds(schema)
            self.inexact.discard(number)


_NONE_FITS = "Unsatisfiable"
# beginnings of the library's reasons against several schemas that apply to one value, and the
# keyword that each is about
_MEETING = {
    "patternProperty regexes": _PATTERNS,
    "circular references with sibling keys": "$ref",
    "fuel exhausted": "multipleOf",
}
_DRAFT = re.compile(r"https?://json-schema\.org/(?:draft-0[467]|draft/20(?:19-09|20-12))/schema#?")


def _may_meet(schemas: Iterable[Schema]) -> bool:
    """True if the library may have one of _MEETING against these schemas; it is quick to look."""
    num: Counter[str] = Counter()
    for schema in schemas:
        num.update(each for each in _MEETING.values() if each in schema)
        if "allOf" in schema or ("$ref" in schema and len(schema) > 1):
            return True
    return num[_PATTERNS] > 1 or num["multipleOf"] > 1


_UNENFORCED = (
    "uniqueItems",
    "contains",
    "minContains",
    "maxContains",
    "not",
    "if",
    "then",
    "else",
    "propertyNames",
    "dependentSchemas",
    "dependentRequired",
    "dependencies",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)


def _is_any(value: Any) -> bool:
    return value is True or (isinstance(value, dict) and not value.keys() - ANNOTATIONS)


def _is_any_string(value: Any) -> bool:
    if isinstance(value, dict) and value.get("type") == "string":
        value = {word: each for word, each in value.items() if word != "type"}
    return _is_any(value)


_NOTHING: Mapping[str, Callable[[Any], bool]] = {
    "propertyNames": _is_any_string,
    "uniqueItems": lambda value: value is False,
    "not": lambda value: value is False,
    "dependentSchemas": lambda value: value == {},
    "dependentRequired": lambda value: value == {},
    "dependencies": lambda value: value == {},
    "patternProperties": lambda value: value == {},
    "unevaluatedItems": _is_any,
    "unevaluatedProperties": _is_any,
}


def _leaves(value: Any) -> Iterator[object]:
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
        else:
            yield each


class _Disjoint:
    """Checks that no value fits two schemas, as far as types, constants and required properties
    tell; when in doubt, one does.
    """

    def __init__(self, document: SchemaDocument) -> None:
        self._document = document
        self._num_left = _MAX_LOOKS

    def are_all(self, schemas: list[Any]) -> bool:
        """True if none of these schemas has a value in common with another."""
        return all(
            self._are(one, other, 0)
            for index, one in enumerate(schemas)
            for other in schemas[index + 1 :]
        )

    def _parts(self, schema: Any, depth: int) -> list[Schema]:
        """Schemas that a value fits if it fits this one."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return []
        found = [schema]
        if isinstance(schema.get("$ref"), str):
            found += self._parts(self._document.target(schema), depth + 1)
        if isinstance(inner := schema.get("allOf"), list):
            for each in inner:
                found += self._parts(each, depth + 1)
        return found

    def _are(self, one: Any, other: Any, depth: int) -> bool:
        self._num_left -= 1
        if one is False or other is False:
            return True
        if depth > _MAX_DEPTH or self._num_left < 0:
            return False
        parts = self._parts(one, depth), self._parts(other, depth)
        if any(self._are_plain(p, q) for p in parts[0] for q in parts[1]):
            return True
        for these, whole in ((parts[0], other), (parts[1], one)):
            for part in these:
                for word in ("anyOf", "oneOf"):
                    branches = part.get(word)
                    if isinstance(branches, list) and all(
                        self._are(each, whole, depth + 1) for each in branches
                    ):
                        return True
        return self._are_objects(*parts, depth)

    def _are_plain(self, one: Schema, other: Schema) -> bool:
        if not schema_types(one) & schema_types(other):
            return True
        for this, that in ((one, other), (other, one)):
            values = _values(this)
            if values is None:
                continue
            types, others = schema_types(that), _values(that)
            fitting = [each for each in values if type_of(each) in types]
            if not fitting or (others is not None and not _share(fitting, others)):
                return True
        return False

    def _are_objects(self, one: list[Schema], other: list[Schema], depth: int) -> bool:
        for parts in (one, other):
            if not any(schema_types(part) == {"object"} for part in parts):
                return False
        for name in _required(one) | _required(other):
            found = [[p for part in parts for p in _property(part, name)] for parts in (one, other)]
            if any(self._are(p, q, depth + 1) for p in found[0] for q in found[1]):
                return True
            if False in found[0] or False in found[1]:
                return True
        return False


def _values(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    given = schema.get("enum")
    return given if isinstance(given, list) else None


def _share(some: list[Any], others: list[Any]) -> bool:
    def key(value: Any) -> tuple[str, str]:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        return type_of(value), repr(value)

    return not {key(each) for each in some}.isdisjoint(map(key, others))


def _required(parts: list[Schema]) -> set[str]:
    given = [part.get("required") for part in parts]
    return {
        name for some in given if isinstance(some, list) for name in some if isinstance(name, str)
    }


def _property(schema: Schema, name: str) -> list[Any]:
    """The schemas that the property of this name has to fit, as far as this schema states them."""
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return [properties[name]]
    if schema.get("patternProperties") or "additionalProperties" not in schema:
        return []
    return [schema["additionalProperties"]]
