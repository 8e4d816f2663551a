"""The tool calls of an answer, put together from its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from slipstream_ipc.messages import AnswerEvent, EventKind


class ToolCall(Struct, frozen=True):
    """A call of a function that the model asks for.

    id: what the tool's turn refers to, as its `tool_call_id`. arguments: a JSON object as text,
    where the call is complete. status: "incomplete" where the answer ended within the call, or went
    on with text that is not JSON; the arguments are then the beginning of a JSON object.
    """

    id: str
    name: str
    arguments: str
    status: Literal["complete", "incomplete"] = "complete"


class ToolCallDelta(Struct, frozen=True):
    """The part of a tool call that a delta adds. index: the call's number within the answer, from
    0.

    id, name: None except in the delta in which the call begins. arguments: the next piece of them,
    which may be empty.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


def call_id(stream_id: bytes, index: int) -> str:
    """The id of a stream's `index`-th call, where the model wrote none: the same for every reader,
    and after every death of a process.
    """
    digest = blake2b(stream_id + index.to_bytes(4, "little"), digest_size=12)
    return f"call_{digest.hexdigest()}"


def with_call_ids(events: tuple[AnswerEvent, ...], stream_id: bytes) -> tuple[AnswerEvent, ...]:
    """The events, with an id for each call that begins without one."""
    if all(event.kind != EventKind.CALL_BEGINS or event.call_id for event in events):
        return events
    return tuple(
        replace(event, call_id=call_id(stream_id, event.call))
        if event.kind == EventKind.CALL_BEGINS and not event.call_id
        else event
        for event in events
    )


def call_deltas(events: Iterable[AnswerEvent]) -> list[ToolCallDelta]:
    """The parts of tool calls that these events add, one for each call, in the order of the
    calls.
    """
    begins: dict[int, AnswerEvent | None] = {}
    pieces: dict[int, list[str]] = {}
    for event in events:
        if event.kind == EventKind.CALL_BEGINS:
            begins[event.call] = event
            pieces.setdefault(event.call, [])
        elif event.kind == EventKind.CALL_ARGUMENTS:
            begins.setdefault(event.call, None)
            pieces.setdefault(event.call, []).append(event.text)
    return [
        ToolCallDelta(index, None, None, "".join(pieces[index]))
        if begin is None
        else ToolCallDelta(index, begin.call_id, begin.text, "".join(pieces[index]))
        for index, begin in begins.items()
    ]


def tool_calls_of(events: Sequence[AnswerEvent]) -> list[ToolCall]:
    """The calls that begin in these events, which are all of an answer."""
    ended = {event.call for event in events if event.kind == EventKind.CALL_ENDS}
    return [
        ToolCall(
            delta.id or "",
            delta.name,
            delta.arguments,
            "complete" if delta.index in ended else "incomplete",
        )
        for delta in call_deltas(events)
        if delta.name is not None
    ]
