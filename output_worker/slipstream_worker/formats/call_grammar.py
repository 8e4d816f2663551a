"""Compiles a format and a request's tools to a grammar in which an answer is calls of them.

The grammar is in llguidance's form of Lark. What it allows is what the reader of the same format
reads as whole calls. Pure.

- A delimiter that is one token of the vocabulary is that token alone, as for the reader.
- Where a reader accepts any blanks, the grammar allows those that the table shows, or none.
- Reasoning before the calls is left to the core where it can follow it (`reasoning_ids`). Else it
  is any tokens up to its end; the delimiters of both are tokens, as text with an end that is text
  could not be told apart from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.formats.answer_format import (
    Alternative,
    AnswerFormat,
    Blank,
    CallFormat,
    CallId,
    CallIndex,
    CallSection,
    ChannelFormat,
    Delimiter,
    Element,
    JsonCall,
    JsonObject,
    KeywordArguments,
    LiteralText,
    Name,
    NamedCallId,
    NestedElements,
    ReasoningFormat,
    Repeat,
    TaggedParameters,
    has_nested_elements,
)
from slipstream_ipc.messages import FORMAT_MARK, FRAMED, LEFT_OUT_MARK, StructuredForm
from slipstream_ipc.messages.answer import FUNCTION_CHOICE
from slipstream_ipc.validation.json_schema import shown_path
from slipstream_ipc.validation.structured_output import MAX_SCHEMA_BYTES
from slipstream_worker.formats.argument_grammar import (
    ANY_CHAR,
    ArgumentGrammar,
    literal_text,
    path_of,
    pattern_of,
)
from slipstream_worker.formats.channel_grammar import NoTokens, channel_grammar
from slipstream_worker.formats.reasoning_ids import Spellings, call_beginnings, first_delimiter

_MAX_FUNCTIONS = 512  # a row of the grammar has an item for each, and the core bounds these
_Functions = Sequence[Mapping[str, Any]]
_BEHIND_REASONING = '"\\n"? "\\n"? '
_CALL_ID = "/[a-zA-Z0-9]{9}/"
_INDEX = "/[0-9]{1,4}/"


class Opened(NamedTuple):
    """The beginning of the answer that the prompt contains: reasoning that goes on, or nothing but
    what may stand before calls. is_start: nothing at all. at_border: no content since the last
    delimiter. is_header: the beginning of a message's header, where answers are messages.
    """

    is_start: bool = True
    is_reasoning: bool = False
    at_border: bool = True
    is_header: bool = False


def call_grammar(
    found: AnswerFormat,
    token_ids: Mapping[str, int],
    tools: Sequence[Mapping[str, Any]],
    choice: str,
    *,
    is_parallel: bool = True,
    opened: Opened = Opened(),  # noqa: B008 - immutable
    is_followed: bool = False,
) -> str:
    """The grammar of an answer with one call of the tool that `choice` names, or, with "required",
    with one call or, if `is_parallel`, several calls of any.

    token_ids: of the format's literals that are one token. is_followed: the grammar begins behind
    reasoning, if there is some. Raises BadRequest.
    """
    if found.calls is None and found.channels is None:
        raise refusal(choice, f"answers of the format {found.name!r}")
    functions = [tool["function"] for tool in tools]
    if choice.startswith(FUNCTION_CHOICE):
        name = choice.removeprefix(FUNCTION_CHOICE)
        functions = [each for each in functions if each["name"] == name][:1]
        is_parallel = False
    if not functions:
        raise BadRequest("tool_choice", Summary(shown_choice(choice)), "a function of the tools")
    _check_number(functions, "any call is required")

    def written(functions: _Functions) -> str:
        if found.channels is not None:
            return channel_grammar(
                found.channels,
                token_ids,
                functions,
                is_forced=True,
                is_header=opened.is_header,
                is_reasoning=opened.is_reasoning,
            )
        assert found.calls is not None
        return _Grammar(found.calls, token_ids, functions, is_parallel).text(
            found.reasoning, opened, is_followed=is_followed
        )

    try:
        grammar = _with_formats(functions, written)
    except _NotForceable as error:
        raise refusal(choice, f"{error} (format {found.name!r})") from None
    except NoTokens:
        where = f"a vocabulary without the tokens of the format {found.name!r}"
        raise refusal(choice, where) from None
    _check_size(grammar, "a call is forced")
    return grammar


def free_call_grammar(
    found: AnswerFormat,
    spellings: Spellings,
    tools: Sequence[Mapping[str, Any]],
    *,
    is_parallel: bool,
    opened: Opened = Opened(),  # noqa: B008 - immutable
) -> tuple[str, tuple[Delimiter, ...]]:
    """The grammar of one section of calls of an answer that need have none, and the delimiters of
    which one begins it. Functions that are `strict` have the arguments of their schemas, those of
    custom tools their formats, others any.

    Where calls begin with text, or answers are messages in channels, there are none of these, and
    the grammar is of the whole answer. It is empty where there is none. Raises BadRequest for a
    `strict` function that cannot be kept to its schema.
    """
    if found.calls is None and found.channels is None:
        return "", ()
    functions = [tool["function"] for tool in tools]
    is_strict = any(each.get("strict") is True for each in functions)
    has_formats = any(map(has_format, functions))
    if found.channels is not None and not (is_strict or has_formats):
        return "", ()  # there is one call at most in any case
    is_for_formats = has_formats and not is_strict and (is_parallel or found.channels is not None)
    triggers: tuple[Delimiter, ...] = ()

    def written(functions: _Functions) -> str:
        nonlocal triggers
        if is_for_formats and not any(map(has_format, functions)):
            return ""
        functions = _loosened(functions, found)
        token_ids = spellings.token_ids
        if found.channels is not None:
            return channel_grammar(
                found.channels,
                token_ids,
                functions,
                is_forced=False,
                is_header=opened.is_header,
                is_reasoning=opened.is_reasoning,
            )
        assert found.calls is not None
        writer = _Grammar(found.calls, token_ids, functions, is_parallel)
        grammar, triggers = _free_sections(found.calls, spellings, writer, opened)
        return grammar

    try:
        _check_number(functions, "one is strict")
        grammar = _with_formats(functions, written)
        _check_size(grammar, "one is strict")
    except (_NotForceable, NoTokens):
        return "", ()
    except BadRequest:
        if is_strict:
            raise
        return "", ()
    return grammar, triggers


def structured_frame(
    channels: ChannelFormat,
    token_ids: Mapping[str, int],
    tools: Sequence[Mapping[str, Any]],
    opened: Opened,
) -> str:
    """The grammar of an answer in channels that ends with a call, or with structured output, which
    is FRAMED in it. Empty where the vocabulary lacks the format's tokens. Raises BadRequest.
    """
    functions = [tool["function"] for tool in tools]
    _check_number(functions, "there is structured output")

    def written(functions: _Functions) -> str:
        return channel_grammar(
            channels,
            token_ids,
            _loosened(functions, channels),
            is_forced=False,
            is_header=opened.is_header,
            is_reasoning=opened.is_reasoning,
            final_text=FRAMED,
        )

    try:
        grammar = _with_formats(functions, written)
    except NoTokens:
        return ""
    _check_size(grammar, "there is structured output")
    return grammar


def frame_beside_calls(
    found: AnswerFormat,
    token_ids: Mapping[str, int],
    tools: Sequence[Mapping[str, Any]],
    *,
    is_parallel: bool,
    opened: Opened = Opened(),  # noqa: B008 - immutable
    is_followed: bool = False,
    form: StructuredForm = "other",
) -> str:
    """The grammar of an answer, not in channels, that is calls, or structured output, which is
    FRAMED in it. is_followed: as in `call_grammar`. form: blanks may stand before JSON where the
    answer begins with it, too, as content then; beside a grammar of the request's own there are
    only calls that begin with a token, as the library, which takes the longest terminal, would not
    find its way back from text that both begin with.

    Empty where the calls have no grammar: the answer is structured output then. Raises BadRequest
    for a `strict` function that cannot be kept to its schema.
    """
    if found.calls is None:
        return ""
    functions = [tool["function"] for tool in tools]
    is_strict = any(each.get("strict") is True for each in functions)
    where = "there is structured output"
    calls = found.calls

    def written(functions: _Functions) -> str:
        writer = _Grammar(calls, token_ids, _loosened(functions, found), is_parallel)
        return writer.text(
            found.reasoning,
            opened,
            is_followed=is_followed,
            instead=_content(found, token_ids),
            takes_blanks=form == "json",
            only_tokens=form == "grammar",
        )

    try:
        _check_number(functions, where)
        grammar = _with_formats(functions, written)
        _check_size(grammar, where)
    except _NotForceable:
        return ""
    except BadRequest:
        if is_strict:
            raise
        return ""
    return grammar


def tagged_frame(found: AnswerFormat, token_ids: Mapping[str, int]) -> str:
    """The grammar of content that is structured output, FRAMED in it, with the tags that the model
    writes around content. Empty where the format has no such tags.
    """
    content = _content(found, token_ids)
    return "" if content == FRAMED else f"start: {content}\n"


def _content(found: AnswerFormat, token_ids: Mapping[str, int]) -> str:
    """FRAMED, between the tags that the model writes around content, if it does."""
    reasoning = found.reasoning
    if reasoning is None or not reasoning.spelled:
        return FRAMED
    spelled = {each.literal for each in reasoning.spelled}
    if not spelled <= token_ids.keys():
        return FRAMED
    writer = ArgumentGrammar([], token_ids, spelled)
    tags = " ".join(f"({writer.literal(each)})?" for each in reasoning.dropped)
    return f"{tags} {FRAMED} {tags}"


def has_format(function: Mapping[str, Any]) -> bool:
    """True if a function stands for a custom tool whose input has a format."""
    return function.get(FORMAT_MARK) is True


def format_paths(function: Mapping[str, Any]) -> list[str]:
    """The paths of the patterns of a function's parameters."""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return [
        shown_path((path_of(function), "properties", name, "pattern"))
        for name, each in (properties.items() if isinstance(properties, Mapping) else ())
        if isinstance(each, Mapping) and "pattern" in each
    ]


