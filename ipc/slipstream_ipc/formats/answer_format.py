"""The types that describe how a model writes an answer: data without code.

A call format is a tree of small elements. The worker compiles the tree to a reader of text, and a
grammar of the same calls can be generated from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

DIGEST_BYTES = 16
NAME_STOPS = " \t\r\n<>[]{}()\"'`,;="


class Delimiter(Struct, frozen=True, tag="delimiter", array_like=True):
    """A literal that separates parts. Where the vocabulary has it as one token, only that token is
    the delimiter and the same letters as text are text, unless `as_text`.
    """

    literal: str
    as_text: bool = False


class LiteralText(Struct, frozen=True, tag="text", array_like=True):
    """A literal of ordinary characters."""

    literal: str


class Blank(Struct, frozen=True, tag="blank", array_like=True):
    """White space as a model writes it. A reader accepts any white space between two elements."""

    text: str


class Name(Struct, frozen=True, tag="name", array_like=True):
    """The function's name as plain text, up to one of the characters `stops` or a delimiter."""

    stops: str = NAME_STOPS


class CallId(Struct, frozen=True, tag="id", array_like=True):
    """The call's id as plain text, up to one of the characters `stops` or a delimiter."""

    stops: str = NAME_STOPS


class NamedCallId(Struct, frozen=True, tag="named_id", array_like=True):
    """An id that contains the function's name: `prefix`, name, `separator`, index. The id is the
    whole; prefix, separator and index may be missing.
    """

    prefix: str
    separator: str
    stops: str = NAME_STOPS


class CallIndex(Struct, frozen=True, tag="index", array_like=True):
    """The call's number, up to one of the characters `stops`. Calls are counted without it."""

    stops: str = NAME_STOPS


class JsonObject(Struct, frozen=True, tag="json_object", array_like=True):
    """The arguments as a JSON object. may_be_empty: nothing at all stands for `{}`."""

    may_be_empty: bool = False


class JsonCall(Struct, frozen=True, tag="json_call", array_like=True):
    """A JSON object with the function's name, its arguments and perhaps an id, in any order.

    The keys are alternatives; the first of each is the one that the model is shown.
    """

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    ids: tuple[str, ...] = ("id",)


class TagAttribute(Struct, frozen=True, array_like=True):
    """The attribute of a parameter's tag that describes its value, behind the key: `name` has the
    value `string` where the value is a string, else one of `others`. end: ends the tag. is_escaped:
    keys and values have `&amp;` and `&quot;`.
    """

    name: str
    string: str
    others: tuple[str, ...]
    end: str = ">"
    is_escaped: bool = False


class TaggedParameters(Struct, frozen=True, tag="tagged_parameters", array_like=True):
    """Arguments as tagged parameters whose values are not quoted: the function's property types say
    what a value is. Blanks between tags belong to the format.

    opening and key_end stand around a key; with `attribute`, attributes follow, of which that one
    is read. value_opening: a tag of its own before the value. closing: ends a value. end: ends the
    arguments. trims_newline: one line break at each side of a value belongs to
    the format. writes_python: a value that is no string is written as Python prints it.
    """

    opening: Delimiter | LiteralText
    key_end: Delimiter | LiteralText
    closing: Delimiter | LiteralText
    end: Delimiter | LiteralText
    value_opening: Delimiter | LiteralText | None = None
    attribute: TagAttribute | None = None
    trims_newline: bool = False
    writes_python: bool = False


class NestedElements(Struct, frozen=True, tag="nested_elements", array_like=True):
    """Arguments as elements named after them, which hold text or further elements: lists and
    objects, told apart by the types of the function's properties. An element's name that comes
    twice in an object makes a list. Blanks between arguments belong to the format.

    prefix: stands before each tag. end: the name of the tag that ends the arguments.
    """

    prefix: str
    end: str


class KeywordArguments(Struct, frozen=True, tag="keyword_arguments", array_like=True):
    """Arguments as keys and values in brackets, with commas between.

    opening: the bracket behind the function's name, which is an element of its own. separator:
    between a key and its value at the top; deeper it is a colon. string_delimiter: stands on both
    sides of a string, in which nothing is escaped; None: quotes and escapes as in Python.
    """

    opening: str = "("
    separator: str = "="
    string_delimiter: Delimiter | None = None


class Repeat(Struct, frozen=True, tag="repeat", array_like=True):
    """The elements once or more often, with `separator` between."""

    elements: tuple[Element, ...]
    separator: tuple[Element, ...] = ()


class Alternative(Struct, frozen=True, tag="alternative", array_like=True):
    """One of the branches; an empty branch makes the others optional."""

    branches: tuple[tuple[Element, ...], ...]


