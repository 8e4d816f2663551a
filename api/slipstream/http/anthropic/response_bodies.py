"""Types of the answers of POST /v1/messages and /v1/messages/count_tokens, and of the events of a
streamed one.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Raw, Struct


class MessageUsage(Struct, frozen=True):
    """The tokens of a request. input_tokens: of the prompt, without those found in the cache."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0  # always 0: what is cached for later is not charged


class MessageText(Struct, frozen=True, tag_field="type", tag="text"):
    """Text of the answer."""

    text: str


class MessageThinking(Struct, frozen=True, tag_field="type", tag="thinking"):
    """Reasoning. signature: always empty, as there is nothing to verify."""

    thinking: str
    signature: str = ""


class MessageToolUse(Struct, frozen=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Raw  # a JSON object


AnswerContent = MessageText | MessageThinking | MessageToolUse


class AnsweredMessage(Struct, frozen=True, tag_field="type", tag="message"):
    """The answer. stop_reason: null at the beginning of a stream."""

    id: str
    model: str
    content: list[AnswerContent]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    role: Literal["assistant"] = "assistant"


class InputTokens(Struct, frozen=True):
    """The tokens of a prompt."""

    input_tokens: int


class MessageStart(Struct, frozen=True, tag_field="type", tag="message_start"):
    """The first event of a stream."""

    message: AnsweredMessage


class PingEvent(Struct, frozen=True, tag_field="type", tag="ping"):
    """An event without meaning."""


class ContentBlockStart(Struct, frozen=True, tag_field="type", tag="content_block_start"):
    """A block begins, without text; a tool's input is empty."""

    index: int
    content_block: AnswerContent


class TextDelta(Struct, frozen=True, tag_field="type", tag="text_delta"):
    """New text."""

    text: str | Raw


class ThinkingDelta(Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    """New text of the reasoning."""

    thinking: str | Raw


class InputJsonDelta(Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    """The next piece of a tool's input, which is a JSON object."""

    partial_json: str | Raw


ContentDelta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    """A block grows."""

    index: int
    delta: ContentDelta


class ContentBlockStop(Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    """A block ends."""

    index: int


class StopFields(Struct, frozen=True):
    """The reason why the answer has ended. stop_sequence: the one that ended it, if one did."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag_field="type", tag="message_delta"):
    """The answer has ended."""

    delta: StopFields
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag_field="type", tag="message_stop"):
    """The last event of a stream."""


MessageEvent = (
    MessageStart
    | PingEvent
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
)