def without_format(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function as the model is shown it: that of a custom tool without its mark and patterns,
    as it is described in words.
    """
    if not has_format(function):
        return function
    found = {key: value for key, value in function.items() if key != FORMAT_MARK}
    if format_paths(function):
        parameters = function["parameters"]
        properties = {
            name: {key: value for key, value in each.items() if key != "pattern"}
            if isinstance(each, Mapping)
            else each
            for name, each in parameters["properties"].items()
        }
        found["parameters"] = {**parameters, "properties": properties}
    return found


def _with_formats(functions: _Functions, written: Callable[[_Functions], str]) -> str:
    """The grammar that `written` makes of the functions; where it cannot with the formats of custom
    tools, without them, which are named then. Raises as `written`.
    """
    try:
        return written(functions)
    except (BadRequest, NoTokens, _NotForceable):
        if not any(map(has_format, functions)):
            raise
    grammar = written(list(map(without_format, functions)))
    names = [path for each in functions if has_format(each) for path in format_paths(each)]
    return grammar and "\n".join((grammar, *(f"{LEFT_OUT_MARK}{json.dumps(n)}" for n in names), ""))


def _loosened(functions: _Functions, found: AnswerFormat | ChannelFormat) -> _Functions:
    """The functions; those that neither are `strict` nor have a format have any arguments, except
    as nested elements, of which the grammar has only those that a schema names.
    """
    if has_nested_elements(found):
        return functions
    return [
        each
        if each.get("strict") is True or has_format(each)
        else {**each, "parameters": {"type": "object"}}
        for each in functions
    ]


def _free_sections(
    calls: CallFormat, spellings: Spellings, writer: _Grammar, opened: Opened
) -> tuple[str, tuple[Delimiter, ...]]:
    """See `free_call_grammar`. Raises as `_Grammar.text`."""
    sections = [each for each in calls.sections if not each.at_start or opened.at_border]
    firsts = [first_delimiter(each.elements) for each in sections]
    begun = [one for one, first in zip(sections, firsts, strict=True) if spellings.has(first)]
    if begun and not any(each.at_start for each in sections):
        triggers = [first for first in firsts if first is not None and spellings.has(first)]
        return writer.one_of(begun), tuple(dict.fromkeys(triggers))
    return writer.free_text(sections), ()


def _check_number(functions: Sequence[Mapping[str, Any]], where: str) -> None:
    if len(functions) > _MAX_FUNCTIONS:
        given = Summary(f"{len(functions)} tools")
        raise BadRequest("tools", given, f"at most {_MAX_FUNCTIONS} where {where}")


def _check_size(grammar: str, where: str) -> None:
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        given = Summary(f"{num_bytes} bytes of names and schemas")
        raise BadRequest("tools", given, f"at most {MAX_SCHEMA_BYTES} where {where}")


def refusal(choice: str, where: str) -> BadRequest:
    """The error of a choice that cannot be forced."""
    given = Summary(shown_choice(choice))
    return BadRequest("tool_choice", given, f'"auto" or "none": calls cannot be forced in {where}')


def shown_choice(choice: str) -> str:
    """A choice for an error."""
    name = choice.removeprefix(FUNCTION_CHOICE)
    return repr(choice) if name == choice else f"the function {name!r}"


class _NotForceable(Exception):  # noqa: N818  (says what is wrong)
    """The table has no grammar for this; the message completes "calls cannot be forced in"."""


class _Grammar:
    """Collects the rules of one grammar."""

    def __init__(
        self,
        calls: CallFormat,
        token_ids: Mapping[str, int],
        functions: Sequence[Mapping[str, Any]],
        is_parallel: bool,
    ) -> None:
        self._calls = calls
        self._token_ids = token_ids
        self._functions = functions
        self._is_parallel = is_parallel
        self._rules: list[str] = []
        spelled = {each.literal for each in calls.spelled}
        self._arguments = ArgumentGrammar(self._rules, token_ids, spelled)

    def text(
        self,
        reasoning: ReasoningFormat | None,
        opened: Opened,
        *,
        is_followed: bool,
        instead: str = "",
        takes_blanks: bool = True,
        only_tokens: bool = False,
    ) -> str:
        """The grammar. instead: what the answer may be in place of calls; takes_blanks: as content.
        only_tokens: of calls that begin with a token. Raises _NotForceable, BadRequest.
        """
        at_border = opened.at_border or opened.is_reasoning
        sections = [each for each in self._calls.sections if at_border or not each.at_start]
        if only_tokens:
            firsts = [first_delimiter(each.elements) for each in sections]
            pairs = zip(sections, firsts, strict=True)
            sections = [one for one, first in pairs if first and self._first_tokens([first])]
        if not sections:
            where = "that is a grammar of its own" if only_tokens else "that begins with content"
            raise _NotForceable(f"an answer {where}")
        branches = [self._section(each) for each in sections]
        calls = self._rule("calls", " | ".join(dict.fromkeys(branches)))
        before = ""
        if reasoning is not None:
            may_begin = opened.is_start and self._first_tokens(reasoning.begins)
            if not is_followed:
                before = self._reasoning(reasoning, opened)
            elif opened.is_reasoning or (may_begin and takes_blanks):
                before = _BEHIND_REASONING
        frame = "".join(f"({self._arguments.literal(each)})? " for each in self._calls.dropped)
        answer = f"({frame}{calls} | {instead})" if instead else f"{frame}{calls}"
        return "\n".join((f"start: {before}{answer}", *self._rules, ""))

    def one_of(self, sections: Sequence[CallSection]) -> str:
        """The grammar of one of these sections. Raises as `text`."""
        branches = [self._rule("section", self._sequence(each.elements)) for each in sections]
        return "\n".join((f"start: {' | '.join(branches)}", *self._rules, ""))

    def free_text(self, sections: Sequence[CallSection]) -> str:
        """The grammar of text with calls in it. Raises as `text`."""
        at_start = [each for each in sections if each.at_start]
        anywhere = [each for each in sections if not each.at_start]
        nowhere = {}  # by the text that begins a section: it stands nowhere
        for begin in [each.elements[0] for each in anywhere]:
            if not isinstance(begin, Delimiter | LiteralText):
                raise _NotForceable("calls that begin with no text")
            if not self._arguments.is_token(begin):
                literal = begin.literal
                nowhere[literal] = f"~/{ANY_CHAR}*{pattern_of(literal)}{ANY_CHAR}*/"
        starts = pattern_of("".join(dict.fromkeys(map(_first_char, at_start))))
        not_first = [f"~/[ \\t\\r\\n]*[{starts}]{ANY_CHAR}*/"] if starts else []
        body = " & ".join((f"/{ANY_CHAR}*/", *nowhere.values(), *not_first))
        text = self._rule("TEXT", body)
        branches = [self._rule("section", self._sequence(each.elements)) for each in at_start]
        found = [self._call_behind_text(each, text, nowhere, not_first) for each in anywhere]
        count = "*" if self._is_parallel else "?"
        branches.append(f"({' | '.join(found)}){count} {text}" if found else text)
        return "\n".join((f"start: {' | '.join(branches)}", *self._rules, ""))

    def _call_behind_text(
        self, section: CallSection, text: str, nowhere: Mapping[str, str], not_first: Sequence[str]
    ) -> str:
        """Text, and a section behind it; one that begins with text ends the text there, as do
        others: the library takes the longest terminal.
        """
        begin = section.elements[0]
        assert isinstance(begin, Delimiter | LiteralText)
        if self._arguments.first_token(begin) is not None:
            return self._rule("section", f"{text}? {self._sequence(section.elements)}")
        literal = pattern_of(begin.literal)
        once = f"~/{ANY_CHAR}*{literal}{ANY_CHAR}+/"
        others = [unlike for each, unlike in nowhere.items() if each != begin.literal]
        body = " & ".join((f"/{ANY_CHAR}*{literal}/", once, *others, *not_first))
        before = self._rule("TEXT", body)
        return self._rule("section", f"{before} {self._sequence(section.elements[1:])}")

    # Reasoning

    def _reasoning(self, reasoning: ReasoningFormat, opened: Opened) -> str:
        """The grammar of the reasoning that may precede the calls."""
        begins = self._first_tokens(reasoning.begins)
        if not opened.is_reasoning and not (opened.is_start and begins):
            return ""
        ends = self._first_tokens(reasoning.ends)
        # what ends reasoning in its middle, too
        sections = self._calls.sections if reasoning.calls_within else ()
        firsts = call_beginnings(self._calls) if reasoning.calls_within else []
        calls = self._first_tokens([each for each in firsts if each is not None])
        if not ends or len(calls) < len(firsts):
            if opened.is_reasoning:
                raise _NotForceable("reasoning whose end is not one token")
            return ""  # the model may begin without
        others = ",".join(map(str, sorted({*begins, *ends, *calls})))
        inside = f"<[^{others}]>*"
        end = self._any_of(reasoning.ends)
        if firsts and len(firsts) == len(sections):
            end = f"({end})?"
        end = f"{end} {_BEHIND_REASONING}"
        if opened.is_reasoning:
            return f"{inside} {end} "
        return f"({self._any_of(reasoning.begins)} {inside} {end})? "

    def _first_tokens(self, delimiters: Sequence[Delimiter]) -> list[int]:
        found = map(self._arguments.first_token, delimiters)
        return [each for each in found if each is not None]

    def _any_of(self, delimiters: Sequence[Delimiter]) -> str:
        """Any of the delimiters that begin with a token."""
        found = [each for each in delimiters if self._arguments.first_token(each) is not None]
        return _branches([self._arguments.literal(each) for each in found])

    # Calls

    def _rule(self, name: str, body: str) -> str:
        """Add a rule; several with one name get numbers."""
        unique = f"{name}_{len(self._rules)}"
        self._rules.append(f"{unique}: {body}")
        return unique

    def _section(self, section: CallSection) -> str:
        one = self._rule("section", self._sequence(section.elements))
        repeats = any(isinstance(each, Repeat) for each in section.elements)
        if not self._is_parallel or repeats or section.at_start:
            return one
        return f'{one} ("\\n"? {one})*'

    def _sequence(self, elements: Sequence[Element], function: int | None = None) -> str:
        """The elements one after another. A name and the arguments behind it are of one function:
        without one given, there is a branch for each.
        """
        if function is None and any(isinstance(each, Name | NamedCallId) for each in elements):
            numbers = range(len(self._functions))
            return _branches([self._sequence(elements, number) for number in numbers])
        return " ".join([self._element(each, function) for each in elements])

    def _element(self, element: Element, function: int | None) -> str:
        match element:
            case Delimiter() | LiteralText():
                return self._arguments.literal(element)
            case Blank(text):
                return f"{literal_text(text)}?"
            case Name() if function is not None:
                return literal_text(self._name(function, element.stops))
            case NamedCallId(prefix, separator, stops) if function is not None:
                begin = prefix + self._name(function, stops) + separator
                return f"{literal_text(begin)} {_INDEX}" if separator else literal_text(begin)
            case CallId():
                return _CALL_ID
            case CallIndex():
                return _INDEX
            case JsonObject() if function is not None:
                return self._arguments.json(function, self._functions[function])
            case TaggedParameters() if function is not None:
                return self._arguments.tagged(function, self._functions[function], element)
            case KeywordArguments() if function is not None:
                return self._arguments.keywords(function, self._functions[function], element)
            case JsonCall():
                return self._json_call(element)
            case Repeat(inner, separator):
                one = self._rule("call", self._sequence(inner, function))
                if not self._is_parallel:
                    return one
                between = f"{self._sequence(separator)} " if separator else ""
                return f"{one} ({between}{one})*"
            case Alternative(branches):
                texts = [self._sequence(each, function) for each in branches if each]
                return _branches(texts) + ("?" if () in branches else "")
            case NestedElements() if function is not None:
                return self._arguments.elements(function, self._functions[function], element)
            case _:
                raise _NotForceable("arguments without a function's name before them")

    def _json_call(self, element: JsonCall) -> str:
        name_key, arguments_key = _quoted(element.names[0]), _quoted(element.arguments[0])
        calls = [
            f"{literal_text(_quoted(function['name']))} {_COMMA} {literal_text(arguments_key)} "
            f"{_COLON} {self._arguments.json(number, function)}"
            for number, function in enumerate(self._functions)
        ]
        begin = f'"{{" {literal_text(name_key)} {_COLON}'
        return self._rule("json_call", f'{begin} {_branches(calls)} "}}"')

    def _name(self, function: int, stops: str) -> str:
        name: str = self._functions[function]["name"]
        if any(char in stops for char in name):
            given = Summary(f"the name {name[:100]!r}")
            raise BadRequest("tools", given, f"names without any of {stops!r} in a forced call")
        return name


_COMMA, _COLON = '"," " "?', '":" " "?'


def _first_char(section: CallSection) -> str:
    """The character that a section which begins with text begins with."""
    match section.elements[0]:
        case LiteralText(text):
            return text[0]
        case JsonCall() | JsonObject() | Repeat((JsonCall(),)):
            return "{"
        case _:
            raise _NotForceable("calls that begin with no text")


def _branches(texts: Sequence[str]) -> str:
    return f"({' | '.join(texts)})"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
