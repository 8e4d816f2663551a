"""The sockets that HTTP fronts take their connections from: bound once, handed down, shared.

Owns: binding, handing to a child, taking connections from a socket that others take from, too, and
that they are shared evenly. Does not know: HTTP, who starts whom.

Rules:
- Whoever starts the fronts binds, so that an address in use is told before a model is loaded, and
  holds the sockets while fronts come and go: connections that no front has taken yet wait for the
  next one, and are not lost with one that dies.
- Every front takes from the same queue, a few connections in a turn of its loop. Listeners of their
  own (SO_REUSEPORT) would spread by a hash of the addresses, to fronts that hang, too, and reset
  what waits for one that died.
- Whoever is awake first would take all of a burst, and streams stay where they are: so each writes
  how many it has into memory that all of them share, and who is ahead leaves the queue to the
  others for a moment. For a moment alone: of the others some may hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import mmap
import os
import select
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Sequence

import msgspec

LISTENERS_VARIABLE = "SLIPSTREAM_LISTENERS"
MAX_FRONTS = 64

_BACKLOG = 2048  # connections that the kernel holds for us
_AT_ONCE = 8  # taken in one turn
_AHEAD = 4  # more connections than another has
_LEAVE_S = 0.005  # to the others
_PAUSE_S = 1.0  # where there is no room for one more
_NOBODY = 2**32 - 1  # takes connections in this place
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_logger = logging.getLogger(__name__)


class ConnectionShares:
    """How many connections each front has: a place for each, written by that front alone."""

    def __init__(self, fd: int, place: int) -> None:
        """fd: of a shared file, which is not needed any more afterwards."""
        self._counts = memoryview(mmap.mmap(fd, 4 * MAX_FRONTS)).cast("I")
        self._place = place

    @staticmethod
    def new_file() -> int:
        """A descriptor of a file for them, in memory, with nobody in it. Raises: OSError."""
        fd = os.memfd_create("slipstream-shares")
        os.write(fd, _NOBODY.to_bytes(4, sys.byteorder) * MAX_FRONTS)
        return fd

    def tell(self, num: int) -> None:
        """We have so many."""
        self._counts[self._place] = num

    def leave(self) -> None:
        """We take no more."""
        self.tell(_NOBODY)

    @property
    def are_uneven(self) -> bool:
        """Whether we have clearly more than another."""
        return self._counts[self._place] > min(self._counts) + _AHEAD


class _HandedDown(msgspec.Struct):
    """What a child is told: descriptors that it inherits, and which place of the shares is its."""

    sockets: list[int]
    shares: int
    place: int


class Listeners:
    """Sockets that listen, and the file of the shares of those who take from them.

    place: of this process, among the shares. path: of a unix socket that was made here.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        shares_fd: int,
        place: int = 0,
        path: str | None = None,
    ) -> None:
        self._path, self._inode = path, None if path is None else os.stat(path).st_ino
        self.sockets = sockets
        self._shares_fd = shares_fd
        self._place = place

    @classmethod
    def at(cls, host: str, port: int) -> Listeners:
        """At every address of `host`, one port for all; port 0 takes any free one.

        Raises: OSError.
        """
        sockets = _listen_at(host, port)
        try:
            return cls(sockets, ConnectionShares.new_file())
        except BaseException:
            _close_all(sockets)
            raise

    @classmethod
    def at_path(cls, path: str) -> Listeners:
        """At a unix socket, which is removed when it is let go. What a dead process has left there
        is replaced. Who may connect is said by its folder and the umask.

        Raises: OSError.
        """
        one = _listen_at_path(path)
        try:
            return cls([one], ConnectionShares.new_file(), path=path)
        except BaseException:
            one.close()
            os.unlink(path)
            raise

    @classmethod
    def inherited(cls) -> Listeners | None:
        """What our parent has handed down; None where it hands down nothing ever."""
        given = os.environ.pop(LISTENERS_VARIABLE, None)
        if given is None:
            return None
        found = msgspec.json.decode(given, type=_HandedDown)
        sockets = [socket.socket(fileno=fd) for fd in found.sockets]
        for one in sockets:
            one.setblocking(False)
        for fd in (*found.sockets, found.shares):
            os.set_inheritable(fd, False)
        return cls(sockets, found.shares, found.place)

    @property
    def port(self) -> int | None:
        """Where they listen; None once they are closed, and for a unix socket."""
        if not self.sockets or self.sockets[0].family == socket.AF_UNIX:
            return None
        return port_of(self.sockets[0])

    @property
    def fds(self) -> tuple[int, ...]:
        """What a child has to inherit."""
        return (*[one.fileno() for one in self.sockets], self._shares_fd)

    def handed_down(self, place: int) -> str:
        """What LISTENERS_VARIABLE is to say to a child that inherits `fds`; closed, they are none.

        place: the child's, in [0, MAX_FRONTS).
        """
        sockets = [one.fileno() for one in self.sockets]
        return msgspec.json.encode(_HandedDown(sockets, self._shares_fd, place)).decode()

    def shares(self) -> ConnectionShares:
        """As who has this place sees them. Raises: OSError."""
        return ConnectionShares(self._shares_fd, self._place)

    def stop(self) -> None:
        """Let go of the sockets; others who have them go on. Idempotent."""
        _close_all(self.sockets)
        self.sockets.clear()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            self._path = None

    def close(self) -> None:
        """Let go of everything. Once."""
        self.stop()
        os.close(self._shares_fd)


