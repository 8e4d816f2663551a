"""Decodes request bodies: from JSON to the types of `request_bodies`, or to an error that names the
field.

Decoding blocks the event loop, and with it all streams, in proportion to the number of values:
16 MiB of token ids took 0.4 s. So values are counted first, in a fraction of that time.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Generic, TypeVar

import msgspec

from slipstream.http.errors import ApiError, bad_field
from slipstream.http.openai.request_bodies import NEUTRAL_VALUES

Body = TypeVar("Body")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|required) field `([^`]*)`")
_PART_TYPE = re.compile(r"messages\[\d+\]\.content\[\d+\]\.type")
_MAX_SHOWN = 80
_SMALL_BYTES = 2**17  # smaller bodies decode fast, whatever they contain
_MAX_VALUES = 2**20  # a batch of 1,024 prompts of 1,024 token ids
_MAX_OBJECTS = 2**16


class BodyDecoder(Generic[Body]):
    """Decodes bodies of one type."""

    def __init__(self, body_type: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(body_type)

    def decode(self, body: bytes) -> Body:
        """Raises ApiError for malformed JSON, unknown fields and wrong types."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_field(None, f"the body is not JSON: {error}") from None


def check_num_values(body: bytes, max_model_len: int) -> None:
    """Raises ApiError for a body with more values or objects than a valid request can have.

    Values are counted by commas and objects by braces, including those inside strings: a text with
    as many has more tokens than the model takes. max_model_len: 0 while the model is not known.
    """
    if len(body) <= _SMALL_BYTES:
        return
    most_objects = max(_MAX_OBJECTS, max_model_len)
    for sign, most in ((b",", max(_MAX_VALUES, 4 * max_model_len)), (b"{", most_objects)):
        if (num := body.count(sign)) > most:
            what = f"the request's body: got {num} times {sign.decode()!r}, allowed: {most}"
            raise ApiError(413, what, code="request_too_large")


def refuse_unsupported(
    body: msgspec.Struct, where: str = "", *, supported: Collection[str] = ()
) -> None:
    """Raises ApiError for the first field whose value is not supported yet (see `NEUTRAL_VALUES`).

    where: prefix of field names in messages. supported: fields that this endpoint does support.
    """
    for name in type(body).__struct_fields__:
        neutral = NEUTRAL_VALUES.get(name)
        if neutral is None or name in supported:
            continue
        value = getattr(body, name)
        if value is None or any(_same(value, one) for one in neutral):
            continue
        shown = msgspec.json.encode(value).decode()
        if len(shown) > _MAX_SHOWN:
            shown = shown[: _MAX_SHOWN - 3] + "..."
        allowed = " or ".join(msgspec.json.encode(one).decode() for one in (*neutral, None))
        message = f"{where}{name}: not supported yet: got {shown}, allowed: {allowed}"
        raise bad_field(where + name, message)


def _same(value: object, neutral: object) -> bool:
    """Equal, without taking true for 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _wrong_field(message: str) -> ApiError:
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    what = message[: found.start()] if found else message
    if _PART_TYPE.fullmatch(path):
        what += ", allowed: 'text'"  # no served model takes images or audio
    named = _NAMED.search(what)
    if named is not None:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    return bad_field(path or None, f"{path}: {what}" if path else what)
