"""Creates the sockets of both ends of a hop, and says which messages are numbered.

The ZeroMQ socket options and their reasons:

- ROUTER_MANDATORY, as a ROUTER drops messages to unknown routes silently by default; never
  ROUTER_HANDOVER, which discards what the old peer had unread. Every attach has a fresh routing id.
- LINGER 0 everywhere: acknowledgements prove delivery, lingering does not.
- A link's window bounds the messages in flight, so an attaching end has no high-water mark. A
  ROUTER has one for each peer, far above the window: a peer that floods it, or does not read its
  answers, hits its own limit and costs no other peer memory.
- HANDSHAKE_IVL closes connections to an accepting end that do not finish their handshake
  (see `connections`).
- MAXMSGSIZE disconnects a peer whose messages are far larger than what the codec refuses.
- ipc:// addresses are bound without CURVE, tcp:// ones with it: each bind copies the socket's
  options, so one ROUTER serves both (`curve`).
"""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import zmq

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
    current_keys,
    open_gate,
    secure_client,
    secure_server,
)
from slipstream_ipc.transport.link_numbers import UNNUMBERED
from slipstream_ipc.transport.local_socket import LocalListener, listen_local

MAX_READ_AT_ONCE = 1024  # messages read in one call of `receive`
MAX_READ_BYTES_AT_ONCE = 2**21  # the same in bytes; a larger message ends the call

_MAX_LOCAL = 64  # connections of a server whose peers are a few of its own
_BEATS = 4  # of ZeroMQ's own, in the time after which a connection counts as silent
_PEER_HWM = 256  # messages of one peer in each direction; links have a window of 16


def is_numbered(body: object) -> bool:
    """True if a frame with this body takes a sequence number."""
    return type(body) not in UNNUMBERED


class Listener(NamedTuple):
    """A tcp:// address that a server binds besides its ipc:// one.

    Without keys, every local user can connect to it.
    """

    address: str  # tcp://
    keys: ServerKeys | None = None
    insecure: bool = False


def check_address(address: str) -> str:
    """Return the address if it is an ipc:// one whose path fits a Unix socket.

    Raises: BadRequest.
    """
    return check_ipc_address(address)


def private_directory(path: Path | None = None) -> Path:
    """A directory that only this user may enter: `path`, created if missing, or a temporary one.

    Folders above it that are missing are made so, too. Raises: PermissionError if `path` exists and
    other users may enter it.
    """
    if path is None:
        return Path(tempfile.mkdtemp(prefix="slipstream-"))
    for folder in (*reversed(path.parents), path):  # `parents=True` would make them by the umask
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)
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
    """The accepting end's socket, bound to an ipc:// address and to that of `listener`, if given.

    max_message_bytes: the largest message that the codec reads.
    connections: bounds the number of open connections.

    Raises: BadRequest for an invalid address; PermissionError if other users may enter the socket's
    folder; ZMQError if an address cannot be bound.
    """
    check_ipc_address(address)
    check_socket_folder(address)
    if listener is not None:
        _check_listener(listener)
    socket = _new_router(context, max_message_bytes, connections)
    try:
        socket.bind(address)  # before the keys are set: it takes none
        if listener is not None:
            _bind_listener(context, socket, listener)
    except zmq.ZMQError:
        socket.close()  # an open socket would block the context's termination
        raise
    return socket


def bind_tcp_router(
    context: zmq.Context[zmq.Socket[bytes]],
    listener: Listener,
    *,
    max_message_bytes: int,
    connections: Connections,
    silent_s: float,
) -> zmq.Socket[bytes]:
    """A ROUTER bound to the address of `listener` alone. Peers that give no sign of life for
    `silent_s` are disconnected (`beat_below`). The others are parameters of `bind_router`.

    Raises: BadRequest for an invalid address; ZMQError if it cannot be bound.
    """
    _check_listener(listener)
    socket = _new_router(context, max_message_bytes, connections)
    beat_below(socket, silent_s)
    try:
        _bind_listener(context, socket, listener)
    except zmq.ZMQError:
        socket.close()
        raise
    return socket


def beat_below(socket: zmq.Socket[bytes], silent_s: float) -> None:
    """Connections of the socket's next `bind` or `connect` are tested by ZeroMQ's own heartbeats,
    and broken off after `silent_s` without an answer.

    libzmq's thread sends and answers them: they tell a lost machine or a stopped process, not a
    loop that hangs.
    """
    ms = max(1, int(silent_s * 1e3))
    socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, ms // _BEATS))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, ms - ms // _BEATS)


