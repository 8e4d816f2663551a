"""The format of a model's answers, from its chat template and the tokens of its vocabulary.

A part that several entries of the table claim is read by none: a wrong reader would take an answer
apart where it says nothing. A part that none claims may be told by the tokenizer's
`response_template`. Options name a part's entry, or `none`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from slipstream_ipc.errors import BadRequest
from slipstream_ipc.formats.answer_format import (
    AnswerFormat,
    CallFormat,
    ReasoningFormat,
    Signature,
    delimiters,
)
from slipstream_ipc.formats.response_template import calls_entry, reasoning_entry
from slipstream_ipc.formats.table import CALLS, NONE, REASONING, WHOLE, compose

TEMPLATE_SEPARATOR = "\n"


class FormatChoice(NamedTuple):
    """The chosen format, and for each part what decided."""

    format: AnswerFormat | None
    reasoning: str
    calls: str
    is_ambiguous: bool = False


class _FormatPart(NamedTuple):
    """The entry of one part. whole: it is an entry of both parts."""

    entry: ReasoningFormat | CallFormat | AnswerFormat | None
    why: str
    is_ambiguous: bool = False


def check_format_names(tool_format: str | None, reasoning_format: str | None) -> None:
    """Check the names that options give. Raises: BadRequest."""
    for option, given, parts in (
        ("tool_format", tool_format, CALLS),
        ("reasoning_format", reasoning_format, REASONING),
    ):
        names = {*parts, *WHOLE, NONE}
        if given is not None and given not in names:
            raise BadRequest(option, given, ", ".join(sorted(names)))
    for option, given, other in (
        ("reasoning_format", reasoning_format, tool_format),
        ("tool_format", tool_format, reasoning_format),
    ):
        if other in WHOLE and given not in (None, other):
            raise BadRequest(option, given, f"{other} or nothing: {other} is a format of both")


def choose_format(
    template: str | Mapping[str, str] | None,
    tokens: Collection[str],
    *,
    tool_format: str | None = None,
    reasoning_format: str | None = None,
    response_template: object = None,
) -> FormatChoice:
    """The format of a model's answers.

    template: the chat template, or several by name. tokens: the vocabulary's added tokens. The
    next two name entries of the table, or are `none`; None lets the model decide.
    response_template: the tokenizer's, if it has one.

    Raises: BadRequest for a name that the table does not have.
    """
    check_format_names(tool_format, reasoning_format)
    text = _joined(template)
    named = next((each for each in (tool_format, reasoning_format) if each in WHOLE), None)
    if named is not None:
        return FormatChoice(WHOLE[named], "named by an option", "named by an option")
    if tool_format is None and reasoning_format is None:
        whole = _find(WHOLE, text, tokens)
        if isinstance(whole.entry, AnswerFormat) or whole.is_ambiguous:
            found = whole.entry if isinstance(whole.entry, AnswerFormat) else None
            return FormatChoice(found, whole.why, whole.why, whole.is_ambiguous)
    reasoning = _part(REASONING, reasoning_format, text, tokens)
    calls = _part(CALLS, tool_format, text, tokens)
    if _is_open(reasoning, reasoning_format):
        reasoning = _explained_part(reasoning, reasoning_entry(response_template, REASONING))
    if _is_open(calls, tool_format):
        calls = _explained_part(calls, calls_entry(response_template, CALLS))
    assert not isinstance(reasoning.entry, CallFormat | AnswerFormat)
    assert not isinstance(calls.entry, ReasoningFormat | AnswerFormat)
    is_none = reasoning.entry is None and calls.entry is None
    return FormatChoice(
        None if is_none else compose(reasoning.entry, calls.entry),
        reasoning.why,
        calls.why,
        reasoning.is_ambiguous or calls.is_ambiguous,
    )


def delimiter_ids(added_tokens: Mapping[str, int]) -> dict[str, int]:
    """The added tokens of a vocabulary that are delimiters of some entry of the table."""
    entries = (*REASONING.values(), *CALLS.values(), *WHOLE.values())
    literals = {each.literal for entry in entries for each in delimiters(entry)}
    return {token: token_id for token, token_id in added_tokens.items() if token in literals}


def _part(
    entries: Mapping[str, ReasoningFormat] | Mapping[str, CallFormat],
    option: str | None,
    template: str,
    tokens: Collection[str],
) -> _FormatPart:
    if option is not None:
        return _FormatPart(entries.get(option), "named by an option")
    return _find(entries, template, tokens)


def _is_open(found: _FormatPart, option: str | None) -> bool:
    """True if neither the option nor the model's template and tokens determine this part."""
    return option is None and found.entry is None and not found.is_ambiguous


def _explained_part(found: _FormatPart, entry: ReasoningFormat | CallFormat | None) -> _FormatPart:
    if entry is None:
        return found
    return _FormatPart(entry, f"its response_template has the delimiters of {entry.name}")


def _find(
    entries: Mapping[str, ReasoningFormat] | Mapping[str, CallFormat] | Mapping[str, AnswerFormat],
    template: str,
    tokens: Collection[str],
) -> _FormatPart:
    """The only entry with a signature that the model has and that has the highest rank; of entries
    that differ in their name alone the first.
    """
    if not template:
        return _FormatPart(None, "the model has no chat template")
    found = {
        name: max(fitting, key=lambda signature: signature.rank)
        for name, entry in entries.items()
        if (fitting := [each for each in entry.signatures if _has(each, template, tokens)])
    }
    rank = max((signature.rank for signature in found.values()), default=0)
    found = {name: signature for name, signature in found.items() if signature.rank == rank}
    if not found:
        return _FormatPart(None, "its chat template and its tokens are those of no known format")
    if len({_nameless(entries[name]) for name in found}) > 1:
        names = ", ".join(found)
        return _FormatPart(
            None, f"its chat template and its tokens fit several formats: {names}", True
        )
    name, signature = next(iter(found.items()))
    return _FormatPart(entries[name], _described(signature))


def _has(signature: Signature, template: str, tokens: Collection[str]) -> bool:
    return (
        all(literal in template for literal in signature.in_template)
        and not any(literal in template for literal in signature.not_in_template)
        and all(token in tokens for token in signature.tokens)
    )


def _nameless(entry: Struct) -> Struct:
    return replace(entry, name="", signatures=())


def _described(signature: Signature) -> str:
    parts = (
        _list("its chat template has", signature.in_template),
        _list("its chat template does not have", signature.not_in_template),
        _list("its vocabulary has", signature.tokens),
    )
    return "; ".join(filter(None, parts))


def _list(what: str, literals: Iterable[str]) -> str:
    shown = ", ".join(map(repr, literals))
    return f"{what} {shown}" if shown else ""


def _joined(template: str | Mapping[str, str] | None) -> str:
    """All templates of a model that has several, for tools and without, as one text."""
    if template is None or isinstance(template, str):
        return template or ""
    return TEMPLATE_SEPARATOR.join(template.values())
