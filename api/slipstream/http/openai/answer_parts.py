"""The events of an answer as parts of an OpenAI message: content, reasoning, tool calls.

The events of any stretch of a stream become one delta, which has at most one entry for each call,
with id and name if the call begins in it. So each stretch of whole units is one chunk, whichever
kinds of events it has, and the chunks of a stream add up to its message.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from msgspec import UNSET, Raw

from slipstream.answers.events import text_of
from slipstream.answers.tool_calls import ToolCallDelta, call_deltas
from slipstream.http.openai.custom_tools import CustomCalls
from slipstream.http.openai.response_bodies import (
    AnswerMessage,
    CallChunk,
    ChatDelta,
    CustomChunk,
    CustomWithInput,
    FunctionChunk,
    FunctionWithArguments,
    MessageCall,
)
from slipstream_ipc.messages import AnswerEvent, End, EventKind

ASSISTANT = "assistant"


@dataclass(frozen=True, slots=True)
class AnswerParts:
    """The parts of a message that a stretch of an answer adds. customs: the numbers of the calls of
    custom tools, whose arguments are the tool's input.
    """

    content: str
    reasoning: str
    calls: Sequence[ToolCallDelta]
    customs: Collection[int] = ()

    @property
    def is_content(self) -> bool:
        """True if there is nothing but content."""
        return not (self.reasoning or self.calls)

    def delta(self) -> ChatDelta:
        """The parts as a chunk has them."""
        return ChatDelta(
            content=self.content or UNSET,
            reasoning_content=self.reasoning or UNSET,
            reasoning=self.reasoning or UNSET,
            tool_calls=[self._chunk(call) for call in self.calls] or UNSET,
        )

    def message(self) -> AnswerMessage:
        """The parts of a whole answer as its message; content is null beside calls alone."""
        calls = [self._call(call) for call in self.calls]
        return AnswerMessage(
            ASSISTANT,
            None if calls and not self.content else self.content,
            reasoning_content=self.reasoning or UNSET,
            reasoning=self.reasoning or UNSET,
            tool_calls=calls or UNSET,
        )

    def _call(self, call: ToolCallDelta) -> MessageCall:
        call_id, name = call.id or "", call.name or ""
        if call.index in self.customs:
            custom = CustomWithInput(name, call.arguments)
            return MessageCall(call_id, type="custom", custom=custom)
        return MessageCall(call_id, FunctionWithArguments(name, call.arguments))

    def _chunk(self, call: ToolCallDelta) -> CallChunk:
        if call.index in self.customs:
            return _custom_chunk(call)
        if call.id is None:
            return CallChunk(index=call.index, function=FunctionChunk(arguments=call.arguments))
        function = FunctionChunk(name=call.name or "", arguments=call.arguments)
        return CallChunk(index=call.index, id=call.id, type="function", function=function)


def parts_of(
    events: Sequence[AnswerEvent], customs: CustomCalls | None = None, *, is_last: bool = False
) -> AnswerParts:
    """The parts of consecutive events of a stream.

    customs: of the stream's calls, where it has custom tools. is_last: no more events follow.
    """
    calls = call_deltas(events)
    if customs is not None:
        calls = customs.read(calls, events, is_last=is_last)
    return AnswerParts(
        text_of(EventKind.CONTENT, events),
        text_of(EventKind.REASONING, events),
        [call for call in calls if call.id is not None or call.arguments],
        () if customs is None else customs.numbers,
    )


def delta_of_kind(kind: int, text: str | Raw) -> ChatDelta:
    """A chunk of one event that continues a text. kind: see `Deltas.kinds`."""
    match kind & 0xFF:
        case EventKind.REASONING:
            return ChatDelta(reasoning_content=text, reasoning=text)
        case EventKind.CALL_ARGUMENTS:
            call = CallChunk(index=kind >> 8, function=FunctionChunk(arguments=text))
            return ChatDelta(tool_calls=[call])
        case _:
            return ChatDelta(content=text)


def has_ended_call(events: Sequence[AnswerEvent]) -> bool:
    """True if a call ends in these events."""
    return any(event.kind == EventKind.CALL_ENDS for event in events)


def finish_reason(end: End, *, has_called: bool, names_calls: bool = True) -> str:
    """The finish reason of a chat: `tool_calls` where a call has ended and the model stopped by
    itself, so not at a stop string. names_calls: False leaves it `stop`.
    """
    is_own = end.reason == "stop" and not isinstance(end.stop_reason, str)
    return "tool_calls" if names_calls and has_called and is_own else end.reason


def _custom_chunk(call: ToolCallDelta) -> CallChunk:
    if call.id is None:
        return CallChunk(index=call.index, custom=CustomChunk(input=call.arguments))
    custom = CustomChunk(name=call.name or "", input=call.arguments)
    return CallChunk(index=call.index, id=call.id, type="custom", custom=custom)
