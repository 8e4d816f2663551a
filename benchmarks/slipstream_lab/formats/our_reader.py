"""Reads divided answers with the worker's reader."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from slipstream_ipc.formats.table import WHOLE, find_format
from slipstream_ipc.messages.answer import AnswerEvent, AnswerOptions, EventKind
from slipstream_lab.formats.divisions import AnswerPiece
from slipstream_lab.formats.rendering import RENDERINGS, PropertyTypes, format_of
from slipstream_worker.formats.compiled_format import CompiledFormat, compile_format

_FIRST_ID = 100_000


class ReadCall(NamedTuple):
    """A call as it was read; the arguments are JSON, unless the call is not whole."""

    name: str
    arguments: str
    is_whole: bool = True


class ReadAnswer(NamedTuple):
    """An answer as it was read."""

    reasoning: str
    content: str
    calls: tuple[ReadCall, ...]


def token_ids(variant: str) -> dict[str, int]:
    """Ids of the delimiters that are tokens of a model with this format."""
    return {text: _FIRST_ID + i for i, text in enumerate(RENDERINGS[variant].added_tokens)}


@cache
def compiled(variant: str) -> CompiledFormat | None:
    """The format as a model with such a vocabulary has it, or None if the table lacks it."""
    name = format_of(variant)
    if name not in WHOLE:
        name = f"none+{name}"
    found = find_format(name)
    return None if found is None else compile_format(found, token_ids(variant))


def read(
    variant: str, pieces: Sequence[AnswerPiece], types: PropertyTypes | None
) -> ReadAnswer | None:
    """What the pieces say, or None if the table lacks the format."""
    known = compiled(variant)
    if known is None:
        return None
    return as_answer(events_of(known, variant, pieces, types))


def events_of(
    known: CompiledFormat,
    variant: str,
    pieces: Sequence[AnswerPiece],
    types: PropertyTypes | None,
    state: bytes = b"",
) -> list[AnswerEvent]:
    """The events of the pieces, as they come. state: after the prompt."""
    reader = known.reader(types, AnswerOptions(), state)
    ids = token_ids(variant)
    events: list[AnswerEvent] = []
    for piece in pieces:
        if piece.is_token and ids[piece.text] in known.delimiter_ids:
            found = reader.feed_delimiter(ids[piece.text])
        else:
            found = reader.feed(piece.text)
        events += [it.event for it in found]
    return events + [it.event for it in reader.finish()]


def as_answer(events: Sequence[AnswerEvent]) -> ReadAnswer:
    """The parts that the events make up."""
    parts = {EventKind.REASONING: "", EventKind.CONTENT: ""}
    calls: list[ReadCall] = []
    for event in events:
        match event.kind:
            case EventKind.CALL_BEGINS:
                calls.append(ReadCall(event.text, "", is_whole=False))
            case EventKind.CALL_ARGUMENTS:
                call = calls[event.call]
                calls[event.call] = call._replace(arguments=call.arguments + event.text)
            case EventKind.CALL_ENDS:
                calls[event.call] = calls[event.call]._replace(is_whole=True)
            case _:
                parts[event.kind] += event.text
    return ReadAnswer(parts[EventKind.REASONING], parts[EventKind.CONTENT], tuple(calls))


def us_per_delta(
    variant: str, before: Sequence[AnswerPiece], deltas: Sequence[AnswerPiece]
) -> float | None:
    """CPU time of a delta that follows `before`, or None if the table lacks the format."""
    known = compiled(variant)
    if known is None:
        return None
    reader = known.reader(None, AnswerOptions())
    ids = token_ids(variant)
    for piece in before:
        if piece.is_token and ids[piece.text] in known.delimiter_ids:
            reader.feed_delimiter(ids[piece.text])
        else:
            reader.feed(piece.text)
    begin = time.thread_time_ns()
    for piece in deltas:
        reader.feed(piece.text)
    return (time.thread_time_ns() - begin) / 1e3 / len(deltas)
