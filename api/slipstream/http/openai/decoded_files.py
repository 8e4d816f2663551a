"""Decodes the files in a large body away from the event loop, before its handler is called.

Decoding base64 and hashing takes a millisecond a megabyte and more: 12 MiB would delay all streams.
A thread does it in pieces; the handler, which reads the body in the loop, finds each file by its
base64. A file that it does not find, since its text was escaped, it decodes itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType

from slipstream.request.media import data_of_base64
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import MediaItem
from slipstream_ipc.validation.media import media_item

LARGE_BYTES = 2**20  # of a body
MIN_CHARS = 2**12  # of a file's base64 in it; the handler decodes what is shorter
# what stands before base64 in the APIs: in a data URL, and in a source of Anthropic's
_BEGINNINGS = (b";base64,", b'"data":"', b'"data": "')
_files: ContextVar[Mapping[str, MediaItem]] = ContextVar("files", default=MappingProxyType({}))


def has_large_files(body: bytes) -> bool:
    """True if a body may have files that should be decoded away from the loop."""
    return len(body) > LARGE_BYTES and any(begin in body for begin in _BEGINNINGS)


def decoded_files(body: bytes) -> dict[str, MediaItem]:
    """The files in a body of JSON by their base64, but for short ones. Call it from a thread."""
    found: dict[str, MediaItem] = {}
    for beginning in _BEGINNINGS:
        at = body.find(beginning)
        while at >= 0:
            begin = at + len(beginning)
            end = body.find(b'"', begin)
            if end < 0:
                break
            if end - begin > MIN_CHARS:
                _decode(body[begin:end], found)
            at = body.find(beginning, end)
    return found


@contextmanager
def known_files(files: Mapping[str, MediaItem]) -> Iterator[None]:
    """Within it, `known_file` finds these."""
    token = _files.set(files)
    try:
        yield
    finally:
        _files.reset(token)


def known_file(encoded: str) -> MediaItem | None:
    """The file of a text in base64, if it is decoded already."""
    files = _files.get()
    return files.get(encoded) if files else None


def _decode(encoded: bytes, found: dict[str, MediaItem]) -> None:
    try:
        text = encoded.decode("ascii")
        found[text] = media_item("image", data_of_base64(text, ""))
    except (BadRequest, UnicodeDecodeError):
        pass  # the reader of the body refuses it
