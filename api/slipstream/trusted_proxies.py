"""The proxies whose forwarding headers are trusted."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

UNIX = "unix"  # a peer at a unix socket, which has no address
_ANY = "*"
_MAX_FORWARDED = 50  # addresses read from the end of the header


class TrustedProxies:
    """The trusted proxies: addresses, networks, `unix`, or `*` for any."""

    def __init__(self, given: Sequence[str]) -> None:
        """Raises: ValueError for an entry of any other form."""
        self._names = frozenset(each for each in given if each in (_ANY, UNIX))
        self._networks = tuple(
            ipaddress.ip_network(each, strict=False) for each in given if each not in self._names
        )
        self.has = lru_cache(maxsize=256)(self._has)

    def client(self, peer: str, forwarded: Sequence[str]) -> str:
        """The client behind a peer: the last address in `forwarded` that is not trusted.

        peer: the address of the connection. forwarded: values of X-Forwarded-For, in order.
        """
        if not self.has(peer):
            return peer
        named = [each.strip() for one in forwarded for each in one.split(",")][-_MAX_FORWARDED:]
        for each in reversed(named):
            if not is_ip_address(each):
                break  # addresses before it cannot be trusted
            peer = each
            if not self.has(each):
                break
        return peer

    def _has(self, peer: str) -> bool:
        if _ANY in self._names or peer in self._names:
            return True
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        mapped = getattr(address, "ipv4_mapped", None) or address
        return any(mapped in network for network in self._networks)


def is_ip_address(given: str) -> bool:
    """True if `given` is an IPv4 or IPv6 address, without a port."""
    try:
        ipaddress.ip_address(given)
    except ValueError:
        return False
    return True
