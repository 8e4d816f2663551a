"""Images in prompts, as callers give them: the bytes of a file, its path, a picture of PIL's, or a
data URL. Here each becomes the bytes of a file: nothing behind this knows a path or a URL.
"""

from __future__ import annotations

import binascii
import os
import re
from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

from slipstream_ipc.errors import BadRequest, Summary
from slipstream_ipc.messages import ChatMessage, MediaItem
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.messages.media import MAX_MEDIA_ITEMS
from slipstream_ipc.validation.image_header import image_header
from slipstream_ipc.validation.media import media_item

LOW_PIXELS = 512 * 512  # of an image whose `detail` is low
DETAILS = ("auto", "low", "high")
_DATA, _BASE64 = "data:", ";base64"
_PIECE_CHARS = 2**20  # of base64, decoded at once; a multiple of four
_PIL = "PIL."
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_DATA_URLS = "a data: URL, as data:image/png;base64,…"


class Chat(NamedTuple):
    """The messages of a chat, and the images that their parts name by number."""

    messages: tuple[ChatMessage, ...]
    media: tuple[MediaItem, ...] = ()


class MediaCollector:
    """The images of a request, in the order in which they are found. places: the caller's name of
    each.
    """

    def __init__(self) -> None:
        self.items: list[MediaItem] = []
        self.places: list[str] = []

    def add(self, file: bytes | MediaItem, place: str, detail: str | None = None) -> int:
        """The number of a new image. file: its bytes, or their item. Raises: BadRequest."""
        if len(self.items) == MAX_MEDIA_ITEMS:
            given = Summary("one image more")
            raise BadRequest(place, given, f"{MAX_MEDIA_ITEMS} in a request")
        if detail is not None and detail not in DETAILS:
            raise BadRequest(f"{place}.detail", detail, f"one of {', '.join(DETAILS)}")
        data = file if isinstance(file, bytes) else file.data
        image_header(data, place)
        max_pixels = LOW_PIXELS if detail == "low" else 0
        if isinstance(file, bytes) or max_pixels:
            file = media_item("image", data, max_pixels)
        self.items.append(file)
        self.places.append(place)
        return len(self.items) - 1

    @property
    def names(self) -> dict[str, str]:
        """The caller's names of the fields that errors of worker and core name."""
        return {f"media[{index}]": place for index, place in enumerate(self.places)}


def message_of_parts(parts: Sequence[str | int]) -> tuple[str, tuple[str | int, ...] | None]:
    """A message's content, and its parts: texts and numbers of images; None for texts alone."""
    content = "".join([part for part in parts if isinstance(part, str)])
    has_images = any(not isinstance(part, str) for part in parts)
    return content, tuple(part for part in parts if part != "") if has_images else None


def data_of_url(url: str, field: str) -> bytes:
    """The bytes in a data URL (RFC 2397) in base64. Raises: BadRequest for any other."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        is_scheme = _SCHEME.match(url) is not None
        allowed = f"{_DATA_URLS}: the server fetches no files" if is_scheme else _DATA_URLS
        raise BadRequest(field, url, allowed)
    kind, comma, encoded = rest.partition(",")
    if not comma or not kind.lower().endswith(_BASE64):
        raise BadRequest(field, url[:64], _DATA_URLS)
    return data_of_base64(encoded, field)


def data_of_base64(encoded: str, field: str) -> bytes:
    """The bytes of a text in base64 (RFC 4648), by pieces: decoding holds the interpreter's lock.

    Raises BadRequest for other characters, or for a text that is cut off.
    """
    try:
        if 0 <= encoded.find("=") < len(encoded) - 2:
            raise ValueError("padding before its end")
        pieces = [
            binascii.a2b_base64(encoded[begin : begin + _PIECE_CHARS], strict_mode=True)
            for begin in range(0, len(encoded), _PIECE_CHARS)
        ]
    except (binascii.Error, ValueError) as error:
        allowed = f"the base64 of a file's bytes ({error})"
        raise BadRequest(field, encoded[:32], allowed) from None
    return b"".join(pieces)


def data_of(given: Any, field: str) -> bytes:
    """The bytes of an image's file, given as such, or as a path, a data URL or a picture of PIL's.
    Raises: BadRequest.
    """
    match given:
        case bytes():
            return given
        case bytearray() | memoryview():
            return bytes(given)
        case str() if given[:5].lower() == _DATA or "://" in given[:16]:
            return data_of_url(given, field)
        case str() | os.PathLike():
            return _file(given, field)
    if type(given).__module__.startswith(_PIL) and hasattr(given, "save"):
        file = BytesIO()
        given.save(file, "PNG")
        return file.getvalue()
    allowed = "a file's bytes, its path, a picture of PIL's, or a data: URL"
    raise BadRequest(field, type(given).__name__, allowed)


def _file(path: str | os.PathLike[str], field: str) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_MESSAGE_BYTES + 1)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadRequest(field, str(path), f"a file that can be read ({why})") from None
    if len(data) > MAX_MESSAGE_BYTES:
        given = Summary(f"a file of more than {MAX_MESSAGE_BYTES} bytes")
        raise BadRequest(field, given, "a smaller one")
    return data
