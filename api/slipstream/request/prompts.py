"""Prompts as callers give them (text, token ids, chat messages), checked and encoded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream.request.media import (
    Chat,
    MediaCollector,
    data_of,
    data_of_url,
    message_of_parts,
)
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import ChatMessage, MediaItem
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


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image"):
    """A part of a message's content: an image's bytes, its path, a picture of PIL's or a data URL.

    detail: `low` for at most 512 x 512 pixels.
    """

    image: Any
    detail: str | None = None


class ImageUrl(Struct, frozen=True, forbid_unknown_fields=True):
    """An image in OpenAI's form. detail: as in `ImagePart`."""

    url: str
    detail: str | None = None


class ImageUrlPart(
    Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="image_url"
):
    """A part of a message's content: an image in OpenAI's form."""

    image_url: str | ImageUrl


class CheckedPrompt(NamedTuple):
    """A prompt as a text, as a u32 column of token ids or as messages; all but one are empty.
    media: the images of messages. places: the caller's name of each.
    """

    text: str | None = None
    token_ids: bytes = b""
    messages: tuple[ChatMessage, ...] = ()
    media: tuple[MediaItem, ...] = ()
    places: Sequence[str] = ()


Conversation = Sequence[ChatMessage | Mapping[str, Any]]
Prompt = (
    str
    | Sequence[int]
    | npt.NDArray[np.integer[Any]]
    | Conversation
    | Chat
    | TextPrompt
    | TokensPrompt
)

_PARTS = tuple[TextPart | ImagePart | ImageUrlPart, ...]
_encode = msgspec.msgpack.Encoder().encode
_decode_chat = msgspec.msgpack.Decoder(tuple[ChatMessage, ...]).decode
_KINDS = (
    "a string, a sequence of token ids, a list of chat messages with role and content, "
    '{"prompt": TEXT} or {"prompt_token_ids": IDS}'
)


def checked_prompt(prompt: Prompt) -> CheckedPrompt:
    """A prompt in the form in which it is sent. Raises: BadRequest."""
    if isinstance(prompt, Chat):
        check_turns(len(prompt.messages))
        return CheckedPrompt(messages=prompt.messages, media=prompt.media)
    if isinstance(prompt, Mapping):
        return checked_prompt(_unwrapped(prompt))
    if isinstance(prompt, str):
        return CheckedPrompt(checked_utf8("prompt", prompt))
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes | bytearray):
        raise BadRequest("prompt", prompt, _KINDS)
    if not len(prompt):
        raise BadRequest("prompt", prompt, f"{_KINDS}, none of them empty")
    if isinstance(prompt[0], ChatMessage | Mapping):
        check_turns(len(prompt))
        images = MediaCollector()
        messages = _chat(prompt) or tuple(
            [_message(index, given, images) for index, given in enumerate(prompt)]
        )
        return CheckedPrompt(messages=messages, media=tuple(images.items), places=images.places)
    return CheckedPrompt(token_ids=pack_u32(token_ids_from(prompt)))


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


def _message(index: int, given: object, images: MediaCollector) -> ChatMessage:
    field = f"messages[{index}]"
    try:
        if isinstance(given, ChatMessage):
            given = msgspec.to_builtins(given)  # a Struct's constructor checks no types
        elif isinstance(given, Mapping) and ("content" in given or _may_be_empty(given)):
            content, parts = _content(field, given, images)
            given = {**given, "content": content}
            if parts is not None:
                given["parts"] = parts
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


def _content(
    field: str, message: Mapping[str, object], images: MediaCollector
) -> tuple[object, tuple[str | int, ...] | None]:
    """A message's content, with text parts joined, and its parts where there are images among them.
    Raises: BadRequest.
    """
    content = message.get("content")
    if content is None and _may_be_empty(message):
        return "", None
    if not isinstance(content, Sequence) or isinstance(content, str):
        return content, None
    where = f"{field}.content"
    try:
        given = msgspec.convert(content, _PARTS)
    except msgspec.ValidationError as error:
        raise field_error(error, _PARTS, content, where=where) from None
    parts: list[str | int] = []
    for index, part in enumerate(given):
        place = f"{where}[{index}]"
        match part:
            case TextPart(text=text):
                parts.append(text)
            case ImagePart(image=image, detail=detail):
                parts.append(images.add(data_of(image, f"{place}.image"), place, detail))
            case ImageUrlPart(image_url=ImageUrl(url=url, detail=detail)):
                data = data_of_url(url, f"{place}.image_url.url")
                parts.append(images.add(data, place, detail))
            case ImageUrlPart(image_url=str() as url):
                parts.append(images.add(data_of_url(url, f"{place}.image_url"), place))
    return message_of_parts(parts)


def _may_be_empty(message: Mapping[str, object]) -> bool:
    """True if a message may lack content: it has tool calls or reasoning."""
    return bool(message.get("tool_calls") or message.get("reasoning_content"))


def checked_utf8(field: str, text: str) -> str:
    """Check that the text has no lone surrogates, which no message can hold. Raises: BadRequest."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(field, text, "text that UTF-8 can hold") from error
    return text
