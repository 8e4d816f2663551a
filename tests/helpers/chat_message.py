"""Chat messages as the official client puts them together, and as their events say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from slipstream.answers.tool_calls import call_id
from slipstream_ipc.messages import AnswerEvent, EventKind

# content, reasoning, calls (id, name, arguments), finish reason
Message = tuple[str, str, list[tuple[str, str, str]], str]


def message_of(events: Iterable[AnswerEvent], stream_id: bytes, reason: str = "stop") -> Message:
    """The message of all events of an answer. reason: where no call has ended."""
    content = reasoning = ""
    calls: dict[int, tuple[str, str, str]] = {}
    for event in events:
        match event.kind:
            case EventKind.CONTENT:
                content += event.text
            case EventKind.REASONING:
                reasoning += event.text
            case EventKind.CALL_BEGINS:
                written = event.call_id or call_id(stream_id, event.call)
                calls[event.call] = (written, event.text, "")
            case EventKind.CALL_ARGUMENTS:
                begun = calls[event.call]
                calls[event.call] = (*begun[:2], begun[2] + event.text)
            case EventKind.CALL_ENDS:
                reason = "tool_calls" if reason == "stop" else reason
    return content, reasoning, list(calls.values()), reason


def shown(message: Any, reason: str) -> Message:
    """A message of the official client."""
    extra = message.model_extra or {}
    assert extra.get("reasoning_content") == extra.get("reasoning")
    given = message.tool_calls or []
    assert all(call.type == "function" for call in given)
    calls = [(call.id, call.function.name, call.function.arguments) for call in given]
    return message.content or "", extra.get("reasoning") or "", calls, reason


def accumulated(events: Sequence[tuple[str, Any]]) -> Message:
    """What the official client makes of a whole stream. events: see `identified_events`."""
    state: Any = ChatCompletionStreamState()
    assert events[-1][1] == "[DONE]"
    chunks = [data for _, data in events[:-1]]
    for chunk in chunks:
        state.handle_chunk(ChatCompletionChunk.model_validate(chunk))
    roles = [chunk["choices"][0]["delta"].get("role") for chunk in chunks]
    assert roles == ["assistant", *[None] * (len(chunks) - 1)]
    [choice] = state.current_completion_snapshot.choices
    assert choice.message.role == "assistant"
    return shown(choice.message, choice.finish_reason)
