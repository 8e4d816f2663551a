"""Sockets as Slipstream uses them, and which messages are numbered.

Owns: the socket options, and why they are what they are:
- ROUTER with MANDATORY (by default it drops silently) and never HANDOVER (it discards what the
  old peer had unread); every attach has a routing id of its own.
- LINGER 0 everywhere: delivery is proven by acknowledgements, never by lingering.
- A link's window bounds what is under way, by acknowledgement, so an attaching end has no
  high-water mark. A ROUTER has one for each peer, far above the window: whoever floods it, or
  leaves unread what it is answered, meets its own limit and costs nobody else memory.
- HANDSHAKE_IVL ends a connection to an accepting end over which nothing comes (see `connections`).
- MAXMSGSIZE cuts off a peer that sends beyond what the codec would refuse politely.
- ipc:// sockets are bound without CURVE, tcp:// ones with it: a socket's options are copied by
  each bind, so one ROUTER serves both (`curve`).
"""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import NamedTuple, get_args

import zmq

from slipstream_ipc.messages import Control
from slipstream_ipc.messages.budgets import MAX_MESSAGE_BYTES
from slipstream_ipc.transport.addresses import (
    check_ipc_address,
    check_listen_address,
    check_private,
    check_server_address,
    check_socket_folder,
    is_ipv6,
)
from slipstream_ipc.transport.connections import HANDSHAKE_S, Connections
from slipstream_ipc.transport.curve import (
    Access,
    ServerKeys,
    open_gate,
    secure_client,
    secure_server,
)

MAX_READ_AT_ONCE = 1024  # messages, before whoever reads them does something else again
MAX_READ_BYTES_AT_ONCE = 2**21  # … and bytes; a message that is larger is read by itself

_UNNUMBERED = frozenset({*get_args(Control), type(None)})
_PEER_HWM = 256  # messages of one peer, either way; links have a window of 16


def is_numbered(body: object) -> bool:
    """Whether a frame with this body takes a sequence number."""
    return type(body) not in _UNNUMBERED


class Listener(NamedTuple):
    """Where a server is heard besides its ipc:// address. Without keys: by every local user."""

    address: str  # tcp://
    keys: ServerKeys | None = None
    insecure: bool = False


def check_address(address: str) -> str:
    """The address; BadRequest unless it is an ipc:// one whose path fits a Unix socket."""
    return check_ipc_address(address)


def private_directory(path: Path | None = None) -> Path:
    """A directory that only this user may enter: `path`, or a fresh one."""
    if path is None:
        return Path(tempfile.mkdtemp(prefix="slipstream-"))
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(path)
    return path


def bind_router(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    listener: Listener | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    connections: Connections | None = None,
) -> zmq.Socket[bytes]:
    """The accepting end's socket, bound to an ipc:// address and where a `listener` says, too.

    `max_message_bytes` is what its codec reads; `connections` bounds who comes.

    Raises: BadRequest for an address that is none; PermissionError where others may enter the
    socket's folder; ZMQError where it cannot be bound.
    """
    check_ipc_address(address)
    check_socket_folder(address)
    if listener is not None:
        has_keys = listener.keys is not None
        check_listen_address(listener.address, has_keys=has_keys, insecure=listener.insecure)
    socket = context.socket(zmq.ROUTER)
    _common(socket, max_message_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _PEER_HWM)
    socket.setsockopt(zmq.RCVHWM, _PEER_HWM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1e3))
    if connections is not None:
        connections.watch(context, socket)
    try:
        socket.bind(address)  # first: it takes no keys
        if listener is not None:
            if listener.keys is not None:
                open_gate(context, listener.keys)
                secure_server(socket, listener.keys)
            socket.setsockopt(zmq.IPV6, int(is_ipv6(listener.address)))
            socket.bind(listener.address)
    except zmq.ZMQError:
        socket.close()  # an open one would keep the context from ever ending
        raise
    return socket


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    route: bytes,
    access: Access | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    connects: bool = True,
) -> zmq.Socket[bytes]:
    """The attaching end's socket. `max_message_bytes` is what its codec reads.

    `connects` False leaves that to the caller, who wants to watch it.

    Raises: BadRequest for an address that is none, or is not to be used without keys.
    """
    access = access or Access()
    has_keys = access.keys is not None
    check_server_address(address, has_keys=has_keys, insecure=access.insecure)
    socket = context.socket(zmq.DEALER)
    _common(socket, max_message_bytes)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.ROUTING_ID, route)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    if access.keys is not None:
        secure_client(socket, access.keys)
    socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
    if connects:
        socket.connect(address)
    return socket


class Break(NamedTuple):
    """What became of a connection."""

    is_broken: bool = False  # it was there, and is no longer
    refused: str = ""  # it was not let in, for good: why
    trouble: str = ""  # it failed in the handshake, perhaps not for good: how


class DisconnectWatch:
    """Says when a socket's connection broke or was refused, before its peer is missed."""

    def __init__(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        """`poller` wakes up for it until `close`. What happened before is never told."""
        self._socket = socket
        self._poller = poller
        self._is_failing = False  # the next break is that of a handshake
        self._events = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        poller.register(self._events, zmq.POLLIN)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """What the poller calls it."""
        return self._events

    def look(self) -> Break:
        """What happened since the last call."""
        is_broken, refused, trouble = False, "", ""
        while True:
            try:
                event = _EVENT.unpack(self._events.recv_multipart(zmq.NOBLOCK)[0])[0]
            except zmq.Again:
                return Break(is_broken, refused, trouble)
            if event == zmq.EVENT_DISCONNECTED:
                is_broken |= not self._is_failing
                self._is_failing = False
                continue
            self._is_failing = True
            if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                refused = "the server does not let in this client's key"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                refused = "one side uses CURVE keys here, the other does not"
            else:
                trouble = "the handshake failed; with keys: server.key may be another server's"

    def close(self) -> None:
        """Stop watching; to be called before the socket is closed."""
        self._poller.unregister(self._events)
        self._socket.disable_monitor()
        self._events.close(linger=0)


_EVENT = struct.Struct("=hi")  # of a monitor's first frame: the event, its value


def _common(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + 2**20)
