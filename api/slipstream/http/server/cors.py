"""Which pages of other origins a browser lets read answers (CORS, as the Fetch standard has it).

Owns: the headers. Does not know: paths, keys.

Rules:
- Nothing is said unless origins are allowed by name, or all of them by `*`.
- Credentials that a browser has by itself (cookies) are never asked for, so `*` is none of a user's
  sessions: an API key is sent by the page that has it.
- A preflight needs no key: a browser sends none with it.
- A page that is allowed to ask may send the headers it likes (OpenAI's client has a dozen of its
  own), as a program may: they mean nothing here but for those that are known.
"""

from __future__ import annotations

import re

from slipstream.http.exchange import HttpRequest
from slipstream.http.wire import Headers, Response

_ANY = b"*"
_REQUEST_HEADERS = b"authorization, content-type, accept, last-event-id, cache-control"
_MAX_NAMES_BYTES = 4096
_NAME = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_NAMES = re.compile(rb"%b(?:[ \t]*,[ \t]*%b)*" % (_NAME, _NAME))
_MAX_AGE_S = b"600"


class Cors:
    """origins: `scheme://host[:port]` each, or `*`; none of them: nothing is ever said."""

    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origin.encode() for origin in origins)

    def headers(self, request: HttpRequest) -> Headers:
        """What the answer to a request has besides, whichever it is."""
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
        """Whether a browser asks what it may send, and is to be answered."""
        return (
            bool(self._origins)
            and request.method == "OPTIONS"
            and b"origin" in request.headers
            and b"access-control-request-method" in request.headers
        )

    def preflight(self, request: HttpRequest, methods: bytes) -> Response:
        """The answer to that; `headers` says whether the origin may at all."""
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


_EXPOSED = (b"access-control-expose-headers", b"retry-after, www-authenticate")
