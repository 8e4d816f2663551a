"""Turns the messages of a chat, and what it says of reasoning, into what its template is given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from slipstream.http.api_errors import bad_field
from slipstream.http.openai.custom_tools import arguments_of_input
from slipstream.http.openai.decoded_files import known_file
from slipstream.http.openai.request_bodies import (
    Call,
    CalledFunction,
    ChatRequest,
    ContentPart,
    ImageContent,
    ImageUrl,
    Message,
    PlacedImage,
    RefusalContent,
    TextContent,
    ThinkingContent,
)
from slipstream.request.media import Chat, MediaCollector, data_of_url, message_of_parts
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage, ChatToolCall, FunctionCall, ModelCard
from slipstream_ipc.validation.media import why_no_media

_IS_THINKING = {"enabled": True, "adaptive": True, "disabled": False, "between_tools": False}
_NO_EFFORT = "none"
_ASSISTANT = "assistant"


def chat_of_turns(
    messages: Sequence[Message], model: ModelCard | None
) -> tuple[Chat, dict[str, str]]:
    """The chat as the worker renders it, and the caller's names of its images, for errors.

    model: refuses images where it takes none; None: is not known. Raises: ApiError.
    """
    if not messages:
        raise bad_field("messages", "messages: got none, allowed: one or more")
    images = MediaCollector()
    turns = [_chat_message(index, each, model, images) for index, each in enumerate(messages)]
    return Chat(tuple(turns), tuple(images.items)), images.names


def template_variables(body: ChatRequest) -> dict[str, Any] | None:
    """The variables of the chat template: those that the body gives, and under the names that
    templates read, its `reasoning_effort` and whether it wants reasoning at all.
    """
    found: dict[str, Any] = {}
    effort, is_thinking = body.reasoning_effort, _is_thinking(body)
    if effort is None and isinstance(body.reasoning, dict):
        effort = body.reasoning.get("effort")
    if isinstance(effort, str):
        found["reasoning_effort"] = effort
        if effort == _NO_EFFORT and is_thinking is None:
            is_thinking = False
    if is_thinking is not None:
        found |= {"enable_thinking": is_thinking, "thinking": is_thinking}
    return {**found, **(body.chat_template_kwargs or {})} if found else body.chat_template_kwargs


def reasoning_target(body: ChatRequest) -> int | None:
    """The reasoning tokens that the body aims at, by Anthropic's field or by OpenRouter's."""
    for given, name in ((body.thinking, "budget_tokens"), (body.reasoning, "max_tokens")):
        target = given.get(name) if isinstance(given, dict) else None
        if isinstance(target, int) and not isinstance(target, bool) and 0 < target < 2**32:
            return target
    return None


def _is_thinking(body: ChatRequest) -> bool | None:
    """True if the body asks for reasoning; None if it says nothing of it that is understood."""
    thinking = body.thinking
    if isinstance(thinking, dict):
        kind = thinking.get("type")
        thinking = _IS_THINKING.get(kind) if isinstance(kind, str) else None
    enabled = body.reasoning.get("enabled") if isinstance(body.reasoning, dict) else None
    given = (body.enable_thinking, thinking, enabled)
    return next((each for each in given if isinstance(each, bool)), None)


def _chat_message(
    index: int, message: Message, model: ModelCard | None, images: MediaCollector
) -> ChatMessage:
    parts: tuple[str | int, ...] | None = None
    content, reasoning = message.content, message.reasoning_content or message.reasoning
    if isinstance(content, str) and not message.tool_calls:
        call_id = message.tool_call_id
        return ChatMessage(message.role, content, message.name, None, call_id, reasoning or None)
    if content is None:
        content = message.refusal
    elif not isinstance(content, str):
        thoughts = [part.thinking for part in content if isinstance(part, ThinkingContent)]
        reasoning = reasoning or "".join(thoughts)
        field = f"messages[{index}].content"
        content, parts = message_of_parts(
            [
                _image(part, f"{field}[{at}]", model, images)
                if isinstance(part, ImageContent)
                else _text_of(part)
                for at, part in enumerate(content)
            ]
        )
    if content is None and (message.role == _ASSISTANT or message.tool_calls):
        content = ""
    if content is None:
        field = f"messages[{index}].content"
        raise bad_field(field, f"{field}: got null, allowed: text, or a list of text parts")
    calls = tuple(
        _tool_call(call, f"messages[{index}].tool_calls[{at}]")
        for at, call in enumerate(message.tool_calls or ())
    )
    return ChatMessage(
        message.role,
        content,
        message.name,
        calls or None,
        message.tool_call_id,
        reasoning or None,
        parts,
    )


def _image(part: ImageContent, place: str, model: ModelCard | None, images: MediaCollector) -> int:
    """The number of an image. place: of the part, in a chat. Raises: ApiError."""
    kind, field = "image_url", f"{place}.type"
    if isinstance(part, PlacedImage):
        place, kind = part.place, part.kind
        field = place if kind == "image" else f"{place}.type"
    if why := "" if model is None else why_no_media(model):
        what = f"{field}: got {kind!r}, allowed: text; the model is served as text: {why}"
        raise bad_field(field, what)
    if isinstance(part, PlacedImage) and part.refusal:
        raise bad_field(place, part.refusal)
    given = part.image_url
    detail = given.detail if isinstance(given, ImageUrl) else None
    url = given.url if isinstance(given, ImageUrl) else given
    where = place if isinstance(part, PlacedImage) else f"{place}.image_url"
    if url is None:
        raise bad_field(where, f"{where}: missing, allowed: an object with url and detail")
    try:
        known = known_file(url.partition(",")[2])
        return images.add(known or data_of_url(url, where), place, detail)
    except BadRequest as error:
        raise bad_field(error.field, str(error)) from None


def _text_of(part: ContentPart) -> str:
    match part:
        case TextContent(text=text) | RefusalContent(refusal=text):
            return text
        case _:
            return ""


def _tool_call(call: Call, where: str) -> ChatToolCall:
    """Raises: ApiError."""
    function, custom = call.function, call.custom
    if custom is not None and function is None:
        function = CalledFunction(custom.name, arguments_of_input(custom.input))
    elif function is None or custom is not None:
        name = call.type or "function"
        given = "missing" if function is None else "got function and custom"
        raise bad_field(f"{where}.{name}", f"{where}.{name}: {given}, allowed: one of them")
    arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = msgspec.json.encode(arguments or {}).decode()
    return ChatToolCall(FunctionCall(function.name, arguments), call.id, call.type and "function")
