"""Sockets as Slipstream uses them, and which messages are numbered.

Owns: the socket options, and why they are what they are:
- ROUTER with MANDATORY (by default it drops silently) and never HANDOVER (it discards what the
  old peer had unread); every attach has a routing id of its own.
- LINGER 0 everywhere: delivery is proven by acknowledgements, never by lingering.
- No high-water mark: a link's window bounds what is under way, by acknowledgement.
- MAXMSGSIZE cuts off a peer that sends far beyond what the codec would refuse politely.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import zmq

from slipstream_ipc.codec import MAX_MESSAGE_BYTES
from slipstream_ipc.errors import BadRequest
from slipstream_ipc.messages import Hello, Ping, Reattach, Refusal, Welcome

MAX_READ_AT_ONCE = 1024  # messages, before whoever reads them does something else again

_CONTROL = (Hello, Welcome, Reattach, Refusal, Ping)
_MAX_ADDRESS_BYTES = 100  # of a Unix socket's path; the kernel's limit is 107


def is_numbered(body: object) -> bool:
    """Whether a frame with this body takes a sequence number."""
    return body is not None and not isinstance(body, _CONTROL)


def check_address(address: str) -> str:
    """The address; BadRequest unless it is an ipc:// one whose path fits a Unix socket."""
    if not address.startswith("ipc:///"):
        raise BadRequest("address", address, "ipc:// and an absolute path")
    if len(os.fsencode(address)) - len("ipc://") > _MAX_ADDRESS_BYTES:
        raise BadRequest("address", address, f"at most {_MAX_ADDRESS_BYTES} bytes of path")
    return address


def private_directory(path: Path | None = None) -> Path:
    """A directory that only this user may enter: `path`, or a fresh one."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix="slipstream-"))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path}: must belong to the user alone (mode 0700)")
    return path


def bind_router(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """The accepting end's socket."""
    check_address(address)
    socket = context.socket(zmq.ROUTER)
    _common(socket)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError:
        socket.close()  # an open one would keep the context from ever ending
        raise
    return socket


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]], address: str, route: bytes
) -> zmq.Socket[bytes]:
    """The attaching end's socket."""
    check_address(address)
    socket = context.socket(zmq.DEALER)
    _common(socket)
    socket.setsockopt(zmq.ROUTING_ID, route)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    socket.connect(address)
    return socket


class DisconnectWatch:
    """Says when a socket's connection broke: a peer that died is noticed before it is missed."""

    def __init__(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        """`poller` wakes up for it until `close`."""
        self._socket = socket
        self._poller = poller
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        poller.register(self._events, zmq.POLLIN)

    def happened(self) -> bool:
        """Whether the connection broke since the last call."""
        found = False
        while True:
            try:
                self._events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return found
            found = True

    def close(self) -> None:
        """Stop watching; to be called before the socket is closed."""
        self._poller.unregister(self._events)
        self._socket.disable_monitor()
        self._events.close(linger=0)


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, 4 * MAX_MESSAGE_BYTES)
