"""Ports for what cannot be told to choose one itself.

They lie below those that the kernel gives to connections and to port 0 (ip_local_port_range), so
nothing that tests start beside this one comes by one of them between here and its use.
"""

from __future__ import annotations

import secrets
import socket
from pathlib import Path

_LOWEST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens at."""
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
