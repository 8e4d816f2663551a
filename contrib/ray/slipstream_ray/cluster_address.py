"""The address of a Ray cluster, and a check that something listens there.

Ray itself goes on trying for minutes, with lines of its own, where a cluster has gone.
"""

from __future__ import annotations

import os
import socket

from slipstream.errors import ConnectionLostError
from slipstream_ipc.messages import Fault

ADDRESS_VARIABLE = "RAY_ADDRESS"
_OF_THIS_MACHINE = ("auto", "local")
_WITHIN_S = 5.0


def cluster_address(given: str | None = None) -> str:
    """The address that is given, else $RAY_ADDRESS, else `auto`: the cluster of this machine."""
    return given or os.environ.get(ADDRESS_VARIABLE) or _OF_THIS_MACHINE[0]


def check_reachable(address: str) -> None:
    """Raise ConnectionLostError where nothing takes connections at HOST:PORT within 5 s."""
    if address in _OF_THIS_MACHINE:
        return  # Ray looks for its processes
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isascii() and port.isdigit()):
        return  # Ray says what is wrong with it
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_WITHIN_S).close()
    except (OSError, OverflowError, UnicodeError) as error:
        raise no_cluster(address, str(error)) from None


def no_cluster(address: str, why: str) -> ConnectionLostError:
    """The error for a cluster that does not answer."""
    what = f"no Ray cluster at {address}: {why}"
    hint = f"is its head node up (`ray status`), and --ray-address or ${ADDRESS_VARIABLE} its own?"
    return ConnectionLostError(Fault("engine", f"{what}; {hint}"))
