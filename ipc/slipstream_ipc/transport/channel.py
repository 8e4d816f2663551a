"""The channel of one attach: a ZeroMQ socket, or a local connection.

Both keep what has arrived in `messages` until it is taken, are registered with the poller until
`close`, and report at once that the other end is gone.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Container

import zmq

from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.local_socket import LocalConnection
from slipstream_ipc.transport.poller import EVENTS, POLLIN, POLLOUT
from slipstream_ipc.transport.sockets import (
    MAX_READ_AT_ONCE,
    MAX_READ_BYTES_AT_ONCE,
    Break,
    DisconnectWatch,
    new_dealer,
)

_UNBROKEN, _BROKEN = Break(), Break(is_broken=True)


class ZmqChannel:
    """A DEALER socket with a random routing id."""

    is_local = False

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        access: Access | None,
        max_message_bytes: int,
        poller: zmq.Poller,
    ) -> None:
        """Raises: ZMQError, with errno EMFILE where no descriptor is left."""
        self.messages: deque[bytes] = deque()
        self._poller = poller
        self.socket = new_dealer(
            context,
            address,
            secrets.token_bytes(16),
            access,
            max_message_bytes=max_message_bytes,
            connects=False,
        )
        poller.register(self.socket, POLLIN)
        self._watch = DisconnectWatch(self.socket, poller)
        self.socket.connect(address)  # after the watch, which would miss a quick failure

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes this channel."""
        return self.socket in arrived or self._watch.socket in arrived

    def send(self, data: bytes) -> bool:
        """Send a message; False if the socket is full."""
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def fill(self) -> None:
        """Add to `messages` what has arrived, a bounded part of it."""
        messages, socket, num_bytes = self.messages, self.socket, 0
        while len(messages) < MAX_READ_AT_ONCE and num_bytes < MAX_READ_BYTES_AT_ONCE:
            # several times faster than catching zmq.Again
            if not int(socket.getsockopt(EVENTS)) & POLLIN:
                return
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_bytes += len(data)
            messages.append(data)

    def look(self) -> Break:
        """The events of the connection since the last call."""
        return self._watch.look()

    def close(self) -> None:
        """Close it without notice to the peer."""
        self._watch.close()
        self._poller.unregister(self.socket)
        self.socket.close(linger=0)


class LocalChannel:
    """A local connection."""

    is_local = True

    def __init__(self, connection: LocalConnection, poller: zmq.Poller) -> None:
        self.messages = connection.messages
        self.send, self.connection, self._poller = connection.send, connection, poller
        connection.on_write_wish = self._register
        self._register(connection)

    def is_among(self, arrived: Container[object]) -> bool:
        """True if a poller's result includes this channel."""
        return self.connection.fd in arrived

    def fill(self) -> None:
        """Add to `messages` what has arrived, and send what waits."""
        if self.connection.num_unsent:
            self.connection.flush()
        if not self.messages:  # else a relay has read a chunk, all that a turn takes
            self.connection.fill()

    def look(self) -> Break:
        """The events of the connection."""
        return _BROKEN if self.connection.is_broken else _UNBROKEN

    def close(self) -> None:
        """Close it without notice to the peer."""
        self._poller.unregister(self.connection.fd)
        self.connection.close()

    def _register(self, connection: LocalConnection) -> None:
        flags = POLLIN | POLLOUT if connection.has_unsent else POLLIN
        self._poller.register(connection.fd, flags)


Channel = ZmqChannel | LocalChannel
