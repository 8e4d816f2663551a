"""The static files of the live page, from `page/`, with entity tags of their content.

- The page needs no key: it contains no data, and its requests are checked like any other.
- Its headers allow only these files to be loaded (Content-Security-Policy), no markup made of
  text (Trusted Types), no framing by other pages, no Referer to be sent, and no names of hosts in
  links to be looked up before a link is followed.
- Browsers revalidate each file (RFC 9110, section 13.1.2), so a page and its scripts are always of
  the same version.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

from slipstream.http.exchange import Exchange, Handler, HttpRequest
from slipstream.http.response_encoding import Response

_FOLDER = files("slipstream.http").joinpath("page")
_START = "index.html"
_PREFIX = "/page/"
PAGE = _PREFIX + "{file}"  # the label under which all files are counted
_KINDS = {
    "html": b"text/html; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "mjs": b"text/javascript; charset=utf-8",
    "svg": b"image/svg+xml",
    "txt": b"text/plain; charset=utf-8",
}
_POLICY = (
    b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'"
)
_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"content-security-policy", _POLICY),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
    (b"x-dns-prefetch-control", b"off"),
)


def page_handlers() -> dict[str, dict[str, Handler]]:
    """Handlers of the files, by path and method; the page itself is at `/`."""
    return {
        "/" if name == _START else _PREFIX + name: {"GET": partial(_answer, _response(name, body))}
        for name, body in sorted(_files(_FOLDER))
    }


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """Name, with its folders, and content of each file."""
    for entry in folder.iterdir():
        name = prefix + entry.name
        if entry.is_dir():
            yield from _files(entry, name + "/")
        else:
            yield name, entry.read_bytes()


def _response(name: str, body: bytes) -> Response:
    tag = b'"%b"' % blake2b(body, digest_size=12).hexdigest().encode()
    kind = _KINDS[name.rpartition(".")[2]]
    return Response(200, body, ((b"etag", tag), *_HEADERS), content_type=kind)


def _answer(response: Response, request: HttpRequest, exchange: Exchange) -> None:
    tag = response.headers[0][1]
    if matches_etag(tag, request.headers.get(b"if-none-match", b"")):
        response = Response(304, response.body, response.headers, response.content_type)
    exchange.respond(response)


def matches_etag(tag: bytes, given: bytes) -> bool:
    """True if an If-None-Match header matches this entity tag, by weak comparison."""
    named = [each.strip().removeprefix(b"W/") for each in given.split(b",")]
    return tag in named or named == [b"*"]
