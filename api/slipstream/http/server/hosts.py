"""Checks of Host and Origin: a defence against DNS rebinding.

A page of evil.example whose name is made to resolve to 127.0.0.1 has, for its browser, the server's
own origin and may read every answer. Its requests still carry `Host: evil.example`.

- A server without API keys on a loopback address accepts loopback names only. With keys, or on an
  address that other machines reach, any name is accepted: there a name proves nothing.
- If `allowed_hosts` is set, those names and loopback's are accepted and no others, on any address.
  As in Starlette's TrustedHostMiddleware, names have no port, `*.example.com` matches every
  subdomain and `*` matches anything.
- A request without a Host (HTTP/1.0) is accepted: browsers always send one.
- An Origin has to be the server's own, or one that CORS allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from slipstream.http.api_errors import ApiError
from slipstream.http.exchange import HttpRequest
from slipstream.loopback import is_loopback

_ANY = "*"
_SUBDOMAINS = "*."
_SHOWN = 100  # characters of a refused value


class Hosts:
    """allowed: names besides loopback's; None allows any. origins: as for `Cors`."""

    def __init__(self, allowed: Sequence[str] | None, origins: Sequence[str] = ()) -> None:
        self._is_open = allowed is None or _ANY in allowed
        given = tuple(name.lower() for name in allowed or ())
        self._names = frozenset(given)
        self._endings = tuple(name[1:] for name in given if name.startswith(_SUBDOMAINS))
        self._origins = frozenset(origins)
        self._is_allowed = lru_cache(maxsize=64)(self._is_allowed_host)

    def check(self, request: HttpRequest) -> ApiError | None:
        """The 403 for a Host that is not allowed; None if it is."""
        if self._is_open:
            return None
        host = request.headers.get(b"host")
        if host is None or self._is_allowed(host):
            return None
        shown = host[:_SHOWN].decode("latin-1")
        what = (
            f"Host: got {shown!r}, allowed: localhost, 127.0.0.1 and what the server's option "
            "allowed_hosts (--allowed-hosts) names"
        )
        return ApiError(403, what, code="host_not_allowed")

    def check_origin(self, request: HttpRequest) -> ApiError | None:
        """The 403 for an Origin other than the server's own or an allowed one; None if it is."""
        origin = request.headers.get(b"origin")
        if origin is None or _ANY in self._origins:
            return None
        given = origin.decode("latin-1")
        own = request.headers.get(b"host", b"").decode("latin-1")
        if given in self._origins or given.partition("://")[2].lower() == own.lower() != "":
            return None
        what = (
            f"Origin: got {given[:_SHOWN]!r}, allowed: this server's own and what its option "
            "allowed_origins (--allowed-origins) names"
        )
        return ApiError(403, what, code="origin_not_allowed")

    def _is_allowed_host(self, host: bytes) -> bool:
        name = _name_of(host.decode("latin-1").lower())
        return is_loopback(name) or name in self._names or name.endswith(self._endings or ("\0",))


def hosts_of(host: str, *, has_keys: bool, allowed: Sequence[str], origins: Sequence[str]) -> Hosts:
    """The check for a server that listens at `host`; "" for a unix socket."""
    is_open = not allowed and (has_keys or not is_loopback(host.lower().removesuffix(".")))
    return Hosts(None if is_open else allowed, origins)


def _name_of(host: str) -> str:
    """The name or address in a Host header, without port and trailing dot; "" if malformed."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        is_right = bool(bracket) and (not rest or rest[0] == ":")
    else:
        name, _, rest = host.partition(":")
        is_right = ":" not in rest
    return name.removesuffix(".") if is_right else ""
