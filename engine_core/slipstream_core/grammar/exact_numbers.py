"""Grammars of JSON Schemas with integers that the library would round.

Its numbers are floats, so integers from 2**53 on come out as others. Here they are regular
expressions and literals, in rules for all that they stand in: objects, arrays, alternatives,
references. What has none within stays a schema of the library's. Pure.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, NamedTuple

from slipstream_ipc.validation.json_schema import Schema, SchemaDocument, type_of

EXACT_BELOW = 2**53  # decision 021
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
ANNOTATIONS = frozenset(
    {
        "title",
        "description",
        "$comment",
        "default",
        "examples",
        "deprecated",
        "readOnly",
        "writeOnly",
        "$schema",
        "$defs",
        "definitions",
        "x-guidance",
        "contentMediaType",
    }
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
_MAX_DIGITS = 400
_MAX_CHARS = 2**20
_KEY = r'/"[^"\\\x00-\x1f\x7f]*"/'


class ExactGrammar(NamedTuple):
    """An expression, and the rules that it needs, in the library's form of Lark."""

    start: str
    rules: tuple[str, ...]


class NotExact(ValueError):  # noqa: N818  (an outcome)
    """numbers: schemas, by id, whose numbers cannot be exact where they stand."""

    def __init__(self, numbers: Iterable[int]) -> None:
        self.numbers = tuple(numbers)
        super().__init__("not exact")


def is_large(value: object) -> bool:
    """True if this is a number that a float need not represent exactly."""
    return isinstance(value, int | float) and not -EXACT_BELOW < value < EXACT_BELOW


def integer_pattern(least: int | None, most: int | None) -> str:
    """A regular expression of the integers from `least` to `most`; None: no bound. Raises
    ValueError where there are none.
    """
    _check(least, most)
    parts = []
    if least is None or least < 0:
        high = None if least is None else -least
        low = 1 if most is None or most >= 0 else -most
        parts.append(f"-({_naturals(low, high)})")
    if most is None or most >= 0:
        parts.append(_naturals(max(least or 0, 0), most))
    return "|".join(parts)


def decimal_pattern(
    least: int | None, most: int | None, *, above: bool = False, below: bool = False
) -> str:
    """A regular expression of the decimals, without exponents, from `least` to `most`. above,
    below: without `least`, without `most`. Raises ValueError where there are none.
    """
    _check(least, most)
    parts = []
    if least is None or least < 0:
        high = None if least is None else -least
        if most is None or most > 0 or (most == 0 and not below):
            parts.append(f"-({_decimals(0, high, above=True, below=above)})")
        else:
            parts.append(f"-({_decimals(-most, high, above=below or not most, below=above)})")
    if most is None or most > 0 or (most == 0 and not below):
        is_above = above and least is not None and least >= 0
        parts.append(_decimals(max(least or 0, 0), most, above=is_above, below=below))
    return "|".join(filter(None, parts))


def _check(least: int | None, most: int | None) -> None:
    if least is not None and most is not None and least > most:
        raise ValueError("no number is between these bounds")


def _decimals(least: int, most: int | None, *, above: bool, below: bool) -> str:
    parts = []
    if above:
        if most is None or least < most:
            parts.append(rf"{least}\.[0-9]*[1-9][0-9]*")
        least += 1
    if most is None or least < most:
        parts.append(rf"({_naturals(least, None if most is None else most - 1)})(\.[0-9]+)?")
    if most is not None and not below and least <= most:
        parts.append(rf"{most}(\.0+)?")
    if not parts:
        raise ValueError("no number is between these bounds")
    return "|".join(parts)


def _naturals(least: int, most: int | None) -> str:
    if most is not None and least > most:
        raise ValueError("no integer is between these bounds")
    num_digits = len(str(least)) if most is None else len(str(most))
    if num_digits > _MAX_DIGITS:
        raise ValueError("a bound is too long")
    parts = []
    for num in range(len(str(least)), num_digits + 1):
        low = max(least, 10 ** (num - 1) if num > 1 else 0)
        high = 10**num - 1 if most is None else min(most, 10**num - 1)
        parts.append(_between(str(low), str(high)))
    if most is None:
        parts.append(f"[1-9]{_digits(num_digits, None)}")
    return "|".join(parts)