def _new_router(
    context: zmq.Context[zmq.Socket[bytes]],
    max_message_bytes: int,
    connections: Connections | None,
) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.ROUTER)
    _common(socket, max_message_bytes)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.SNDHWM, _PEER_HWM)
    socket.setsockopt(zmq.RCVHWM, _PEER_HWM)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1e3))
    if connections is not None:
        connections.watch(context, socket)
    return socket


def _check_listener(listener: Listener) -> None:
    has_keys = listener.keys is not None
    check_listen_address(listener.address, has_keys=has_keys, insecure=listener.insecure)


def _bind_listener(
    context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], listener: Listener
) -> None:
    if listener.keys is not None:
        open_gate(context, listener.keys)
        secure_server(socket, listener.keys)
    socket.setsockopt(zmq.IPV6, int(is_ipv6(listener.address)))
    socket.bind(listener.address)


@dataclass(frozen=True, slots=True)
class ServerSockets:
    """The sockets on which an accepting end listens: a ROUTER, and local connections if
    available.
    """

    router: zmq.Socket[bytes]
    local: LocalListener | None

    def close(self, linger_ms: int = 0) -> None:
        """End listening and close all connections."""
        if self.local is not None:
            self.local.close()
        self.router.close(linger=linger_ms)


def listen(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    listener: Listener | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    connections: Connections | None = None,
    max_local: int = _MAX_LOCAL,
) -> ServerSockets:
    """The accepting end's sockets. Parameters and errors are those of `bind_router`.

    max_local: the largest number of local connections.
    """
    check_ipc_address(address)
    # first: a peer that reaches the ROUTER may move to a local connection
    local = listen_local(address, max_message_bytes=max_message_bytes, max_connections=max_local)
    try:
        router = bind_router(
            context,
            address,
            listener,
            max_message_bytes=max_message_bytes,
            connections=connections,
        )
    except BaseException:
        if local is not None:
            local.close()
        raise
    return ServerSockets(router, local)


def new_dealer(
    context: zmq.Context[zmq.Socket[bytes]],
    address: str,
    route: bytes,
    access: Access | None = None,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    connects: bool = True,
) -> zmq.Socket[bytes]:
    """The attaching end's socket. `max_message_bytes` is the largest message that its codec reads.

    With `connects` False the caller connects it, after starting to monitor it.

    Raises: BadRequest for an address that is invalid, or needs keys that `access` lacks.
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
        secure_client(socket, current_keys(access.keys, address))  # a server's key may change
    socket.setsockopt(zmq.IPV6, int(is_ipv6(address)))
    if connects:
        socket.connect(address)
    return socket


class Break(NamedTuple):
    """The end or failure of a connection, if any."""

    is_broken: bool = False  # an established connection ended
    refused: str = ""  # why the handshake was refused permanently
    trouble: str = ""  # how the handshake failed, perhaps temporarily


class DisconnectWatch:
    """Reports a broken or refused connection of a socket at once, before its heartbeat fails."""

    def __init__(self, socket: zmq.Socket[bytes], poller: zmq.Poller) -> None:
        """`poller` has the monitor registered until `close`. Earlier events are not reported."""
        self._socket = socket
        self._poller = poller
        self._is_failing = False  # the next disconnect belongs to a failed handshake
        self._events = socket.get_monitor_socket(
            zmq.EVENT_DISCONNECTED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        poller.register(self._events, zmq.POLLIN)

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """The monitor's socket, as registered with the poller."""
        return self._events

    def look(self) -> Break:
        """The events since the last call."""
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
                refused = "the server does not accept this client's key"
            elif event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                refused = "one side uses CURVE keys here, the other does not"
            else:
                trouble = "the handshake failed; with keys, server.key may be another server's"

    def close(self) -> None:
        """Stop monitoring; to be called before the socket is closed."""
        self._poller.unregister(self._events)
        self._socket.disable_monitor()
        self._events.close(linger=0)


_EVENT = struct.Struct("=hi")  # a monitor's first frame: the event and its value


def _common(socket: zmq.Socket[bytes], max_message_bytes: int) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes + 2**20)
