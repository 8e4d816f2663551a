"""The sockets that HTTP fronts take their connections from: bound once, handed down, shared.

Owns: binding, handing to a child, taking connections from a socket that others take from, too.
Does not know: HTTP, who starts whom.

Rules:
- Whoever starts the fronts binds, so that an address in use is told before a model is loaded, and
  holds the sockets while fronts come and go: connections that no front has taken yet wait for the
  next one, and are not lost with one that dies.
- Every front takes from the same queue, a few connections in a turn of its loop, so that a burst is
  spread and a front that is busy takes less. Listeners of their own (SO_REUSEPORT) would spread by
  a hash of the addresses, to fronts that hang, too, and reset what waits for one that died.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Sequence

LISTEN_FDS_VARIABLE = "SLIPSTREAM_LISTEN_FDS"

_BACKLOG = 2048  # connections that the kernel holds for us
_AT_ONCE = 16  # taken in one turn
_PAUSE_S = 1.0  # where there is no room for one more
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_logger = logging.getLogger(__name__)


def listen_at(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of `host`, one port for all; port 0 takes any free one.

    Raises: OSError.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            one = socket.socket(family, kind, protocol)
            sockets.append(one)
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind((address[0], port, *address[2:]))
            port = port or port_of(one)
            one.listen(_BACKLOG)
    except BaseException:
        close_all(sockets)
        raise
    return sockets


def port_of(listener: socket.socket) -> int:
    """Where it listens."""
    port: int = listener.getsockname()[1]
    return port


def close_all(sockets: Sequence[socket.socket]) -> None:
    """Let go of them; others who have them go on."""
    for one in sockets:
        one.close()


def handed_down(sockets: Sequence[socket.socket]) -> str:
    """What LISTEN_FDS_VARIABLE is to say to a child that inherits these; there may be none."""
    return ",".join(str(one.fileno()) for one in sockets)


def inherited() -> list[socket.socket] | None:
    """The sockets that our parent has handed down; None where it hands down none ever."""
    given = os.environ.pop(LISTEN_FDS_VARIABLE, None)
    if given is None:
        return None
    sockets = [socket.socket(fileno=int(fd)) for fd in given.split(",") if fd]
    for one in sockets:
        one.set_inheritable(False)
        one.setblocking(False)
    return sockets


class Taker:
    """Takes connections from `sockets`, which are its own from now on, until it is closed.

    has_room: whether there may be one more beside so many that are being opened; those that find no
    room wait in the system's queue, for another front or for one of ours to end.
    """

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        new_protocol: Callable[[], asyncio.Protocol],
        has_room: Callable[[int], bool] = lambda _: True,
    ) -> None:
        self._sockets = list(sockets)
        self._new_protocol = new_protocol
        self._has_room = has_room
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        for one in self._sockets:
            self._loop.add_reader(one, self._take, one)

    def close(self) -> None:
        """Take no more. Idempotent."""
        for one in self._sockets:
            self._loop.remove_reader(one)
        close_all(self._sockets)
        self._sockets.clear()

    def _take(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if not self._has_room(len(self._tasks)):
                self._pause(listener, "there are as many as there may be")
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another front has it, or it has gone again
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._pause(listener, str(error))
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opening = self._loop.connect_accepted_socket(self._new_protocol, connection)
            task: asyncio.Task[object] = self._loop.create_task(opening)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _pause(self, listener: socket.socket, why: str) -> None:
        _logger.error("no connection can be taken for a while: %s", why)
        self._loop.remove_reader(listener)
        self._loop.call_later(_PAUSE_S, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if listener in self._sockets:
            self._loop.add_reader(listener, self._take, listener)