def _between(low: str, high: str) -> str:
    """Numbers of one length."""
    same = next((i for i, pair in enumerate(zip(low, high, strict=True)) if len({*pair}) > 1), None)
    if same is None:
        return low
    first, last, num = int(low[same]), int(high[same]), len(low) - same - 1
    if not num:
        return f"{low[:same]}[{first}-{last}]"
    parts = [f"{first}({_tail(low[same + 1 :], is_low=True)})"]
    if last - first > 1:
        parts.append(f"[{first + 1}-{last - 1}]{_digits(num, num)}")
    parts.append(f"{last}({_tail(high[same + 1 :], is_low=False)})")
    return f"{low[:same]}({'|'.join(parts)})"


def _tail(digits: str, *, is_low: bool) -> str:
    """Strings of digits of this length that are not below, or not above."""
    parts = [digits]
    for index, digit in enumerate(digits):
        others = range(int(digit) + 1, 10) if is_low else range(int(digit))
        if others:
            num = len(digits) - index - 1
            parts.append(f"{digits[:index]}[{others[0]}-{others[-1]}]{_digits(num, num)}")
    return "|".join(parts)


def _digits(least: int, most: int | None) -> str:
    if most == 0:
        return ""
    return f"[0-9]{{{least},{'' if most is None else most}}}"


def exact_grammar(
    document: SchemaDocument,
    inexact: set[int],
    prefix: str = "x",
    prepare: Callable[[Schema], object] = lambda _: None,
) -> ExactGrammar:
    """The grammar of a document, some of whose schemas have numbers that are not exact. prefix: of
    the rules' names. prepare: is handed each schema that the library gets, to change it in place.
    Raises NotExact.
    """
    writer = _Writer(document, inexact, prefix, prepare)
    start = writer.value(document.root)
    return ExactGrammar(start, tuple(writer.rules))


