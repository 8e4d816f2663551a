"""Waits for file descriptors and ZeroMQ sockets on one epoll.

It stands in for `zmq.Poller`, whose calls to the kernel and to libzmq grow with what is registered.
A ZeroMQ socket's descriptor is edge-triggered: a send may clear it while input is there. So each
wait first asks the socket itself, which takes longer than the wait, or a function that knows
whether anything was sent since the socket was found empty.
"""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import zmq

# as plain numbers: operations on enumerations take longer than the calls between them
POLLIN, POLLOUT = int(zmq.POLLIN), int(zmq.POLLOUT)
EVENTS = int(zmq.EVENTS)

_EPOLLIN, _EPOLLOUT = int(select.EPOLLIN), int(select.EPOLLOUT)
_FLAGS_OF = {_EPOLLIN: POLLIN}  # of the most frequent event
_EPOLL_FLAGS = {POLLIN: _EPOLLIN, POLLOUT: _EPOLLOUT, POLLIN | POLLOUT: _EPOLLIN | _EPOLLOUT}


class Poller(zmq.Poller):
    """`zmq.Poller` on epoll. ZeroMQ sockets are polled for input alone."""

    def __init__(self) -> None:
        super().__init__()
        self._epoll = select.epoll()
        self._sources: dict[int, Any] = {}  # by descriptor: it, or its ZeroMQ socket
        self._zmq_fds: dict[Any, int] = {}  # by ZeroMQ socket
        self._inputs: dict[Any, Callable[[], bool]] = {}  # has it input that no edge reports?

    def register(self, socket: Any, flags: int = POLLIN) -> None:
        """Register a ZeroMQ socket or a descriptor, or change a descriptor's flags."""
        if isinstance(socket, int):
            fd = socket
        else:
            fd = self._zmq_fds[socket] = int(socket.getsockopt(zmq.FD))
            self._inputs[socket] = partial(_has_input, socket)
        if fd in self._sources:
            self._epoll.modify(fd, _EPOLL_FLAGS[flags])
        else:
            self._epoll.register(fd, _EPOLL_FLAGS[flags])
            self._sources[fd] = socket

    def register_input(self, fd: int, has_input: Callable[[], bool]) -> None:
        """Register a descriptor, and what is asked besides before each wait."""
        self.register(fd)
        self._inputs[fd] = has_input

    def unregister(self, socket: Any) -> None:
        """Forget a socket or a descriptor."""
        self._inputs.pop(socket, None)
        fd = socket if isinstance(socket, int) else self._zmq_fds.pop(socket)
        del self._sources[fd]
        with contextlib.suppress(OSError):  # it was closed
            self._epoll.unregister(fd)

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        """The sources that are ready within `timeout` ms (None: at some time), as (socket or
        descriptor, flags).

        A descriptor whose other side is gone counts as readable.
        """
        wait_s = None if timeout is None or timeout < 0 else timeout / 1e3
        deadline = time.monotonic() + wait_s if wait_s and self._zmq_fds else None
        while True:
            found: list[tuple[Any, int]] = []
            for source, has_input in self._inputs.items():
                if has_input():
                    found.append((source, POLLIN))
            is_spurious = False
            for fd, event in self._epoll.poll(0 if found else wait_s):
                source = self._sources[fd]
                if found and (source, POLLIN) in found:
                    continue
                if isinstance(source, int):
                    found.append((source, _FLAGS_OF.get(event) or _flags_of(event)))
                elif _has_input(source):
                    found.append((source, POLLIN))
                else:
                    is_spurious = True
            if found or not is_spurious:
                return found
            if deadline is not None:
                wait_s = max(0.0, deadline - time.monotonic())


def _flags_of(event: int) -> int:
    is_output = POLLOUT if event & _EPOLLOUT else 0
    return is_output | (POLLIN if event & ~_EPOLLOUT else 0)


def _has_input(socket: Any) -> bool:
    return bool(socket.getsockopt(EVENTS) & POLLIN)
