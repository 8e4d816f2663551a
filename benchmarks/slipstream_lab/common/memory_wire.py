"""Connections in memory, in place of the local ones between Slipstream's processes. The real
components then run in one thread and only their own work is measured: no system calls, no waiting.

- A message can be received as soon as its send returns; no message is lost or waits for the kernel.
- `tap` sees every message that is sent.
- The ZeroMQ sockets beside them are never sent anything.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, cast
from unittest.mock import patch

import zmq

from slipstream_ipc.transport import dealer, sockets
from slipstream_ipc.transport.local_socket import LocalConnection, LocalListener

_numbers = count(2**20)  # in place of descriptors, whose numbers are smaller


class MemoryConnection(LocalConnection):
    """One end of a connection to the listener at `address`."""

    is_socket = False

    def __init__(self, network: MemoryNetwork, address: str, *, is_accepted: bool) -> None:
        """is_accepted: whether it is the listener's end."""
        self.fd = next(_numbers)
        self.messages: deque[bytes] = deque()
        self.is_broken = False
        self.on_write_wish = None
        self.max_bytes = self.num_unsent = 0  # what is sent has arrived
        self.address = address
        self.is_accepted = is_accepted
        self.number = 0  # of an accepted one, among those of its listener
        self.peer: MemoryConnection | None = None
        self.listener: MemoryListener | None = None  # of an accepted one
        self._network = network

    def send(self, message: bytes) -> bool:
        """Send a message; False if the peer is gone."""
        peer = self.peer
        if peer is None:
            return False
        peer.messages.append(message)
        network, listener = self._network, peer.listener
        if listener is None:
            network.arrived.add(peer.fd)
        else:
            listener.read_later(peer)
            network.arrived.add(listener.fd)
        network.tap(self, message)
        return True

    @property
    def is_bare(self) -> bool:
        """Whether nothing waits here."""
        return not (self.messages or self.is_broken)

    def flush(self) -> None:
        """Nothing waits."""

    def fill(self) -> None:
        """What was sent has arrived."""

    def close(self) -> None:
        """End the connection on both sides."""
        self.is_broken = True
        self.fd = -1
        peer, self.peer = self.peer, None
        if peer is not None:
            peer.peer, peer.is_broken = None, True
            if peer.listener is not None:
                peer.listener.read_later(peer)


class MemoryListener(LocalListener):
    """The accepting end at an address."""

    def __init__(self) -> None:
        self.fd = next(_numbers)
        self.is_other_ready = False
        self.num_refused = 0
        self._connections: dict[int, LocalConnection] = {}
        self.unread: deque[LocalConnection] = deque()

    def accept(self, connection: MemoryConnection) -> None:
        """Add the listener's end of a connection."""
        connection.listener, connection.number = self, len(self._connections)
        self._connections[connection.fd] = connection

    def ready(self) -> deque[LocalConnection]:
        """Connections with messages to take, or broken ones; the caller removes them from it."""
        return self.unread

    def watch(self, fd: int) -> None:
        """The ROUTER beside it is never sent anything."""

    def heard(self, connection: LocalConnection) -> None:
        """All connections are the benchmark's own."""

    def drop(self, connection: LocalConnection) -> None:
        """Close a connection. Idempotent."""
        if self._connections.pop(connection.fd, None) is not None:
            connection.close()

    def beat(self) -> None:
        """Nothing is timed."""

    def close(self) -> None:
        """Close all connections."""
        for connection in list(self._connections.values()):
            self.drop(connection)


Tap = Callable[[MemoryConnection, bytes], None]  # the sending end, the message


class MemoryNetwork:
    """The listeners of one network, by address.

    arrived: what a poller would report of all ends, until it is cleared.
    """

    def __init__(self) -> None:
        self.arrived: set[object] = set()
        self.tap: Tap = _untapped
        self._listeners: dict[str, MemoryListener] = {}

    def clear_arrived(self) -> None:
        """Everything was looked at: what is left is reported again, as by `Poller`."""
        self.arrived.clear()
        self.arrived.update(each.fd for each in self._listeners.values() if each.unread)

    def listen(self, address: str, **_limits: int) -> MemoryListener:
        """In place of `listen_local`."""
        listener = self._listeners[address] = MemoryListener()
        return listener

    def connect(self, address: str, _max_message_bytes: int = 0) -> MemoryConnection | None:
        """In place of `connect_local`."""
        listener = self._listeners.get(address)
        if listener is None:
            return None
        ours = MemoryConnection(self, address, is_accepted=False)
        theirs = MemoryConnection(self, address, is_accepted=True)
        ours.peer, theirs.peer = theirs, ours
        listener.accept(theirs)
        return ours

    @contextmanager
    def in_use(self) -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
        """Components assembled meanwhile, with the context given, listen and attach here."""
        with (
            patch.object(sockets, "listen_local", self.listen),
            patch.object(dealer, "connect_local", self.connect),
        ):
            yield cast("zmq.Context[zmq.Socket[bytes]]", _NoContext())


class _NoContext:
    """Replaces a `zmq.Context`."""

    def socket(self, _kind: int) -> _NoSocket:
        return _NoSocket()


class _NoSocket:
    """Replaces a ROUTER that is never sent anything."""

    def setsockopt(self, option: int, value: Any) -> None:
        """Options are ignored."""

    def getsockopt(self, _option: int) -> int:
        """No descriptor, and nothing to be read."""
        return 0

    def bind(self, address: str) -> None:
        """Nothing connects to it."""

    def close(self, linger: int | None = None) -> None:
        """Nothing is open."""


def _untapped(_connection: MemoryConnection, _data: bytes) -> None:
    """The default tap: ignores the message."""
