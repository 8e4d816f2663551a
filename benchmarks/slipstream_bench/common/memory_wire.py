"""Sockets without a wire: what is sent lies at once in the receiver's memory.

Owns: stand-ins for ZeroMQ's context and sockets, as far as Slipstream's parts use them, so that the
real parts run in one thread and nothing is measured but their own work: no system call, no I/O
thread, no waiting. Does not know: what is sent.

Rules:
- A message is there when its send returns; nothing is lost, and nothing waits for credit.
- `tap` sees every message that leaves a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, cast

import zmq

Tap = Callable[["MemorySocket", int], None]  # who sent, and how many bytes

_NOTHING_THERE = zmq.Again()  # made once: that it is costly to make is the wire's affair


def _untapped(_socket: MemorySocket, _num_bytes: int) -> None:
    """Nobody looks."""


class MemoryContext:
    """In the place of a `zmq.Context`: all sockets of one network."""

    def __init__(self) -> None:
        self.bound: dict[str, MemorySocket] = {}
        self.tap: Tap = _untapped

    def socket(self, kind: int) -> MemorySocket:
        """A ROUTER or a DEALER."""
        return MemorySocket(self, is_router=kind == zmq.ROUTER)

    def as_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        """What those are given who take a context."""
        return cast("zmq.Context[zmq.Socket[bytes]]", self)


class MemorySocket:
    """In the place of a `zmq.Socket`. `address`: what it is bound or connected to."""

    def __init__(self, context: MemoryContext, *, is_router: bool) -> None:
        self.address = ""
        self.is_router = is_router
        self._context = context
        self._inbox: deque[bytes] = deque()  # a router's: route, message, route, message, …
        self._route = b""
        self._peers: dict[bytes, MemorySocket] = {}  # a router's, by route
        self._peer: MemorySocket | None = None  # a dealer's

    def setsockopt(self, option: int, value: Any) -> None:
        """Only the route matters here."""
        if option == zmq.ROUTING_ID:
            self._route = value

    def getsockopt(self, option: int) -> int:
        """Whether something can be read."""
        assert option == zmq.EVENTS
        return zmq.POLLIN if self._inbox else 0

    def bind(self, address: str) -> None:
        """Be found at `address`."""
        self.address = address
        self._context.bound[address] = self

    def connect(self, address: str) -> None:
        """Find who is bound there."""
        self.address = address
        self._peer = self._context.bound[address]
        self._peer._peers[self._route] = self

    def send(self, data: bytes, _flags: int = 0) -> None:
        """To the router."""
        assert self._peer is not None
        self._peer._inbox += (self._route, data)
        self._context.tap(self, len(data))

    def recv(self, _flags: int = 0, *, copy: bool = True) -> bytes | zmq.Frame:
        """One part: from the router, or the route of a dealer. Raises zmq.Again."""
        if not self._inbox:
            _again()
        part = self._inbox.popleft()
        return part if copy else zmq.Frame(part)

    def send_multipart(self, parts: Sequence[bytes], _flags: int = 0) -> None:
        """To the dealer of a route."""
        route, data = parts
        peer = self._peers.get(route)
        if peer is None:
            raise zmq.ZMQError(zmq.EHOSTUNREACH)
        peer._inbox.append(data)
        self._context.tap(self, len(data))

    def get_monitor_socket(self, _events: int) -> MemorySocket:
        """Nothing ever happens to a connection here."""
        return MemorySocket(self._context, is_router=True)

    def recv_multipart(self, _flags: int = 0) -> list[bytes]:
        """An event of a monitor: there is none. Raises zmq.Again."""
        _again()

    def disable_monitor(self) -> None:
        """Stop monitoring."""

    def close(self, linger: int | None = None) -> None:
        """Be found no more."""
        del linger
        if self._peer is not None:
            self._peer._peers.pop(self._route, None)
        if self._context.bound.get(self.address) is self:
            del self._context.bound[self.address]


def _again() -> NoReturn:
    raise _NOTHING_THERE.with_traceback(None)
