"""The events of a streamed response.

sequence_number: grows with every event, by the number of characters of a delta and by 1 otherwise
(see `block_printer`); output_index: of the item; content_index: of the part within it.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Raw, Struct

from slipstream.http.openai.response_bodies import TokenLogprob
from slipstream.http.response_encoding import event
from slipstream.http.responses.response_object import (
    OutputItem,
    OutputTextPart,
    ReasoningTextPart,
    ResponseObject,
)

TextPart = OutputTextPart | ReasoningTextPart


class _Event(Struct, frozen=True, tag_field="type"):
    sequence_number: int


class _ResponseEvent(_Event, frozen=True):
    response: ResponseObject


class ResponseCreated(_ResponseEvent, frozen=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(_ResponseEvent, frozen=True, tag="response.in_progress"):
    """The second event."""


class ResponseCompleted(_ResponseEvent, frozen=True, tag="response.completed"):
    """The last event, where the model has ended the answer."""


class ResponseIncomplete(_ResponseEvent, frozen=True, tag="response.incomplete"):
    """The last event, where a limit or a cancellation has ended the answer."""


class ResponseFailed(_ResponseEvent, frozen=True, tag="response.failed"):
    """The last event, where the response has failed."""


class _OutputItemEvent(_Event, frozen=True):
    output_index: int
    item: OutputItem


class OutputItemAdded(_OutputItemEvent, frozen=True, tag="response.output_item.added"):
    """An item begins."""


class OutputItemDone(_OutputItemEvent, frozen=True, tag="response.output_item.done"):
    """An item has ended."""


class _ItemEvent(_Event, frozen=True):
    item_id: str
    output_index: int


class _PartEvent(_ItemEvent, frozen=True):
    content_index: int


class ContentPartAdded(_PartEvent, frozen=True, tag="response.content_part.added"):
    """A part of a message or of reasoning begins."""

    part: TextPart


class ContentPartDone(_PartEvent, frozen=True, tag="response.content_part.done"):
    """A part has ended."""

    part: TextPart


class OutputTextDelta(_PartEvent, frozen=True, tag="response.output_text.delta"):
    """A message grows. logprobs: empty, `OutputTextDone` has them."""

    delta: str
    logprobs: Sequence[TokenLogprob | Raw] = []


class OutputTextDone(_PartEvent, frozen=True, tag="response.output_text.done"):
    """A message's text is whole."""

    text: str
    logprobs: Sequence[TokenLogprob | Raw]


class ReasoningTextDelta(_PartEvent, frozen=True, tag="response.reasoning_text.delta"):
    """Reasoning grows."""

    delta: str


class ReasoningTextDone(_PartEvent, frozen=True, tag="response.reasoning_text.done"):
    """The text of reasoning is whole."""

    text: str


class CallArgumentsDelta(_ItemEvent, frozen=True, tag="response.function_call_arguments.delta"):
    """The arguments of a call grow."""

    delta: str


class CallArgumentsDone(_ItemEvent, frozen=True, tag="response.function_call_arguments.done"):
    """The arguments of a call are whole, or will grow no more."""

    name: str
    arguments: str


class CustomInputDelta(_ItemEvent, frozen=True, tag="response.custom_tool_call_input.delta"):
    """The input of a custom tool's call grows."""

    delta: str


class CustomInputDone(_ItemEvent, frozen=True, tag="response.custom_tool_call_input.done"):
    """The input of a custom tool's call is whole, or will grow no more."""

    input: str


class StreamError(_Event, frozen=True, tag="error"):
    """The last event, where the stream could not be continued; the response may still be."""

    code: str | None
    message: str
    param: str | None


StreamEvent = (
    ResponseCreated
    | ResponseInProgress
    | OutputItemAdded
    | ContentPartAdded
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
    | CustomInputDelta
    | CustomInputDone
    | ContentPartDone
    | OutputItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
    | StreamError
)


def named_event(content: StreamEvent) -> bytes:
    """The event as server-sent, with its name in front."""
    name = content.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\n%b" % (name.encode(), event(content))