def port_of(listener: socket.socket) -> int:
    """Where it listens."""
    port: int = listener.getsockname()[1]
    return port


def _listen_at(host: str, port: int) -> list[socket.socket]:
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
        _close_all(sockets)
        raise
    return sockets


def _listen_at_path(path: str) -> socket.socket:
    one = socket.socket(socket.AF_UNIX)
    try:
        one.setblocking(False)
        try:
            one.bind(path)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or not _is_left_over(path):
                raise
            os.unlink(path)
            one.bind(path)
        one.listen(_BACKLOG)
    except BaseException:
        one.close()
        raise
    return one


def _is_left_over(path: str) -> bool:
    """Whether there is a socket that no process listens at."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _is_waited_at(listener: socket.socket) -> bool:
    """Whether a connection could be taken."""
    polled = select.poll()
    polled.register(listener, select.POLLIN)
    return bool(polled.poll(0))


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


class Taker:
    """Takes connections from `listeners`, which are its own from now on, until it is closed.

    most: connections to have at a time; those that find no room wait in the system's queue, for
    another front or for one of ours to end. Whoever gets one from `new_protocol` says by `release`
    when it has ended. make_room: ends one that has nothing to do; whether one is ending. tls: of
    all connections; a handshake that takes longer than handshake_s is ended.
    """

    def __init__(
        self,
        listeners: Listeners,
        new_protocol: Callable[[], asyncio.Protocol],
        most: int,
        make_room: Callable[[], bool] = bool,
        tls: ssl.SSLContext | None = None,
        handshake_s: float | None = None,
    ) -> None:
        self._listeners = listeners
        self._shares = listeners.shares()
        self._new_protocol = new_protocol
        self._most = most
        self._make_room = make_room
        self._tls, self._handshake_s = tls, None if tls is None else handshake_s
        self._num_held = 0  # or being opened
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._shares.tell(0)
        for one in listeners.sockets:
            self._loop.add_reader(one, self._take, one)

    def release(self) -> None:
        """One of the connections has ended."""
        self._hold(-1)

    def close(self) -> None:
        """Take no more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self._listeners.sockets:
            self._loop.remove_reader(one)
        self._listeners.close()
        self._shares.leave()

    def _take(self, listener: socket.socket) -> None:
        if self._shares.are_uneven:
            self._pause(listener, _LEAVE_S)
            return
        self._take_some(listener)

    def _take_some(self, listener: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            if self._num_held >= self._most:
                if not _is_waited_at(listener):
                    return  # another front has it
                if self._make_room():
                    self._pause(listener, _LEAVE_S)
                else:
                    self._give_up(listener, "there are as many as there may be")
                return
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # another front has it, or it has gone again
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                self._give_up(listener, str(error))
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opening = self._loop.connect_accepted_socket(
                self._new_protocol,
                connection,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s,
            )
            task: asyncio.Task[object] = self._loop.create_task(opening)
            self._hold(1)
            self._tasks.add(task)
            task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is not None:
            self.release()  # it came to nothing

    def _hold(self, num: int) -> None:
        self._num_held += num
        if not self._is_closed:
            self._shares.tell(self._num_held)

    def _give_up(self, listener: socket.socket, why: str) -> None:
        _logger.error("no connection can be taken for a while: %s", why)
        self._pause(listener, _PAUSE_S)

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener, self._take, listener)
            self._take_some(listener)  # even or not
