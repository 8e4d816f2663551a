"""The events of an answer, as callers get them."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from slipstream_ipc.messages import AnswerEvent, EventKind

__all__ = [
    "ContentDelta",
    "Event",
    "ReasoningDelta",
    "ToolCallArguments",
    "ToolCallEnd",
    "ToolCallStart",
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


def text_of(kind: EventKind, events: Sequence[AnswerEvent]) -> str:
    """All text of the events of this kind."""
    return "".join([event.text for event in events if event.kind == kind])
