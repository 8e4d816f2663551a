"""From a request's body to its type, or to a refusal that names the field.

Owns: JSON, and what msgspec says about it. Does not know: what the fields do.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Generic, TypeVar

import msgspec

from slipstream.http.errors import ApiError, bad_field
from slipstream.http.requests import NEUTRAL

Body = TypeVar("Body")

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_NAMED = re.compile(r"(?:unknown|required) field `([^`]*)`")
_MAX_SHOWN = 80


class BodyDecoder(Generic[Body]):
    """Reads bodies of one type."""

    def __init__(self, body_type: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(body_type)

    def decode(self, body: bytes) -> Body:
        """Raises: ApiError."""
        try:
            return self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_field(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise bad_field(None, f"the body is not JSON: {error}") from None


def refuse_unsupported(
    body: msgspec.Struct, where: str = "", *, supported: Collection[str] = ()
) -> None:
    """Raises ApiError for the first field that says what is not supported yet.

    supported: fields that do something here, though not everywhere.
    """
    for name in type(body).__struct_fields__:
        neutral = NEUTRAL.get(name)
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
    named = _NAMED.search(what)
    if named is not None:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    return bad_field(path or None, f"{path}: {what}" if path else what)
