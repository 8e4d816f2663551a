"""Response bodies and server-sent events as bytes. Pure functions.

An event is one line. Some clients also split lines at U+0085, U+2028 and U+2029, so these are sent
as JSON escapes; JSON itself escapes the control characters below U+0020.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import Raw, Struct

DONE_EVENT = b"data: [DONE]\n\n"
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

Headers = tuple[tuple[bytes, bytes], ...]

_HOLE = b"\0"  # never raw in JSON
_MARK = "\x7f"  # not escaped in JSON, and rare in text
_MARK_BYTES = _MARK.encode()
_encode = msgspec.json.Encoder().encode


class Response(Struct, frozen=True):
    """A complete answer. headers: in addition to those of every answer.

    body: with status 304 the one that the client already has; it is not sent.
    """

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = JSON


def json_response(status: int, content: object, headers: Headers = ()) -> Response:
    """A response with `content`, a Struct, as JSON."""
    return Response(status, _encode(content), headers)


def encoded(content: object) -> bytes:
    """`content`, a Struct, as JSON."""
    return _encode(content)


def json_raw(content: object) -> Raw:
    """`content`, a Struct, as JSON to be embedded in other content."""
    return Raw(_encode(content))


def hole(number: int) -> Raw:
    """A place in content for JSON that is made while the content is sent, see `filled`."""
    return Raw(b"%b%d%b" % (_HOLE, number, _HOLE))


def has_holes(encoded: bytes) -> bool:
    """True if there are holes in encoded content."""
    return _HOLE in encoded


def filled(encoded: bytes, fill: Callable[[int], Iterator[bytes]]) -> Iterator[bytes]:
    """Encoded content in pieces: what stands around its holes, and what fills each of them."""
    for at, piece in enumerate(encoded.split(_HOLE)):
        if at % 2:
            yield from fill(int(piece))
        else:
            yield piece


def event(content: object) -> bytes:
    """`content`, a Struct, as a server-sent event."""
    return b"data: " + one_line(_encode(content)) + b"\n\n"


def named_event(name: str, content: object) -> bytes:
    """`event` with a name."""
    return b"event: %b\n%b" % (name.encode(), event(content))


def json_parts(texts: Sequence[str]) -> list[bytes]:
    """`json_part` of each text, encoded in one call."""
    parts = one_line(_encode(_MARK.join(texts)))[1:-1].split(_MARK_BYTES)
    if len(parts) != len(texts):  # a text contains the mark, or there are no texts
        parts = [json_part(text) for text in texts]
    return parts


def json_part(text: str) -> bytes:
    """`json_text` without the quotes."""
    return json_text(text)[1:-1]


def json_text(text: str) -> bytes:
    """A JSON string without line breaks of any kind."""
    return one_line(_encode(text))


def one_line(encoded: bytes) -> bytes:
    """JSON with U+0085, U+2028 and U+2029 escaped."""
    if encoded.isascii():
        return encoded
    encoded = encoded.replace(b"\xc2\x85", b"\\u0085")
    if b"\xe2\x80" in encoded:
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return encoded
