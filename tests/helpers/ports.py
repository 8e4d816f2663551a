"""Free ports, for programs that cannot choose one themselves.

They lie below the range that the kernel assigns to connections and to port 0 (ip_local_port_range),
so no connection of another test takes one before it is used.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A random port on which `host` can be bound."""
    highest = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else 32_768
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    while True:
        port = _LOWEST + secrets.randbelow(max(1, highest - _LOWEST))
        with socket.socket(family) as candidate:
            try:
                candidate.bind((host, port))
            except OSError:
                continue
            return port
