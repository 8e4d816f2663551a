"""CORS (Fetch standard): the headers that let pages of other origins read answers.

- No CORS header is sent unless origins are allowed, by name or all of them by `*`.
- Credentials (cookies) are never allowed, so `*` exposes no session: a page sends an API key
  itself.
- A preflight needs no key: browsers send none with it.
- An allowed page may send any request headers (OpenAI's client adds a dozen); unknown ones are
  ignored.
"""

from __future__ import annotations

import re

from slipstream.http.exchange import HttpRequest
from slipstream.http.response_encoding import Headers, Response

_ANY = b"*"
_REQUEST_HEADERS = b"authorization, x-api-key, content-type, accept, last-event-id, cache-control"
_MAX_NAMES_BYTES = 4096
_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_NAMES = re.compile(rb"%b(?:[ \t]*,[ \t]*%b)*" % (_NAME, _NAME))
_MAX_AGE_S = b"600"


class Cors:
    """origins: `scheme://host[:port]` each, or `*`. Without any, no header is sent."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: HttpRequest) -> Headers:
        """The CORS headers of any answer to a request."""
        if not self._origins:
            return ()
        if _ANY in self._origins:
            return ((b"access-control-allow-origin", _ANY), _EXPOSED)
        vary = (b"vary", b"Origin")
        if not self._allows(request):
            return (vary,)
        origin = request.headers[b"origin"]
        return ((b"access-control-allow-origin", origin), _EXPOSED, vary)

    def is_preflight(self, request: HttpRequest) -> bool:
        """True if a request is a CORS preflight that is to be answered."""
        return (
            bool(self._origins)
            and request.method == "OPTIONS"
            and b"origin" in request.headers
            and b"access-control-request-method" in request.headers
        )

    def preflight(self, request: HttpRequest, methods: bytes) -> Response:
        """The answer to a preflight; `headers` decides whether the origin is allowed."""
        asked = request.headers.get(b"access-control-request-headers", b"")
        is_fine = self._allows(request) and len(asked) <= _MAX_NAMES_BYTES
        names = asked if is_fine and _NAMES.fullmatch(asked) else _REQUEST_HEADERS
        return Response(
            204,
            b"",
            (
                (b"access-control-allow-methods", methods),
                (b"access-control-allow-headers", names),
                (b"access-control-max-age", _MAX_AGE_S),
                (b"vary", b"Access-Control-Request-Headers"),
            ),
        )

    def _allows(self, request: HttpRequest) -> bool:
        return _ANY in self._origins or request.headers.get(b"origin") in self._origins


_EXPOSED = (
    b"access-control-expose-headers",
    b", ".join(
        (
            b"request-id",
            b"x-request-id",
            b"retry-after",
            b"www-authenticate",
            b"x-slipstream-ignored-fields",
            b"x-slipstream-changed-turns",
        )
    ),
)