Element = (
    Delimiter
    | LiteralText
    | Blank
    | Name
    | CallId
    | NamedCallId
    | CallIndex
    | JsonObject
    | JsonCall
    | TaggedParameters
    | NestedElements
    | KeywordArguments
    | Repeat
    | Alternative
)


class Signature(Struct, frozen=True, array_like=True):
    """The signature by which a model is recognised: all `in_template` are in its chat template and
    none of `not_in_template`, and all `tokens` are tokens of its vocabulary.

    rank: of several entries that a model fits, those with the highest rank count. A vocabulary's
    tokens alone give none: a model that was tuned for other calls keeps them.
    """

    in_template: tuple[str, ...] = ()
    not_in_template: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()
    rank: int = 0


class ReasoningFormat(Struct, frozen=True, array_like=True):
    """The delimiters that set reasoning apart from content.

    It begins at the start of the answer, after a call or after other reasoning, by one of `begins`;
    blanks may stand before. calls_within: a call ends it, too. dropped: delimiters between parts
    that have no meaning of their own. label: text that belongs to the delimiter before it, where
    reasoning begins with it. spelled: see `CallFormat`.
    """

    name: str
    begins: tuple[Delimiter, ...]
    ends: tuple[Delimiter, ...]
    calls_within: bool = False
    dropped: tuple[Delimiter, ...] = ()
    signatures: tuple[Signature, ...] = ()
    label: str = ""
    spelled: tuple[Delimiter, ...] = ()


class CallSection(Struct, frozen=True, array_like=True):
    """A part of the answer with one call or several. Its first element is a delimiter or a text.

    at_start: the section begins where reasoning may begin, too, and nowhere else; then its first
    element may also be a JSON call or a JSON object.
    """

    elements: tuple[Element, ...]
    at_start: bool = False


class CallFormat(Struct, frozen=True, array_like=True):
    """The format of tool calls. call_id: the form of ids where the model writes none: "openai"
    (`call_…`, which clients make) or "mistral" (nine letters and digits, made by the reader).
    quotable: the model writes the delimiters' tokens also where it quotes them, within a string of
    arguments. dropped: delimiters without a meaning of their own, which may stand before calls.
    spelled: tokens that are read as their letters, as the format's literals are made of them and of
    text.
    """

    name: str
    sections: tuple[CallSection, ...]
    dropped: tuple[Delimiter, ...] = ()
    call_id: str = "openai"
    quotable: bool = False
    signatures: tuple[Signature, ...] = ()
    spelled: tuple[Delimiter, ...] = ()


class ChannelFormat(Struct, frozen=True, array_like=True):
    """Answers as messages with a header each: `start` role `channel` NAME `message` text `ends`.

    A recipient (` to=NAME`) stands in the header on either side of `channel`. A message to a
    recipient that begins with `function_prefix` is a call; else its channel decides, and what is
    not in `reasoning` is content. The part of the header behind `constrain` is ignored.
    """

    start: Delimiter
    channel: Delimiter
    message: Delimiter
    constrain: Delimiter
    ends: tuple[Delimiter, ...]
    function_prefix: str
    reasoning: tuple[str, ...]
    stops: tuple[Delimiter, ...] = ()  # those of `ends` with which the model ends its answer


class AnswerFormat(Struct, frozen=True, array_like=True):
    """The format of a whole answer; None for a part that the model does not write."""

    name: str
    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None
    channels: ChannelFormat | None = None
    signatures: tuple[Signature, ...] = ()


def digest(answer_format: AnswerFormat) -> bytes:
    """A hash of all of the format's data, the same in every process with the same table."""
    return hashlib.blake2b(msgspec.msgpack.encode(answer_format), digest_size=DIGEST_BYTES).digest()


def delimiters(part: Any) -> Iterator[Delimiter]:
    """All delimiters of a format or of a part of it; some may come several times."""
    if isinstance(part, Delimiter):
        yield part
    elif isinstance(part, Struct):
        for field in part.__struct_fields__:
            yield from delimiters(getattr(part, field))
    elif isinstance(part, tuple):
        for item in part:
            yield from delimiters(item)


def spelled_literals(found: AnswerFormat) -> frozenset[str]:
    """The literals of the format's tokens that are read as their letters."""
    parts = [part.spelled for part in (found.reasoning, found.calls) if part is not None]
    return frozenset(token.literal for tokens in parts for token in tokens)


def has_nested_elements(part: Any) -> bool:
    """True if arguments are `NestedElements`, whose reader needs the types of nested properties."""
    if isinstance(part, NestedElements):
        return True
    if isinstance(part, Struct):
        return any(has_nested_elements(getattr(part, each)) for each in part.__struct_fields__)
    return isinstance(part, tuple) and any(map(has_nested_elements, part))
