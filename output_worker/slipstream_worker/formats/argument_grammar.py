"""Grammars of functions' arguments, in the form in which a format writes them: JSON, tagged
parameters, or keys and values in brackets.

- What a grammar allows, the reader of the same element reads as arguments that fit the schema.
- A parameter comes once, in the schema's order. Other parameters than a schema's are allowed where
  it has none and forbids none.
- What cannot be kept (a pattern of a part of a string without quotes) is left out and named in a
  comment, from which the core learns of it; except of a function that is `strict`: that is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.formats.answer_format import (
    Delimiter,
    KeywordArguments,
    LiteralText,
    NestedElements,
    TaggedParameters,
)
from slipstream_ipc.messages import FORMAT_MARK, LEFT_OUT_MARK, MAX_LEFT_OUT, SCHEMA_MARK
from slipstream_ipc.validation.json_schema import (
    FORMATS,
    EndlessSchemaError,
    SchemaDocument,
    check_ends,
    shown_path,
)
from slipstream_worker.formats.property_types import property_types, referred, type_of
from slipstream_worker.formats.scanners.values import escape_attribute, value_as_json

Schema = Mapping[str, Any]
ANY_CHAR = "(.|\\n)"

# one space, or a newline and an indent: with any blanks a model may write nothing else
_BLANKS = r" |\n[ \t]{0,40}"
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_DESCRIPTIONS = ("description", "title", "$comment")
_MAX_DEPTH = 32  # of schemas within each other
_NUMBER_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_WORDS_OF = {  # keywords that say nothing of values of other types
    "string": ("minLength", "maxLength", "pattern", "format", "contentEncoding"),
    "number": _NUMBER_KEYWORDS,
    "array": ("items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"),
    "object": (
        "properties",
        "required",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
    ),
}
_DEFINITIONS = ("$defs", "definitions")
_ANNOTATIONS = frozenset(
    (*_DESCRIPTIONS, *_DEFINITIONS, "default", "examples", "deprecated", "readOnly", "writeOnly")
) | {"$schema", "$id", "$anchor", "additionalProperties"}
_COMMA = '"," " "?'
_KEY = "/[A-Za-z_][A-Za-z0-9_.-]{0,63}/"
# in tags: whatever a tool may call a parameter, such as `$filter` or `max age`
_ANY_KEY = r"""/[^<>"\x00-\x20\x7f]([^<>"\x00-\x1f\x7f]{0,254}[^<>"\x00-\x20\x7f])?/"""
_PYTHON_WORDS = {"boolean": '"True" | "False"', "null": '"None"'}
_JSON_WORDS = {"boolean": '"true" | "false"', "null": '"null"'}
_NOT_BARE = frozenset(",:()[]{}'\"=<> \t\r\n")


class _NotKept(BadRequest):
    """Something of a schema cannot be kept in a format that is not JSON."""


class ArgumentGrammar:
    """Writes the arguments of one request's functions, as rules and terminals of llguidance."""

    def __init__(
        self, rules: list[str], token_ids: Mapping[str, int], spelled: Collection[str] = ()
    ) -> None:
        """`rules`: what is written is appended. token_ids: of the literals that are one token.
        spelled: those of them that other literals are made of.
        """
        self._rules = rules
        self._token_ids = token_ids
        parts = "|".join(re.escape(each) for each in sorted(spelled) if each in token_ids)
        self._spelled = re.compile(f"({parts})") if parts else None
        self._known: dict[object, str] = {}  # names of rules that were written
        self._left_out: dict[str, None] = {}  # paths of keywords, in order

    def json(self, number: int, function: Schema) -> str:
        """The arguments of the function of this number as a JSON object. Raises BadRequest, as do
        the others.
        """
        return self._once((number, "json"), f"args_{number}", lambda: self._json(function))

    def tagged(self, number: int, function: Schema, element: TaggedParameters) -> str:
        """The arguments as tagged parameters, with what ends them."""

        def text(function: Schema) -> str:
            return _TaggedArguments(self, function, element).text()

        write = partial(self._kept, function, text)
        return self._once((number, element), f"tagged_{number}", write)

    def elements(self, number: int, function: Schema, element: NestedElements) -> str:
        """The arguments as elements, with what ends them. Lists and objects are JSON, which a
        reader of elements takes, too: it needs no types of what is within them.
        """

        def text(function: Schema) -> str:
            return _element_arguments(self, function, element)

        write = partial(self._kept, function, text)
        return self._once((number, element), f"elements_{number}", write)

    def keywords(self, number: int, function: Schema, element: KeywordArguments) -> str:
        """The arguments as keys and values, with the bracket that closes them."""
        delimiter = element.string_delimiter
        words = _PYTHON_WORDS if delimiter is None else _JSON_WORDS

        def text(function: Schema) -> str:
            values = _Values(self, _Parameters(self, function), _Spelling(words, delimiter))
            return values.arguments(element)

        write = partial(self._kept, function, text)
        return self._once((number, element), f"keywords_{number}", write)

    def literal(self, part: Delimiter | LiteralText) -> str:
        """A literal: a token alone, text, or tokens with text between."""
        token_id = self._token_ids.get(part.literal) if isinstance(part, Delimiter) else None
        if token_id is not None:
            return f"<[{token_id}]>"
        if self._spelled is None:
            return literal_text(part.literal)
        return self.spelled_text(part.literal)

    def spelled_text(self, text: str) -> str:
        """Text in which spelled tokens are these tokens."""
        parts = self._spelled.split(text) if self._spelled else [text]
        ids = self._token_ids
        return " ".join(
            f"<[{ids[each]}]>" if number % 2 else literal_text(each)
            for number, each in enumerate(parts)
            if each
        )

    def is_token(self, part: Delimiter | LiteralText) -> bool:
        """True if this literal is a token, which differs from its letters as text."""
        return isinstance(part, Delimiter) and part.literal in self._token_ids

    def first_token(self, part: Delimiter | LiteralText) -> int | None:
        """The token that this literal is or begins with; None: it begins with text."""
        if isinstance(part, Delimiter) and part.literal in self._token_ids:
            return self._token_ids[part.literal]
        found = self._spelled.match(part.literal) if self._spelled else None
        return None if found is None else self._token_ids[found[0]]

    def rule(self, name: str, body: str) -> str:
        """Add a rule, or a terminal where the name is in capitals; returns its unique name."""
        known = self._known.get((name, body))
        if known is None:
            known = self._known[name, body] = f"{name}_{len(self._rules)}"
            self._rules.append(f"{known}: {body}")
        return known

    def reserve(self, name: str) -> tuple[str, int]:
        """A rule's name and place, for a body that is written later and may refer to it."""
        self._rules.append("")
        number = len(self._rules) - 1
        return f"{name}_{number}", number

    def fill(self, name: str, number: int, body: str) -> None:
        """Write the body of a reserved rule."""
        self._rules[number] = f"{name}: {body}"

    def leave_out(self, path: str) -> None:
        """Note that a schema's keyword is not kept, unless many are noted already."""
        if path not in self._left_out and len(self._left_out) < MAX_LEFT_OUT:
            self._left_out[path] = None
            self._rules.append(f"{LEFT_OUT_MARK}{json.dumps(path)}")

    def text_up_to(
        self,
        part: Delimiter | LiteralText,
        least: int = 0,
        most: int = -1,
        before: str = "",
        avoided: str = "",
        bare: str = "",
    ) -> str:
        """Any text, of `least` to `most` characters, then `before` and the literal.

        Text never has a token within; where the literal is read as text, it ends at the first place
        where that stands. avoided: what the literal has once, and the text has nowhere. bare: a
        terminal of the text, in place of any.
        """

        def text(behind: str) -> str:
            if not bare:
                return f"/{ANY_CHAR}{_count(least, most)}{behind}/"
            return f"({bare} /{behind}/)" if behind else bare

        if self.is_token(part):
            return f"{self.rule('TEXT', text(pattern_of(before)))} {self.literal(part)}"
        end = pattern_of(part.literal)
        if self.first_token(part) is not None:
            unlike = f"~/{ANY_CHAR}*{pattern_of(avoided) or end}{ANY_CHAR}*/"
            terminal = self.rule("TEXT", f"{text(pattern_of(before))} & {unlike}")
            return f"{terminal} {self.literal(part)}"
        whole = text(pattern_of(before) + end)
        if avoided:
            twice = f"{pattern_of(avoided)}{ANY_CHAR}*".join([f"{ANY_CHAR}*", "", ""])
            return self.rule("TEXT", f"{whole} & ~/{twice}/")
        # greedy would pass the tag, lazy could not be bounded in length (decision 019)
        return self.rule("TEXT", f"{whole} & ~/{ANY_CHAR}*{end}{ANY_CHAR}+/")

    def check_texts(self, function: Schema, schema: object) -> None:
        """Refuse a schema whose texts have delimiters in them: they would be tokens."""
        for text in _strings(schema):
            literal = next((each for each in self._token_ids if each in text), None)
            if literal is not None:  # llguidance 1.9.1 writes fixed text with such tokens
                given = Summary(f"{literal!r} in the parameters of {function['name']!r}"[:300])
                raise BadRequest("tools", given, "none of the model's delimiters there")

    def _kept(self, function: Schema, write: Callable[[Schema], str]) -> str:
        """The text that `write` makes of a function. Where it cannot keep to the schema of one that
        is not strict, that is left out and named: its parameters have any values. Raises
        BadRequest.
        """
        num_rules, num_known, num_left_out = map(len, (self._rules, self._known, self._left_out))
        try:
            return write(function)
        except _NotKept:
            if function.get("strict") is True or function.get(FORMAT_MARK) is True:
                raise
        del self._rules[num_rules:]  # what was written meanwhile, and may lack a part
        while len(self._known) > num_known:
            self._known.popitem()
        while len(self._left_out) > num_left_out:
            self._left_out.popitem()
        given = object_schema(function)
        free: dict[str, Any] = {"type": given["type"]}
        if "required" in given:
            free["required"] = given["required"]
        properties = given.get("properties")
        if isinstance(properties, Mapping):
            free["properties"] = {name: {} for name in properties}
        self.leave_out(path_of(function))
        return write({**function, "parameters": free})

    def _json(self, function: Schema) -> str:
        schema = object_schema(function)
        self.check_texts(function, schema)
        is_strict = function.get("strict") is True
        return json_rule(schema, is_strict=is_strict, path=path_of(function))

    def _once(self, key: object, name: str, write: Any) -> str:
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self.rule(name, write())
        return known


def object_schema(function: Schema) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object whatever its schema says. Raises
    BadRequest.
    """
    given = function.get("parameters")
    schema = dict(given) if given else dict(_NO_PARAMETERS)
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        allowed = "a schema of an object"
        raise BadRequest("tools", Summary(f"parameters of the type {kind!r}"[:200]), allowed)
    schema["type"] = "object"
    try:
        check_ends(SchemaDocument(schema))
    except EndlessSchemaError as error:
        given = Summary(f"the parameters of {function['name']!r}"[:200])
        raise BadRequest("tools", given, f"a schema that some JSON fits: {error}") from None
    return schema


def json_rule(schema: Schema, *, is_strict: bool, path: str = "") -> str:
    """JSON of a schema. path: of one that a request gives; what the library cannot enforce of that
    is left out and named, unless `is_strict`.
    """
    whole = {**schema, "x-guidance": {"whitespace_pattern": _BLANKS}}
    if path:
        whole[SCHEMA_MARK] = {"path": path, "strict": is_strict}
    return f"%json {json.dumps(whole)}"


def _bare_terminal(schema: Schema, *, is_strict: bool, path: str) -> str:
    """A string of a schema, without quotes and escapes, as the core writes it."""
    mark = {"path": path, "strict": is_strict, "bare": True}
    return f"%json {json.dumps({**schema, SCHEMA_MARK: mark})}"


def path_of(function: Schema) -> str:
    """The path of a function's parameters, for the names of what is left out."""
    return f"tools.{function['name'][:64]}.parameters"


def literal_text(text: str) -> str:
    """A text as the grammar has it."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # its lexer has none


def pattern_of(text: str) -> str:
    """A text within a regular expression of the grammar."""
    return re.sub(r"([\\/.^$|?*+(){}\[\]])", r"\\\1", text).replace("\n", "\\n")


def _strings(part: object) -> Iterator[str]:
    """The strings of a schema that can be in arguments: all but descriptions."""
    if isinstance(part, str):
        yield part
    elif isinstance(part, Mapping):
        for key, value in part.items():
            yield key
            if key not in _DESCRIPTIONS or not isinstance(value, str):
                yield from _strings(value)
    elif isinstance(part, list):
        for value in part:
            yield from _strings(value)


class _StringForm(NamedTuple):
    """The form of a string: least and most characters, see `_count`, and a pattern of it whole.

    path: of the schema that has the pattern.
    """

    least: int = 0
    most: int = -1
    pattern: str = ""
    path: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        found: dict[str, Any] = {"type": "string"}
        found |= {"minLength": self.least} if self.least else {}
        found |= {"maxLength": self.most} if self.most >= 0 else {}
        return found | ({"pattern": self.pattern} if self.pattern else {})


class _Parameters:
    """The parameters of one function, and what its schema says of their values."""

    def __init__(self, grammar: ArgumentGrammar, function: Schema) -> None:
        self.grammar = grammar
        self.function = function
        self.is_strict = function.get("strict") is True
        self.path = path_of(function)
        self.root = object_schema(function)
        self._document: SchemaDocument | None = None
        self._parts: dict[int, tuple[Schema, Schema]] = {}  # by the id of the first: see `of_type`
        grammar.check_texts(function, self.root)

    def members(self, schema: Schema) -> list[tuple[str, Any, bool]]:
        """Names and schemas of an object's members, and whether each is required."""
        properties = schema.get("properties")
        found = dict(properties) if isinstance(properties, Mapping) else {}
        given = schema.get("required")
        required = (
            [each for each in given if isinstance(each, str)] if isinstance(given, list) else []
        )
        for name in required:
            found.setdefault(name, {})
        return [(name, each, name in required) for name, each in found.items()]

    def is_open(self, schema: Schema) -> bool:
        """True if an object without members may have any."""
        return schema.get("additionalProperties") is not False

    def check(self, schema: Schema, *known: str) -> None:
        """Name what the schema has beside `known` and is not kept; of a `strict` function, refuse
        it.
        """
        for word, value in schema.items():
            if word in known or word in _ANNOTATIONS:
                continue
            if word == "format" and isinstance(value, str) and value not in FORMATS:
                continue  # an annotation
            self.leave_out(schema, word, f"{word!r}")

    def leave_out(self, schema: Schema, word: str, what: str) -> None:
        """Name a keyword of a schema that is not kept. Raises BadRequest where it is `strict`."""
        if self.is_strict:
            raise self.refusal(what)
        self.grammar.leave_out(shown_path((*self._steps(schema), word)))

    def _steps(self, schema: Schema) -> tuple[str, ...]:
        """The path of a schema."""
        if self._document is None:
            self._document = SchemaDocument(self.root)
        _, schema = self._parts.get(id(schema), (schema, schema))
        place = self._document.places.get(id(schema))
        return (self.path, *(() if place is None else place.path))

    def string(self, schema: Schema) -> _StringForm:
        """The form of a string that is not within JSON. Names what is not kept of it, or refuses
        it.
        """
        given = schema.get("pattern")
        is_kept = isinstance(given, str) and _is_of_whole_text(given)
        self.check(schema, "type", "minLength", "maxLength", *(("pattern",) if is_kept else ()))
        least, most = self.length(schema, "minLength", "maxLength")
        if not is_kept:
            return _StringForm(least, most)
        return _StringForm(least, most, str(given), shown_path(self._steps(schema)))

    def bare(self, form: _StringForm) -> str:
        """A terminal of a string without quotes; empty where it has no pattern."""
        if not form.pattern:
            return ""
        terminal = _bare_terminal(form.schema, is_strict=self.is_strict, path=form.path)
        return self.grammar.rule("BARE", terminal)

    def of_type(self, schema: Schema, kind: str) -> Schema:
        """A schema of several types, for the values of one: without the keywords of others."""
        others = {word for each, words in _WORDS_OF.items() if each != kind for word in words}
        if kind == "integer":
            others.difference_update(_NUMBER_KEYWORDS)
        found = {word: value for word, value in schema.items() if word not in others}
        found["type"] = kind
        self._parts[id(found)] = found, schema
        return found

    def refusal(self, what: str, of: type[BadRequest] = _NotKept) -> BadRequest:
        """The error for something that cannot be kept, which a function that is not strict goes
        without, unless the error is of another class.
        """
        given = Summary(f"{what} in the parameters of {self.function['name']!r}"[:300])
        allowed = (
            "none there: calls of this model's format, which is not JSON, cannot be kept to it"
        )
        return of("tools", given, allowed)

    def resolved(self, schema: object) -> Schema:
        """The schema, or what it refers to. Raises BadRequest where it allows nothing."""
        for _ in range(_MAX_DEPTH):
            if schema is False:
                raise self.refusal("a schema that allows nothing")
            if not isinstance(schema, Mapping):
                return {}
            path = schema.get("$ref")
            if not isinstance(path, str):
                return schema
            self.check(schema, "$ref")
            target = referred(path, self.root)
            if target is None:
                self.leave_out(schema, "$ref", f"the reference {path[:100]!r}")
                return {}
            schema = target
        raise self.refusal("a reference to itself")

    def length(self, schema: Schema, least: str, most: str) -> tuple[int, int]:
        """Two bounds of a schema; -1: no upper one."""
        low, high = schema.get(least), schema.get(most)
        low = low if isinstance(low, int) and low > 0 else 0
        high = high if isinstance(high, int) and high >= 0 else -1
        if 0 <= high < low:
            raise self.refusal(f"{least!r} above {most!r}")
        return low, high


class _TaggedArguments:
    """One function's arguments as tagged parameters."""

    def __init__(
        self,
        grammar: ArgumentGrammar,
        function: Schema,
        element: TaggedParameters,
        avoided: str = "",
    ) -> None:
        """avoided: what values have nowhere; empty: the literal that ends one."""
        self._grammar = grammar
        self._element = element
        self._avoided = avoided
        self._parameters = _Parameters(grammar, function)
        self._types = property_types({"parameters": self._parameters.root})
        self._break = '"\\n"? ' if element.trims_newline else ""
        words = _Spelling(_JSON_WORDS, avoided=avoided or element.closing.literal)
        self._json_values = _Values(grammar, self._parameters, words)

    def text(self) -> str:
        """The parameters, and the literal that ends them."""
        element, parameters = self._element, self._parameters
        root = parameters.root
        parameters.check(root, "type", "properties", "required")
        parts = []
        members = parameters.members(root)
        for name, schema, is_required in members:
            one = self.parameter(name, schema)
            parts.append(f'{one} "\\n"?' if is_required else f'({one} "\\n"?)?')
        if not members and parameters.is_open(root):
            if isinstance(root.get("additionalProperties"), Mapping):
                what = "a schema of 'additionalProperties'"
                parameters.leave_out(root, "additionalProperties", what)
            text = self._open(_ANY_KEY, None)
            parts.append(f'({text} {self._grammar.text_up_to(element.closing)} "\\n"?)*')
        return " ".join(['"\\n"?', *parts, self._grammar.literal(element.end)])

    def parameter(self, name: str, schema: Any) -> str:
        """One parameter with its tags."""
        grammar, end = self._grammar, self._element.key_end.literal
        attribute = self._element.attribute
        written = name
        forbidden: tuple[str, ...] = (end, ">", "\n")
        if attribute is not None and attribute.is_escaped:
            written, forbidden = escape_attribute(name), ("\n",)
        if not name or name != name.strip() or any(each in name for each in forbidden):
            raise self._parameters.refusal(f"the name {name[:100]!r}")
        types = tuple(filter(None, self._types.get(name, "").split("|")))
        branches = self._values(name, schema, types)
        texts = [f"{self._open(literal_text(written), kind)} {text}" for kind, text in branches]
        return grammar.rule("parameter", " | ".join(texts))

    def _open(self, key: str, is_string: bool | None) -> str:
        """The grammar of what precedes a value. is_string: of the value; None: not known."""
        element, literal = self._element, self._grammar.literal
        parts = [literal(element.opening), key, literal(element.key_end)]
        attribute = element.attribute
        if attribute is not None:
            kinds = [(attribute.string, True), *[(each, False) for each in attribute.others]]
            words = [
                literal_text(f' {attribute.name}="{word}"')
                for word, kind in kinds
                if is_string in (None, kind)
            ]
            parts += [f"({' | '.join(words)})?", self._grammar.spelled_text(attribute.end)]
        if element.value_opening is not None:
            parts += ['"\\n"?', literal(element.value_opening)]
        return " ".join(parts)

    def _values(self, name: str, given: Any, types: Sequence[str]) -> list[tuple[bool | None, str]]:
        """The alternatives for a parameter's value, with its closing tag: of texts, of others."""
        schema = self._parameters.resolved(given)
        constants = _constants(schema)
        if constants is not None:
            return self._constants(constants, types)
        if types == ("string",):
            return [(True, self._raw(self._parameters.string(schema)))]
        if not types or "string" in types:
            return self._raw_or_json(schema, types)
        return [(False, self._json(name, given, types))]

    def _raw_or_json(self, schema: Schema, types: Sequence[str]) -> list[tuple[bool | None, str]]:
        """A value that may be a string: text is one unless it is JSON of another of its types."""
        if not types or not set(types) <= {"string", "null", "boolean"}:
            self._parameters.check(schema)
            return [(None, self._raw(_StringForm()))]
        branches = schema.get("anyOf")
        for each in branches if isinstance(branches, list) else ():
            self._parameters.check(self._parameters.resolved(each), "type")
        self._parameters.check(schema, "type", "anyOf")
        others = [each for each in types if each != "string"]
        return [(True, self._raw(_StringForm())), (False, self._closed(f"({self._words(others)})"))]

    def _raw(self, form: _StringForm) -> str:
        """A string without quotes."""
        closing, bare = self._element.closing, self._parameters.bare(form)
        if not self._element.trims_newline:
            return self._grammar.text_up_to(
                closing, form.least, form.most, avoided=self._avoided, bare=bare
            )
        text = self._grammar.text_up_to(closing, form.least, form.most, before="\n", bare=bare)
        return f'"\\n" {text}'

    def _json(self, name: str, schema: Any, types: Sequence[str]) -> str:
        if set(types) <= _JSON_WORDS.keys() and self._parameters.resolved(schema).keys() <= {
            "type",
            *_ANNOTATIONS,
        }:
            return self._closed(f"({self._words(types)})")
        root, closing = self._parameters.root, self._element.closing
        if not self._grammar.is_token(closing):
            return self._closed(self._json_values.value(schema))
        shared = {word: root[word] for word in _DEFINITIONS if word in root}
        whole = {**shared, **schema} if isinstance(schema, Mapping) else shared
        path = f"{self._parameters.path}.properties.{name}"
        rule = json_rule(whole, is_strict=self._parameters.is_strict, path=path)
        return self._closed(self._grammar.rule("value", rule))

    def _words(self, types: Iterable[str]) -> str:
        tables = (_JSON_WORDS, _PYTHON_WORDS) if self._element.writes_python else (_JSON_WORDS,)
        return " | ".join(table[each] for each in types for table in tables)

    def _closed(self, value: str) -> str:
        return f"{self._break}{value} {self._break}{self._grammar.literal(self._element.closing)}"

    def _constants(
        self, values: Sequence[Any], types: Sequence[str]
    ) -> list[tuple[bool | None, str]]:
        """The alternatives for those of `values` that are read as themselves."""
        texts: list[str] = []
        others: list[str] = []
        python = self._element.writes_python
        for value in values:
            if types and type_of(value) not in types and "number" not in types:
                continue
            if not isinstance(value, str):
                others.append(self._json_values.json(value))
                continue
            is_text = types == ("string",) or value_as_json(value, types, python) is None
            if is_text and (self._avoided or self._element.closing.literal) not in value:
                texts.append(value)
        found: list[tuple[bool | None, str]] = []
        for kind, spelled in ((True, texts), (False, others)):
            if not spelled:
                continue
            choice = self._grammar.rule("CHOICE", " | ".join(map(literal_text, spelled)))
            line = '"\\n" ' if self._element.trims_newline else ""
            closing = self._grammar.literal(self._element.closing)
            found.append((kind, f"{line}{choice} {line}{closing}"))
        if not found:
            raise self._parameters.refusal("values none of which can be written")
        return found


def _element_arguments(grammar: ArgumentGrammar, function: Schema, element: NestedElements) -> str:
    """See `ArgumentGrammar.elements`. Parameters that the schema does not name there are none, as a
    grammar cannot end an element by the name that it began with.
    """
    parameters = _Parameters(grammar, function)
    parameters.check(parameters.root, "type", "properties", "required")
    opening = f"{element.prefix}<"
    end = LiteralText(f"{opening}/{element.end}>")
    parts = []
    for name, schema, is_required in parameters.members(parameters.root):
        tags = TaggedParameters(
            opening=LiteralText(opening),
            key_end=LiteralText(">"),
            closing=LiteralText(f"{opening}/{name}>"),
            end=end,
            writes_python=True,  # where a word is a value, also as Python has it
        )
        one = _TaggedArguments(grammar, function, tags, opening).parameter(name, schema)
        parts.append(f'{one} "\\n"?' if is_required else f'({one} "\\n"?)?')
    return " ".join(['"\\n"?', *parts, grammar.literal(end)])


class _Spelling(NamedTuple):
    """The spelling of values. words: of booleans and null.

    delimiter: of strings, in which nothing is escaped, and keys have no quotes; None: quotes as in
    JSON, or as in Python. avoided: text that stands nowhere in JSON; empty: it is Python.
    """

    words: Mapping[str, str]
    delimiter: Delimiter | None = None
    avoided: str = ""


class _Values:
    """Values of one function's parameters, spelled as Python, Gemma or JSON have them."""

    def __init__(
        self, grammar: ArgumentGrammar, parameters: _Parameters, spelling: _Spelling
    ) -> None:
        self._grammar = grammar
        self._parameters = parameters
        self._words, self._delimiter, self._avoided = spelling
        self._is_python = self._delimiter is None and not self._avoided
        self._referred: dict[str, str] = {}  # rules by reference
        self._any = ""

    def arguments(self, element: KeywordArguments) -> str:
        """All parameters as keys and values, and the bracket that closes them."""
        closer = {"(": ")", "{": "}"}[element.opening]
        root = self._parameters.root
        self._parameters.check(root, "type", "properties", "required")
        inner = self._members(root, element.separator, 0, is_top=True)
        return f'{inner} "{closer}"'

    def value(self, schema: Any) -> str:
        """A value of this schema."""
        return self._value(schema, 0)

    def _members(self, schema: Schema, separator: str, depth: int, *, is_top: bool = False) -> str:
        """An object's members with commas between, each once."""
        members = self._parameters.members(schema)
        if not members:
            if not self._parameters.is_open(schema):
                return ""
            extra = schema.get("additionalProperties")
            value = (
                self._value(extra, depth + 1) if isinstance(extra, Mapping) else self._anything()
            )
            is_bare = is_top or self._delimiter is not None
            key = _KEY if is_bare else self._string(_StringForm())
            one = f'{key} "{separator}" " "? {value}'
            return f"({one} ({_COMMA} {one})*)?"
        if self._delimiter is not None:  # as its template writes them
            members.sort(key=lambda member: member[0])
        sep = f'"{separator}" " "?' if not is_top and self._delimiter is None else f'"{separator}"'
        items = [
            (f"{self._key(name, is_top)} {sep} {self._value(each, depth + 1)}", is_required)
            for name, each, is_required in members
        ]
        firsts: list[str] = []
        rest = ""
        for item, is_required in reversed(items):
            one = self._grammar.rule("member", item)
            firsts = [f"{one} {rest}"] if is_required else [f"{one} {rest}", *firsts]
            behind = f"{_COMMA} {one}" if is_required else f"({_COMMA} {one})?"
            rest = self._grammar.rule("rest", f"{behind} {rest}")
        optional = "" if any(is_required for _, is_required in items) else "?"
        return f"({' | '.join(firsts)}){optional}"

    def _key(self, name: str, is_top: bool) -> str:
        is_bare = name != "" and _NOT_BARE.isdisjoint(name) and len(name) <= 256
        if self._delimiter is not None:
            if is_bare and self._delimiter.literal[0] not in name:
                return literal_text(name)
            return self._delimited(literal_text(name), name)
        if self._avoided or not is_top:
            quoted = [self.json(name)]
            quoted += [repr(name)] if self._is_python else []
            return f"({' | '.join(map(literal_text, quoted))})"
        if not is_bare:
            raise self._parameters.refusal(f"the name {name[:100]!r}")
        return literal_text(name)

    def _value(self, given: Any, depth: int) -> str:
        """A value; a schema that is referred to is a rule of its own, as it may hold itself."""
        path = given.get("$ref") if isinstance(given, Mapping) else None
        if not isinstance(path, str):
            return self._resolved_value(self._parameters.resolved(given), depth)
        if path not in self._referred:
            name, number = self._grammar.reserve("value")
            self._referred[path] = name
            body = self._resolved_value(self._parameters.resolved(given), depth)
            self._grammar.fill(name, number, body)
        return self._referred[path]

    def _resolved_value(self, schema: Schema, depth: int) -> str:
        if depth > _MAX_DEPTH:
            why = f"schemas more than {_MAX_DEPTH} levels deep"
            raise self._parameters.refusal(why, BadRequest)
        check = self._parameters.check
        constants = _constants(schema)
        if constants is not None:
            kinds = set(_kinds(schema))
            fitting = [each for each in constants if not kinds or _is_of(each, kinds)]
            if not fitting:
                raise self._parameters.refusal("values of another type")
            return self._one_of([self._constant(each) for each in fitting])
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                check(schema, "anyOf", "type")
                return self._one_of([self._value(each, depth + 1) for each in schema[word]])
        kind = schema.get("type")
        if isinstance(kind, list):
            # each once: the same type named twice would double the work with each level
            named = [self._parameters.of_type(schema, each) for each in _kinds(schema)]
            return self._one_of([self._value(each, depth + 1) for each in named])
        if kind is None:
            words = {"properties": "object", "items": "array"}
            kind = next((name for word, name in words.items() if word in schema), None)
        match kind:
            case "string":
                if self._avoided:
                    check(schema, "type", "minLength", "maxLength")
                    form = _StringForm(*self._parameters.length(schema, "minLength", "maxLength"))
                    return self._string(form)
                return self._string(self._parameters.string(schema))
            case "integer" | "number":
                check(schema, "type", *_NUMBER_KEYWORDS)
                words = {
                    word: schema[word] for word in ("type", *_NUMBER_KEYWORDS) if word in schema
                }
                path = self._parameters.path
                rule = json_rule(words, is_strict=self._parameters.is_strict, path=path)
                return self._grammar.rule("number", rule)
            case "boolean" | "null":
                check(schema, "type")
                return f"({self._words[kind]})"
            case "array":
                check(schema, "type", "items", "minItems", "maxItems")
                return self._grammar.rule("list", self._list(schema, depth))
            case "object":
                check(schema, "type", "properties", "required")
                inner = self._members(schema, ":", depth)
                return self._grammar.rule("object", f'"{{" {inner} "}}"')
            case _:
                check(schema)
                return self._anything()

    def _list(self, schema: Schema, depth: int) -> str:
        least, most = self._parameters.length(schema, "minItems", "maxItems")
        if most == 0:
            return '"[" "]"'
        one = self._value(schema["items"], depth + 1) if "items" in schema else self._anything()
        inner = one
        if most != 1:  # llguidance has no repetition up to 0 times
            count = _count(max(least - 1, 0), most - 1 if most > 0 else -1)
            inner = f"{one} ({_COMMA} {one}){count}"
        return f'"[" {inner} "]"' if least else f'"[" ({inner})? "]"'

    def _string(self, form: _StringForm) -> str:
        if self._delimiter is not None:
            bare = self._parameters.bare(form)
            text = self._grammar.text_up_to(self._delimiter, form.least, form.most, bare=bare)
            return f"{self._quote} {text}"
        if self._avoided:
            unlike = f"~/{ANY_CHAR}*{pattern_of(self._avoided)}{ANY_CHAR}*/"
            body = f'/"{_JSON_CHAR}{_count(form.least, form.most)}"/ & {unlike}'
            return self._grammar.rule("STRING", body)
        rule = json_rule(form.schema, is_strict=self._parameters.is_strict, path=form.path)
        quoted = self._grammar.rule("string", rule)
        if form.schema.keys() != {"type"}:
            return quoted
        return f"({quoted} | {self._grammar.rule('QUOTED', _SINGLE_QUOTED)})"

    @property
    def _quote(self) -> str:
        assert self._delimiter is not None
        return self._grammar.literal(self._delimiter)

    def _delimited(self, text: str, given: str) -> str:
        assert self._delimiter is not None
        if self._delimiter.literal in given:
            raise self._parameters.refusal(f"{self._delimiter.literal!r}")
        return f"{self._quote} {text} {self._quote}"

    def _constant(self, value: Any) -> str:
        if self._is_python:
            return literal_text(repr(value))
        if self._delimiter is None:
            return literal_text(self.json(value))
        match value:
            case str():
                return (
                    self._delimited(literal_text(value), value)
                    if value
                    else f"{self._quote} {self._quote}"
                )
            case dict():
                parts = [
                    f'{self._key(k, True)} ":" {self._constant(v)}'
                    for k, v in sorted(value.items())
                ]
                return " ".join(['"{"', ' "," '.join(parts), '"}"'])
            case list():
                return " ".join(['"["', ' "," '.join(map(self._constant, value)), '"]"'])
            case _:
                return literal_text(json.dumps(value))

    def json(self, value: Any) -> str:
        """A value as JSON, without what is avoided."""
        text = json.dumps(value, ensure_ascii=False)
        if not self._avoided:
            return text
        first, rest = self._avoided[0], self._avoided[1:]
        if "/" in rest:
            return text.replace(self._avoided, first + rest.replace("/", "\\/"))
        return text.replace(self._avoided, f"\\u{ord(first):04x}{rest}")

    def _anything(self) -> str:
        """Any value."""
        if not self._any:
            name, number = self._grammar.reserve("any")
            self._any = name
            number_rule = self._grammar.rule(
                "number", json_rule({"type": "number"}, is_strict=True)
            )
            key = self._string(_StringForm()) if self._delimiter is None else _KEY
            member = f'{key} ":" " "? {name}'
            branches = [
                self._string(_StringForm()),
                number_rule,
                *self._words.values(),
                f'"[" ({name} ({_COMMA} {name})*)? "]"',
                f'"{{" ({member} ({_COMMA} {member})*)? "}}"',
            ]
            self._grammar.fill(name, number, " | ".join(branches))
        return self._any

    def _one_of(self, branches: Sequence[str]) -> str:
        if not branches:
            raise self._parameters.refusal("an empty list of alternatives")
        return f"({' | '.join(dict.fromkeys(branches))})"


_UNICODE = r"u([0-9abcefABCEF][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2})"  # no half of a pair
_JSON_CHAR = r"""([^"\\\x00-\x1f\x7f]|\\(["\\\/bfnrt]|""" + _UNICODE + "))"
_SINGLE_QUOTED = r"""/'([^'\\\n\x00-\x1f]|\\[nrt'"\\])*'/"""


_VERBOSE = re.compile(r"\(\?[a-zA-Z]*x")


def _is_of_whole_text(pattern: str) -> bool:
    """True if a pattern is anchored at both ends, in a form that stands within slashes, too."""
    if pattern[:1] != "^" or pattern[-1:] != "$" or "\n" in pattern or _VERBOSE.search(pattern):
        return False
    depth = num_classes = at = 0
    inner = pattern[1:-1]
    while at < len(inner):
        char = inner[at]
        at += 1
        if char == "\\":
            at += 1
        elif char == "[":
            num_classes += 1
            at += inner.startswith("^", at)
            at += inner.startswith("]", at)  # a character, where it is the first
        elif num_classes:
            num_classes -= char == "]"
        elif char == "|" and not depth:
            return False
        else:
            depth += (char == "(") - (char == ")")
    return at == len(inner)  # and the last sign is no escaped one


def _count(least: int, most: int) -> str:
    """The quantifier for `least` to `most` repetitions; -1: no upper bound."""
    return "*" if (least, most) == (0, -1) else f"{{{least},{'' if most < 0 else most}}}"


def _constants(schema: Schema) -> list[Any] | None:
    """The only values that a schema allows, if it lists them."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _kinds(schema: Schema) -> tuple[str, ...]:
    """The types that a schema names, each once."""
    given = schema.get("type")
    listed = given if isinstance(given, list) else [given]
    return tuple(dict.fromkeys(each for each in listed if isinstance(each, str)))


def _is_of(value: Any, kinds: set[str]) -> bool:
    kind = type_of(value)
    return kind in kinds or (kind == "integer" and "number" in kinds)
