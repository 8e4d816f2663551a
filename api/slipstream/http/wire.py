"""What goes over an HTTP connection as bytes: heads, chunks, events. Pure functions.

Owns: framing of responses, and of server-sent events. Does not know: sockets, routes, streams.

Rules:
- An event is one line. Some clients split lines at U+0085, U+2028 and U+2029 too, so those leave as
  JSON escapes; JSON escapes every control character below them by itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

DONE_EVENT = b"data: [DONE]\n\n"
JSON = b"application/json"
EVENT_STREAM = b"text/event-stream; charset=utf-8"

Headers = tuple[tuple[bytes, bytes], ...]

_MARK = "\x7f"  # stands for itself in JSON, and hardly ever in a text
_MARK_BYTES = _MARK.encode()
_encode = msgspec.json.Encoder().encode


class Response(Struct, frozen=True):
    """A whole answer. `headers` go out besides those that every answer has.

    body: with a status of 304 the one that the client has already: it is not sent.
    """

    status: int
    body: bytes
    headers: Headers = ()
    content_type: bytes = JSON


def json_response(
    status: int, content: object, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> Response:
    """`content`, a Struct, as JSON."""
    return Response(status, _encode(content), headers)


def json_raw(content: object) -> Raw:
    """`content`, a Struct, as JSON that is to stand in other content."""
    return Raw(_encode(content))


def event(content: object) -> bytes:
    """`content`, a Struct, as a server-sent event."""
    return b"data: " + one_line(_encode(content)) + b"\n\n"


def json_parts(texts: Sequence[str]) -> list[bytes]:
    """`json_part` of each, at the price of one."""
    parts = one_line(_encode(_MARK.join(texts)))[1:-1].split(_MARK_BYTES)
    if len(parts) != len(texts):  # one of them has the mark in it, or there are none
        parts = [json_part(text) for text in texts]
    return parts


def json_part(text: str) -> bytes:
    """What is between the quotes of `json_text`."""
    return json_text(text)[1:-1]


def json_text(text: str) -> bytes:
    """A JSON string that holds no line break of any kind."""
    return one_line(_encode(text))


def one_line(encoded: bytes) -> bytes:
    """JSON without a raw line or paragraph separator."""
    if encoded.isascii():
        return encoded
    encoded = encoded.replace(b"\xc2\x85", b"\\u0085")
    if b"\xe2\x80" in encoded:
        encoded = encoded.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return encoded
