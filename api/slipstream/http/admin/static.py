"""The live page's files, as they lie in `page/`: read once, told apart by what is in them.

Owns: their paths, kinds, headers and entity tags. Does not know: what the page shows (`live`).

Rules:
- Whoever reaches this server may see the page: it tells nothing. What it asks for has its own keys.
- The page runs nothing and shows nothing but these files (Content-Security-Policy), is shown in no
  other page, and its address is told to nobody.
- A browser asks each time whether a file is still as it has it (RFC 9110, §13.1.2), so that a page
  and its programs are always of one version.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from importlib.resources import files

from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.wire import Response

_FOLDER = files("slipstream.http").joinpath("page")
_START = "index.html"
_PREFIX = "/page/"
PAGE = _PREFIX + "{file}"  # all of it, where it is counted
_KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
}
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (
        b"content-security-policy",
        b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)

Handler = Callable[[HttpRequest, Exchange], None]


def page_handlers() -> dict[str, dict[str, Handler]]:
    """By path and method; the page itself is at `/`."""
    found = {entry.name: entry.read_bytes() for entry in _FOLDER.iterdir()}
    return {
        "/" if name == _START else _PREFIX + name: {"GET": partial(_answer, _response(name, body))}
        for name, body in sorted(found.items())
    }


def _response(name: str, body: bytes) -> Response:
    tag = b'"%b"' % blake2b(body, digest_size=12).hexdigest().encode()
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(200, body, ((b"etag", tag), *_HEADERS), content_type=kind)


def _answer(response: Response, request: HttpRequest, exchange: Exchange) -> None:
    tag = response.headers[0][1]
    if is_one_of(tag, request.headers.get(b"if-none-match", b"")):
        response = Response(304, response.body, response.headers, response.content_type)
    exchange.respond(response)


def is_one_of(tag: bytes, given: bytes) -> bool:
    """Whether an If-None-Match names this entity tag, in the weak comparison that it asks for."""
    named = [each.strip().removeprefix(b"W/") for each in given.split(b",")]
    return tag in named or named == [b"*"]
