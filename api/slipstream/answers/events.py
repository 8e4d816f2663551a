"""The events of an answer, as callers get them, and the joining of the wire's events.

Adjacent events that continue each other are one event. Joined like this, the events of a stream are
the same however the stream was divided into deltas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from slipstream_ipc.messages import AnswerEvent, EventKind

__all__ = [
    "TEXT_KINDS",
    "ContentDelta",
    "Event",
    "ReasoningDelta",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
    "joined_events",
    "public_event",
    "text_of",
]


class ContentDelta(Struct, frozen=True, gc=False):
    """New text of the answer itself."""

    text: str


class ReasoningDelta(Struct, frozen=True, gc=False):
    """New text of the model's reasoning."""

    text: str


class ToolCallStart(Struct, frozen=True, gc=False):
    """A tool call begins; its arguments follow.

    index: the call's number within the answer, from 0. id: what a tool's turn refers to. name: the
    function's.
    """

    index: int
    id: str
    name: str


class ToolCallArguments(Struct, frozen=True, gc=False):
    """The next piece of a call's arguments, a JSON object as text."""

    index: int
    text: str


class ToolCallEnd(Struct, frozen=True, gc=False):
    """A call's arguments are complete. A call that was cut off has no such event."""

    index: int


Event = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | ToolCallEnd

# events whose text comes in pieces
TEXT_KINDS = frozenset({EventKind.CONTENT, EventKind.REASONING, EventKind.CALL_ARGUMENTS})


def public_event(event: AnswerEvent) -> Event:
    """The event as callers get it."""
    match event.kind:
        case EventKind.CONTENT:
            return ContentDelta(event.text)
        case EventKind.REASONING:
            return ReasoningDelta(event.text)
        case EventKind.CALL_BEGINS:
            return ToolCallStart(event.call, event.call_id, event.text)
        case EventKind.CALL_ARGUMENTS:
            return ToolCallArguments(event.call, event.text)
        case EventKind.CALL_ENDS:
            return ToolCallEnd(event.call)


def joined_events(events: Iterable[AnswerEvent]) -> tuple[AnswerEvent, ...]:
    """The events, with adjacent pieces of the same text joined and empty ones left out."""
    joined: list[AnswerEvent] = []
    texts: list[str] = []  # of the last event in `joined`, where that is in pieces
    for event in events:
        if event.kind not in TEXT_KINDS:
            _complete(joined, texts)
            joined.append(event)
        elif event.text:
            if not (texts and joined[-1].kind == event.kind and joined[-1].call == event.call):
                _complete(joined, texts)
                joined.append(event)
            texts.append(event.text)
    _complete(joined, texts)
    return tuple(joined)


def _complete(joined: list[AnswerEvent], texts: list[str]) -> None:
    """Give the last event the text of all its pieces."""
    if len(texts) > 1:
        joined[-1] = replace(joined[-1], text="".join(texts))
    texts.clear()


def text_of(kind: EventKind, events: Sequence[AnswerEvent]) -> str:
    """All text of the events of this kind."""
    return "".join([event.text for event in events if event.kind == kind])
