"""Large prompts of Submits, held encoded as they travel.

A client keeps each Submit until its stream ends, to submit it again where the server has lost it.
As objects, a chat of many short messages takes six times the bytes that its client has sent, and a
text with a single character beyond the first planes up to four times as many.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from slipstream_ipc.messages import ChatMessage, Submit

PACKED_BYTES = 2**14  # smaller messages stay as they are: packing encodes the prompt once more
_encode = msgspec.msgpack.Encoder().encode
_decode_messages = msgspec.msgpack.Decoder(tuple[ChatMessage, ...]).decode
_decode_text = msgspec.msgpack.Decoder(str).decode


def packed(submit: Submit) -> Submit:
    """The Submit with its prompt encoded, where that is smaller. It is encoded to the same bytes;
    `messages_of` and `prompt_text_of` read its prompt.
    """
    prompt: dict[str, Any] = {}
    if submit.messages:
        prompt["messages"] = _raw(submit.messages)
    elif submit.text is not None and not submit.text.isascii():
        prompt["text"] = _raw(submit.text)
    return replace(submit, **prompt) if prompt else submit


def _raw(prompt: object) -> Raw:
    return Raw(bytes(memoryview(_encode(prompt))))  # a copy: msgspec's bytes have room to grow


def messages_of(submit: Submit) -> tuple[ChatMessage, ...]:
    """The messages of a Submit, packed or not; empty where its prompt is another."""
    messages: Any = submit.messages
    return _decode_messages(messages) if isinstance(messages, Raw) else submit.messages


def prompt_text_of(submit: Submit) -> str | None:
    """The text of a Submit, packed or not; None where its prompt is another."""
    text: Any = submit.text
    return _decode_text(text) if isinstance(text, Raw) else submit.text
