"""Grammars of answers as messages in channels, in which calls follow the tools' schemas, and the
last message's text a grammar of its own.

A message to a function ends the answer, as its end is one of the model's stop ids: so there is one
call at most. Messages with reasoning before it are free.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.formats.answer_format import ChannelFormat, Delimiter
from slipstream_worker.formats.argument_grammar import ArgumentGrammar, literal_text

ROLE = "assistant"
_CALLS = "commentary"
_FINAL = "final"
_CONTENT = (_FINAL, _CALLS)


class NoTokens(Exception):  # noqa: N818  (says what is wrong)
    """The vocabulary lacks tokens of the format's delimiters."""


def channel_grammar(
    channels: ChannelFormat,
    token_ids: Mapping[str, int],
    functions: Sequence[Mapping[str, Any]],
    *,
    is_forced: bool,
    is_header: bool,
    is_reasoning: bool,
    final_text: str = "",
) -> str:
    """The grammar of an answer with a call of one of the functions, or, unless `is_forced`, with
    messages of content. final_text: content is one message with this text, the last.

    is_header: the prompt has begun the first message's header, up to its role. is_reasoning: it has
    begun a message with reasoning. Raises BadRequest, NoTokens.
    """
    delimiters = (channels.start, channels.channel, channels.message, *channels.ends)
    if any(each.literal not in token_ids for each in delimiters):
        raise NoTokens
    rules: list[str] = []
    arguments = ArgumentGrammar(rules, token_ids)
    start, channel, message = map(arguments.literal, delimiters[:3])
    outside = ",".join(str(token_ids[each.literal]) for each in delimiters)
    text = f"<[^{outside}]>*"
    end = arguments.literal(channels.ends[0])
    next_message = f"{end} {start} {literal_text(ROLE)}"
    constrained = _constrained(arguments, channels.constrain, token_ids)
    # reasoning's text is right behind its channel's name, as the core counts it
    header = _any_of(channels.reasoning)
    if not is_forced and not final_text:
        header = f"({header} | {_any_of(_CONTENT)} {constrained}?)"
    free = arguments.rule("free", f"{channel} {header} {message} {text}")
    calls = []
    for number, function in enumerate(functions):
        name = function["name"]
        if any(char.isspace() or char in "<>" for char in name):
            given = Summary(f"the name {name[:100]!r}")
            raise BadRequest("tools", given, "names without blanks, < and > in this model's format")
        to = literal_text(f" to={channels.function_prefix}{name}")
        header = f"({to} {channel} {literal_text(_CALLS)} | {channel} {literal_text(_CALLS)} {to})"
        calls.append(f"{header} {constrained}? {message} {arguments.json(number, function)}")
    lasts = [arguments.rule("call", " | ".join(calls))] if calls else []
    if final_text:
        header = f"{channel} {literal_text(_FINAL)} {constrained}? {message}"
        lasts.append(arguments.rule("final", f"{header} {final_text}"))
    elif not is_forced:
        lasts.append(free)
    last = f"({' | '.join(lasts)})"
    opened = f"{text} {next_message} " if is_reasoning else ""
    if not is_reasoning and not is_header:
        opened = f"{start} {literal_text(ROLE)} "
    return "\n".join((f"start: {opened}({free} {next_message})* {last}", *rules, ""))


def _constrained(
    arguments: ArgumentGrammar, constrain: Delimiter, token_ids: Mapping[str, int]
) -> str:
    """The grammar of what may follow a message's channel: the form of its text."""
    if constrain.literal not in token_ids:
        return '" json"'
    return f'(" "? {arguments.literal(constrain)} "json" | " json")'


def _any_of(texts: Sequence[str]) -> str:
    return f"({' | '.join(map(literal_text, texts))})"
