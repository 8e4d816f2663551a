"""Answers as readers are fed them, and events in a form that can be compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from slipstream_ipc.formats.answer_format import AnswerFormat, delimiters, spelled_literals
from slipstream_ipc.formats.tool_types import ToolTypes
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_worker.formats.answer_reader import AnswerReader, LocatedEvent
from slipstream_worker.formats.compiled_format import CompiledFormat

Item = str | int  # text, or a delimiter's token
JOINED = (EventKind.CONTENT, EventKind.REASONING, EventKind.CALL_ARGUMENTS)


def delimiter_tokens(answer_format: AnswerFormat) -> dict[str, int]:
    """An id for each literal that may be one token."""
    spelled = spelled_literals(answer_format)
    literals = sorted(
        literal
        for literal in {part.literal for part in delimiters(answer_format)}
        if literal in spelled or not any(each in literal for each in spelled)
    )
    return {literal: number for number, literal in enumerate(literals, 1000)}


def to_items(text: str, tokens: dict[str, int]) -> list[Item]:
    """The text with its delimiters as tokens."""
    if not tokens:
        return [text]
    pattern = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
    return [tokens.get(part, part) for part in re.split(f"({pattern})", text) if part]


def divide(items: Iterable[Item], sizes: Sequence[int]) -> list[Item]:
    """The same items with their texts cut to these sizes, which repeat."""
    parts: list[Item] = []
    number = 0
    for item in items:
        if isinstance(item, int):
            parts.append(item)
            continue
        pos = 0
        while pos < len(item):
            size = sizes[number % len(sizes)]
            number += 1
            parts.append(item[pos : pos + size])
            pos += size
    return parts


def feed(reader: AnswerReader, item: Item) -> list[LocatedEvent]:
    return reader.feed(item) if isinstance(item, str) else reader.feed_delimiter(item)


def join(events: Iterable[AnswerEvent]) -> list[AnswerEvent]:
    """Adjacent events of one kind and call as one, without their numbers of tokens."""
    joined: list[AnswerEvent] = []
    for event in events:
        event = replace(event, num_tokens=0, num_before=0)
        last = joined[-1] if joined else None
        if last and event.kind in JOINED and (last.kind, last.call) == (event.kind, event.call):
            joined[-1] = AnswerEvent(event.kind, last.text + event.text, event.call)
        else:
            joined.append(event)
    return joined


def read(
    compiled: CompiledFormat,
    items: Iterable[Item],
    tools: ToolTypes | None = None,
    options: AnswerOptions = AnswerOptions(),  # noqa: B008 - frozen
    state: bytes = b"",
) -> list[AnswerEvent]:
    """The events of a whole answer."""
    reader = compiled.reader(tools, options, state)
    pieces = [piece for item in items for piece in feed(reader, item)]
    pieces += reader.finish()
    assert reader.num_decided == reader.num_fed
    return join(piece.event for piece in pieces)


def content(text: str) -> AnswerEvent:
    return AnswerEvent(EventKind.CONTENT, text)


def reasoning(text: str) -> AnswerEvent:
    return AnswerEvent(EventKind.REASONING, text)


def call(
    number: int, name: str, arguments: str, call_id: str = "", ends: bool = True
) -> list[AnswerEvent]:
    """The events of one call."""
    events = [AnswerEvent(EventKind.CALL_BEGINS, name, number, call_id)]
    if arguments:
        events.append(AnswerEvent(EventKind.CALL_ARGUMENTS, arguments, number))
    return [*events, AnswerEvent(EventKind.CALL_ENDS, "", number)] if ends else events
