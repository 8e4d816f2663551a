"""By which names this server may be called: a defence against pages of other sites (DNS rebinding).

Owns: the comparison of a request's Host, and of a page's Origin, with what is allowed. Does not
know: paths, keys, answers to other origins (`cors`).

A page of evil.example whose name comes to mean 127.0.0.1 is of the server's own origin to its
browser, and may read every answer. Its requests still say `Host: evil.example`.

Rules:
- A server without keys that listens on loopback alone answers to names of loopback alone. Keys, or
  an address that others can reach, open it to any name: there a name says nothing about who asks.
- Names that are given are allowed besides, and then no others are, wherever it listens. As in
  Starlette's TrustedHostMiddleware: no port; `*.example.com` is every name below, `*` any at all.
- What needs no browser needs no Host: HTTP/1.0 may leave it out.
- An Origin is that of this server's own page, or one that `cors` allows.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from slipstream.http.errors import ApiError
from slipstream.http.exchange import HttpRequest

_ANY = "*"
_BELOW = "*."
_LOCAL = "localhost"
_SHOWN = 100  # of what was given


class Hosts:
    """allowed: names besides loopback's; None: any."""

    def __init__(self, allowed: Sequence[str] | None, origins: Sequence[str] = ()) -> None:
        self._is_open = allowed is None or _ANY in allowed
        given = tuple(name.lower() for name in allowed or ())
        self._names = frozenset(given)
        self._endings = tuple(name[1:] for name in given if name.startswith(_BELOW))
        self._origins = frozenset(origins)
        self._is_allowed = lru_cache(maxsize=64)(self._look_up)

    def check(self, request: HttpRequest) -> ApiError | None:
        """The refusal that a request deserves, which may be of a page that has no business here."""
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
        """The same for a page that asks for what only this server's own page is meant to ask."""
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

    def _look_up(self, host: bytes) -> bool:
        name = _name_of(host.decode("latin-1").lower())
        return is_loopback(name) or name in self._names or name.endswith(self._endings or ("\0",))


def hosts_of(host: str, *, has_keys: bool, allowed: Sequence[str], origins: Sequence[str]) -> Hosts:
    """For a server that listens at `host`."""
    is_open = not allowed and (has_keys or not is_loopback(host.lower().removesuffix(".")))
    return Hosts(None if is_open else allowed, origins)


def is_loopback(name: str) -> bool:
    """Whether a name or an address, in lower case, can mean nothing but this machine (RFC 6761)."""
    if name == _LOCAL or name.endswith("." + _LOCAL):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)


def _name_of(host: str) -> str:
    """A Host's name or address, without its port and a dot at its end; "" where it has none."""
    if host.startswith("["):
        name, bracket, rest = host[1:].partition("]")
        is_right = bool(bracket) and (not rest or rest[0] == ":")
    else:
        name, _, rest = host.partition(":")
        is_right = ":" not in rest
    return name.removesuffix(".") if is_right else ""
