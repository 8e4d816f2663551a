"""Names and addresses that always mean this machine."""

from __future__ import annotations

import ipaddress

_LOCAL = "localhost"


def is_loopback(name: str) -> bool:
    """True if a lower-case name or address always means this machine (RFC 6761)."""
    if name == _LOCAL or name.endswith("." + _LOCAL):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return address.is_loopback or (mapped is not None and mapped.is_loopback)
