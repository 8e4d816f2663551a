"""Prints an answer as Anthropic's message: its events, and its body where it is not streamed."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from slipstream.http.anthropic.response_bodies import (
    AnswerContent,
    AnsweredMessage,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    ContentDelta,
    InputJsonDelta,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageText,
    MessageThinking,
    MessageToolUse,
    MessageUsage,
    PingEvent,
    StopFields,
    TextDelta,
    ThinkingDelta,
)
from slipstream.http.api_errors import ApiError, ErrorShape
from slipstream.http.blocks.block_printer import AnswerHead, BlockShape, TextFrame
from slipstream.http.blocks.blocks import Block, BlockKind
from slipstream.http.openai.answer_parts import finish_reason
from slipstream.http.openai.usage import Usage
from slipstream.http.response_encoding import named_event
from slipstream_ipc.formats.call_ids import safe_id
from slipstream_ipc.messages import End

_HOLE = b"\0"  # where the text goes in an encoded event; never raw in JSON
_NO_INPUT = "{}"
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_JSON_SIGN = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[\]{},]', re.DOTALL)  # or a string
_STOP_REASONS = {  # an aborted one keeps its own name, which Anthropic has not
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "repetition": "max_tokens",
}


class MessagePrinter:
    """See `BlockPrinter`."""

    has_numbers = False
    custom_tools: Collection[str] = ()

    def __init__(self, head: AnswerHead) -> None:
        self._head = head

    def begin(self, usage: Usage, number: int) -> Sequence[bytes]:
        message = AnsweredMessage(self._head.id, self._head.model, [], None, None, _usage(usage))
        return _event(MessageStart(message)), _event(PingEvent())

    def begin_block(self, block: Block, number: int) -> Sequence[bytes]:
        return (_event(ContentBlockStart(block.index, _content(block, "", _NO_INPUT))),)

    def text_frame(self, block: Block) -> TextFrame:
        event = _event(ContentBlockDelta(block.index, _delta(block.kind)))
        before, after = event.split(_HOLE)
        return TextFrame(before + b'"', b'"' + after)

    def end_block(self, block: Block, number: int) -> Sequence[bytes]:
        return (_event(ContentBlockStop(block.index)),)

    def finish(
        self, blocks: Sequence[Block], end: End, usage: Usage, number: int
    ) -> Sequence[bytes]:
        return _event(MessageDelta(_stop(blocks, end), _usage(usage))), _event(MessageStop())

    def fail(self, blocks: Sequence[Block], error: ApiError, number: int) -> bytes:
        return named_event("error", error.body_as(ErrorShape.ANTHROPIC))

    def whole(self, blocks: Sequence[Block], end: End, usage: Usage) -> AnsweredMessage:
        content = [_content(block, block.text, _input(block)) for block in blocks]
        stop = _stop(blocks, end)
        return AnsweredMessage(
            self._head.id,
            self._head.model,
            content,
            stop.stop_reason,
            stop.stop_sequence,
            _usage(usage),
        )


MESSAGES = BlockShape(MessagePrinter)


def whole_members(arguments: str) -> str:
    """A JSON object of the members that are followed by another one, of the beginning of a JSON
    object: those that are whole for sure.
    """
    depth = end = 0
    for found in _JSON_SIGN.finditer(arguments):
        sign = found[0]
        if sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
        elif sign == "," and depth == 1:
            end = found.start()
    return arguments[:end] + "}" if end else _NO_INPUT


def _input(block: Block) -> str:
    """The input of a call; of one that was cut off, what is whole of it."""
    if block.kind != BlockKind.CALL:
        return _NO_INPUT
    text = block.text if block.is_complete else whole_members(block.text)
    try:
        _object_decoder.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _NO_INPUT
    return text


def _content(block: Block, text: str, tool_input: str) -> AnswerContent:
    match block.kind:
        case BlockKind.CONTENT:
            return MessageText(text)
        case BlockKind.REASONING:
            return MessageThinking(text)
        case BlockKind.CALL:
            return MessageToolUse(safe_id(block.call_id), block.name, Raw(tool_input.encode()))


def _delta(kind: BlockKind) -> ContentDelta:
    match kind:
        case BlockKind.CONTENT:
            return TextDelta(Raw(_HOLE))
        case BlockKind.REASONING:
            return ThinkingDelta(Raw(_HOLE))
        case BlockKind.CALL:
            return InputJsonDelta(Raw(_HOLE))


def _stop(blocks: Sequence[Block], end: End) -> StopFields:
    has_called = any(block.kind == BlockKind.CALL and block.is_complete for block in blocks)
    reason = finish_reason(end, has_called=has_called)
    if reason == "stop" and isinstance(end.stop_reason, str):
        return StopFields("stop_sequence", end.stop_reason)
    return StopFields(_STOP_REASONS.get(reason, reason), None)


def _usage(usage: Usage) -> MessageUsage:
    found = MessageUsage(usage.prompt_tokens, usage.completion_tokens)
    details = usage.prompt_tokens_details
    if not details:
        return found
    num_cached = min(details.cached_tokens, usage.prompt_tokens)
    return replace(
        found,
        input_tokens=usage.prompt_tokens - num_cached,
        cache_read_input_tokens=num_cached,
    )


def _event(content: MessageEvent) -> bytes:
    return named_event(str(content.__struct_config__.tag), content)