class _Writer:
    def __init__(
        self,
        document: SchemaDocument,
        inexact: set[int],
        prefix: str,
        prepare: Callable[[Schema], object],
    ) -> None:
        self._document = document
        self._prepare = prepare
        self._inexact = inexact
        self._prefix = prefix
        self._options = document.root.get("x-guidance", {})
        self._reaching = self._reaching_inexact()
        self._names: dict[int, str] = {}
        self._num_chars = 0
        self.rules: list[str] = []
        blanks = self._options.get("whitespace_pattern")
        if blanks is None and self._options.get("whitespace_flexible") is not False:
            blanks = r"[ \n\r\t]+"
        blank = f"({blanks})?" if blanks else ""
        self._open = {char: f"/{re.escape(char)}{blank}/" for char in "{["}
        self._close = {char: f"/{blank}{re.escape(char)}/" for char in "}]"}
        separators = {
            char: self._options.get(name, char)
            for char, name in ((",", "item_separator"), (":", "key_separator"))
        }
        self._between = {char: f"/{blank}({text}){blank}/" for char, text in separators.items()}

    def _reaching_inexact(self) -> set[int]:
        """The schemas from which there is a way to an inexact one, by id."""
        users: dict[int, list[int]] = {}
        for number, place in self._document.places.items():
            target = self._document.target(place.schema)
            if isinstance(target, dict):
                users.setdefault(id(target), []).append(number)
        found, waiting = set(), list(self._inexact)
        while waiting:
            number = waiting.pop()
            if number in found:
                continue
            found.add(number)
            place = self._document.places[number]
            is_definition = len(place.path) > 1 and place.path[-2] in ("$defs", "definitions")
            if place.parent is not None and not is_definition:
                waiting.append(place.parent)
            waiting += users.get(number, ())
        return found

    def value(self, schema: Any) -> str:
        """An expression for the values of a schema."""
        if not isinstance(schema, dict) or id(schema) not in self._reaching:
            return self._library(schema)
        name = self._names.get(id(schema))
        if name is None:
            name = self._names[id(schema)] = f"{self._prefix}_{len(self._names)}"
            self._add(name, self._body(schema))
        return name

    def _add(self, name: str, body: str) -> None:
        self._num_chars += len(body)
        if self._num_chars > _MAX_CHARS:
            raise NotExact(self._inexact)
        self.rules.append(f"{name}: {body}")

    def _body(self, schema: Schema) -> str:
        words = {word for word in schema if word not in ANNOTATIONS and word in _KNOWN}
        constants = self._constants(schema)
        if constants is not None:
            self._only(schema, words, {"type", "const", "enum"})
            return constants
        if "$ref" in words:
            self._only(schema, words, {"$ref"})
            return self.value(self._document.target(schema))
        for word in ("anyOf", "oneOf"):
            if word in words:
                self._only(schema, words, {word})
                return " | ".join(self.value(each) for each in schema[word] if each is not False)
        self._only(schema, words, {*_KNOWN} - {"allOf"})
        return " | ".join(self._of_type(schema, each, words) for each in _listed(schema))

    def _only(self, schema: Schema, words: set[str], allowed: set[str]) -> None:
        if not words <= allowed:
            raise NotExact(self._within(schema))

    def _within(self, schema: Schema) -> list[int]:
        """The inexact schemas that can be reached from this one."""
        found: list[int] = []
        for number in self._inexact:
            seen, waiting = set(), [number]
            while waiting and id(schema) not in seen:
                each = waiting.pop()
                if each not in seen:
                    seen.add(each)
                    parent = self._document.places[each].parent
                    waiting += [] if parent is None else [parent]
            if id(schema) in seen:
                found.append(number)
        return found or list(self._inexact)

    def _constants(self, schema: Schema) -> str | None:
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if not isinstance(values, list):
            return None
        types = set(_listed(schema))
        fitting = [each for each in values if _fits(each, types)]
        texts = dict.fromkeys(self._spelled(each) for each in fitting)
        if not texts:
            raise NotExact(self._within(schema))
        return " | ".join(map(_literal, texts))

    def _spelled(self, value: Any) -> str:
        if isinstance(value, float):
            return format(Decimal(repr(value)), "f")
        if isinstance(value, dict):
            members = [
                f"{json.dumps(k, ensure_ascii=False)}:{self._spelled(v)}" for k, v in value.items()
            ]
            return f"{{{','.join(members)}}}"
        if isinstance(value, list):
            return f"[{','.join(map(self._spelled, value))}]"
        return json.dumps(value, ensure_ascii=False)

    def _of_type(self, schema: Schema, kind: str, words: set[str]) -> str:
        match kind:
            case "integer" | "number" if id(schema) in self._inexact:
                if "multipleOf" in words:
                    raise NotExact((id(schema),))
                try:
                    return f"/{_pattern(schema, kind)}/"
                except ValueError:
                    raise NotExact((id(schema),)) from None
            case "array" if self._reaches(*_within(schema, _ARRAYS)):
                self._only(schema, words & _ARRAYS, {"items", "minItems", "maxItems"})
                return self._array(schema)
            case "object" if self._reaches(*_within(schema, _OBJECTS)):
                allowed = {"properties", "required", "additionalProperties"}
                self._only(schema, words & _OBJECTS, allowed)
                return self._object(schema)
            case _:
                kept = {k: v for k, v in schema.items() if k not in BOUNDS or kind in _NUMBERS}
                return self._library({**kept, "type": kind})

    def _reaches(self, *schemas: object) -> bool:
        return any(id(each) in self._reaching for each in schemas)

    def _array(self, schema: Schema) -> str:
        least = schema.get("minItems", 0)
        most = schema.get("maxItems")
        opening, closing = self._open["["], self._close["]"]
        if most == 0 or schema["items"] is False:
            return f"{opening} {closing}"
        one, comma = self.value(schema["items"]), self._between[","]
        inner = one
        if most != 1:
            last = "" if most is None else most - 1
            inner = f"{one} ({comma} {one}){{{max(least - 1, 0)},{last}}}"
        return f"{opening} {inner} {closing}" if least else f"{opening} ({inner})? {closing}"

    def _object(self, schema: Schema) -> str:
        properties = dict(schema.get("properties", {}))
        required = schema.get("required", [])
        others = schema.get("additionalProperties", True)
        for name in required:
            properties.setdefault(name, others)
        comma, colon = self._between[","], self._between[":"]
        firsts: list[str] = []
        rest = ""
        if others is not False:
            names = "|".join(_escaped(_unquoted(name)) for name in properties)
            unlike = f' & ~/"({names})"/' if properties else ""
            key = f"{self._prefix.upper()}_KEY_{len(self._names)}_{len(self.rules)}"
            self._add(key, f"{_KEY}{unlike}")
            one = f"{key} {colon} {self.value(others)}"
            rest = f"({comma} {one})*"
            firsts = [f"{one} {rest}"]
        is_empty_allowed = not required
        for name, inner in reversed(properties.items()):
            if inner is False and name not in required:
                continue
            quoted = json.dumps(name, ensure_ascii=False)
            one = f"{_literal(quoted)} {colon} {self.value(inner)}"
            is_required = name in required
            firsts = [f"{one} {rest}", *([] if is_required else firsts)]
            behind = f"{comma} {one}" if is_required else f"({comma} {one})?"
            label = f"{self._prefix}_rest_{len(self.rules)}"
            self._add(label, f"{behind} {rest}")
            rest = label
        inner_text = f"({' | '.join(firsts)})" if firsts else ""
        optional = "?" if is_empty_allowed and firsts else ""
        return f"{self._open['{']} {inner_text}{optional} {self._close['}']}"

    def _library(self, schema: Any) -> str:
        """A schema that is the library's, with what it refers to."""
        if schema is True:
            schema = {}
        elif schema is False:
            raise NotExact(self._inexact)
        definitions: dict[str, Any] = {}
        names: dict[int, str] = {}
        waiting: list[Any] = []

        def copied(part: Any) -> Any:
            if isinstance(part, list):
                return [copied(each) for each in part]
            if not isinstance(part, dict):
                return part
            found = {k: copied(v) for k, v in part.items() if k not in ("$defs", "definitions")}
            target = self._document.target(part)
            if "$ref" in part and target is not None:
                if id(target) not in names:
                    names[id(target)] = f"d{len(names)}"
                    waiting.append(target)
                found["$ref"] = f"#/$defs/{names[id(target)]}"
            return found

        whole = copied(schema)
        while waiting:
            target = waiting.pop()
            definitions[names[id(target)]] = copied(target)
        if definitions:
            whole["$defs"] = definitions
        self._prepare(whole)
        text = json.dumps({**whole, "x-guidance": self._options})
        self._num_chars += len(text)
        return f"%json {text}"


