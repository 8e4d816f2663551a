"""Prompts as callers give them (text, token ids, chat messages), checked and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage
from slipstream_ipc.validation.field_types import field_error
from slipstream_ipc.validation.sampling_params import check_turns, token_ids_from


class TextPrompt(TypedDict):
    """A text prompt in vLLM's form: `{"prompt": "..."}`."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt of token ids in vLLM's form: `{"prompt_token_ids": [...]}`."""

    prompt_token_ids: Sequence[int]


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a message's content."""

    text: str


Conversation = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = (
    str | Sequence[int] | npt.NDArray[np.integer[Any]] | Conversation | TextPrompt | TokensPrompt
)

_encode = msgspec.msgpack.Encoder().encode
_decode_chat = msgspec.msgpack.Decoder(tuple[ChatMessage, ...]).decode
_KINDS = (
    "a string, a sequence of token ids, a list of chat messages with role and content, "
    '{"prompt": TEXT} or {"prompt_token_ids": IDS}'
)


def checked_prompt(prompt: Prompt) -> tuple[str | None, bytes, tuple[ChatMessage, ...]]:
    """A prompt as text, as a u32 column of token ids or as messages; all but one are empty.

    Raises: BadRequest.
    """
    if isinstance(prompt, Mapping):
        return checked_prompt(_unwrapped(prompt))
    if isinstance(prompt, str):
        return checked_utf8("prompt", prompt), b"", ()
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise BadRequest("prompt", prompt, _KINDS)
    if not len(prompt):
        raise BadRequest("prompt", prompt, f"{_KINDS}, none of them empty")
    if isinstance(prompt[0], ChatMessage | Mapping):
        check_turns(len(prompt))
        messages = _chat(prompt) or tuple(map(_message, range(len(prompt)), prompt))
        return None, b"", messages
    return None, pack_u32(token_ids_from(prompt)), ()


def is_prompt_mapping(given: object) -> bool:
    """True if this is meant as a TextPrompt or TokensPrompt, valid or not, and not as a chat
    message.
    """
    return isinstance(given, Mapping) and ("prompt" in given or "prompt_token_ids" in given)


def _unwrapped(given: Mapping[str, object]) -> Any:
    """The text or token ids in a TextPrompt or a TokensPrompt. Raises: BadRequest."""
    if len(given) == 1:
        [(name, value)] = given.items()
        if name == "prompt" and isinstance(value, str):
            return value
        if name == "prompt_token_ids" and not isinstance(value, str | Mapping):
            ids = token_ids_from(value)
            if len(ids):
                return ids
    raise BadRequest("prompt", given, _KINDS)


def _chat(given: Any) -> tuple[ChatMessage, ...] | None:
    """All messages, checked at once, which takes less time than one by one; None if they are not
    all ChatMessages, or one of them is invalid.
    """
    if not {type(each) for each in given} <= {ChatMessage}:
        return None
    try:
        return _decode_chat(_encode(given))  # a Struct's constructor checks no types
    except (msgspec.ValidationError, UnicodeEncodeError, OverflowError):
        return None


def _message(index: int, given: object) -> ChatMessage:
    field = f"messages[{index}]"
    try:
        if isinstance(given, ChatMessage):
            given = msgspec.to_builtins(given)  # a Struct's constructor checks no types
        elif isinstance(given, Mapping) and ("content" in given or _may_be_empty(given)):
            given = {**given, "content": _content(field, given)}
        message = msgspec.convert(given, ChatMessage)
    except msgspec.ValidationError as error:
        raise field_error(error, ChatMessage, given, where=field) from None
    checked_utf8(field, message.role + message.content)
    if message.name is not None:
        checked_utf8(f"{field}.name", message.name)
    if message.tool_calls or message.tool_call_id or message.reasoning_content:
        try:
            msgspec.msgpack.encode(message)
        except UnicodeEncodeError as error:
            raise BadRequest(field, message, "text that UTF-8 can hold") from error
    return message


def _content(field: str, message: Mapping[str, object]) -> object:
    """A message's content, with text parts joined. Raises: BadRequest."""
    content = message.get("content")
    if content is None and _may_be_empty(message):
        return ""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content
    try:
        return joined_parts(msgspec.convert(content, tuple[TextPart, ...]))
    except msgspec.ValidationError as error:
        where = f"{field}.content"
        raise field_error(error, tuple[TextPart, ...], content, where=where) from None


def _may_be_empty(message: Mapping[str, object]) -> bool:
    """True if a message may lack content: it has tool calls or reasoning."""
    return bool(message.get("tool_calls") or message.get("reasoning_content"))


def joined_parts(parts: Sequence[TextPart]) -> str:
    """The text of a message whose content is given in parts."""
    return "".join([part.text for part in parts])


def checked_utf8(field: str, text: str) -> str:
    """Check that the text has no lone surrogates, which no message can hold. Raises: BadRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, text, "text that UTF-8 can hold") from error
    return text