_NUMBERS = ("integer", "number")
_ARRAYS = frozenset(("items", "prefixItems", "additionalItems", "minItems", "maxItems"))
_OBJECTS = frozenset(("properties", "required", "additionalProperties", "patternProperties"))
_OBJECTS |= {"minProperties", "maxProperties"}
_KNOWN = _ARRAYS | _OBJECTS
_KNOWN |= {"type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf", "multipleOf", *BOUNDS}
_KNOWN |= {"minLength", "maxLength", "pattern", "format"}


def _within(schema: Schema, words: Iterable[str]) -> list[object]:
    """The schemas that these keywords of a schema hold."""
    found: list[object] = []
    for word in words:
        given = schema.get(word)
        found.append(given)
        if isinstance(given, list):
            found += given
        elif isinstance(given, dict) and word in ("properties", "patternProperties"):
            found += given.values()
    return found


def _listed(schema: Schema) -> Sequence[str]:
    given = schema.get("type")
    found = given if isinstance(given, list) else [given] if isinstance(given, str) else _TYPES
    return [each for each in dict.fromkeys(found) if each != "integer" or "number" not in found]


def _fits(value: object, types: set[str]) -> bool:
    kind = type_of(value)
    if kind != "number" or "number" in types:
        return kind in types
    return "integer" in types and isinstance(value, int | float) and value == int(value)


def _pattern(schema: Mapping[str, Any], kind: str) -> str:
    """Raises ValueError where there is none."""
    low, above = _bound(schema, "minimum", "exclusiveMinimum", max)
    high, below = _bound(schema, "maximum", "exclusiveMaximum", min)
    if kind == "integer":
        least = None if low is None else math.floor(low) + 1 if above else math.ceil(low)
        most = None if high is None else math.ceil(high) - 1 if below else math.floor(high)
        return integer_pattern(least, most)
    for each in (low, high):
        if each is not None and each != each.to_integral_value():
            raise ValueError("a bound is no integer")
    least, most = (None if each is None else int(each) for each in (low, high))
    return decimal_pattern(least, most, above=above, below=below)


def _bound(
    schema: Mapping[str, Any], word: str, exclusive: str, tighter: Any
) -> tuple[Decimal | None, bool]:
    """A bound, and whether it is excluded, as draft 4 has it, too."""
    bound, other = schema.get(word), schema.get(exclusive)
    if isinstance(other, bool):
        return _decimal(bound), other and bound is not None
    if other is None or bound is None:
        return _decimal(bound if other is None else other), other is not None
    found = tighter(_decimal(bound), _decimal(other))
    return found, found == _decimal(other)


def _decimal(value: Any) -> Decimal | None:
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise ValueError("a bound is no number")
    return Decimal(repr(value))


def _literal(text: str) -> str:
    """A text as the grammar has it, whose lexer takes no DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _escaped(text: str) -> str:
    return re.sub(r"([\\/.^$|?*+(){}\[\]])", r"\\\1", text)


def _unquoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)[1:-1]
