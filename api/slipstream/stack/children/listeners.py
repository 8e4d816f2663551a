"""The listening sockets of the HTTP fronts: bound once by the parent, inherited and shared.

- The process that starts the fronts binds, so an address in use is reported before a model is
  loaded. It holds the sockets while fronts restart: pending connections wait for the next front and
  are not lost with one that dies.
- All fronts accept from the same queue, a few connections in each turn of the loop. With sockets of
  their own (SO_REUSEPORT) the kernel would distribute connections by a hash of the addresses, to
  hung fronts, too, and reset those that wait for a front that died.
- The first front to wake would accept a whole burst, and connections do not move later. So each
  front writes its number of connections to shared memory, and a front that is ahead leaves the
  queue to the others for a moment; only for a moment, as the others may hang.
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
from functools import partial

import msgspec

LISTENERS_VARIABLE = "SLIPSTREAM_LISTENERS"
MAX_FRONTS = 64

_BACKLOG = 2048  # pending connections in the kernel
_MAX_AT_ONCE = 8  # connections accepted in one turn
_AHEAD = 4  # connections more than another front has, before a front yields
_YIELD_S = 0.005  # how long it yields; the other may hang (decision 023)
_PAUSE_S = 1.0  # after a connection could not be accepted
_NO_FRONT = 2**32 - 1  # the count of an index without a front
_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_logger = logging.getLogger(__name__)


class ConnectionShares:
    """The number of connections of each front, in shared memory: one u32 for each front index,
    written only by that front.
    """

    def __init__(self, fd: int, front_index: int) -> None:
        """fd: of the shared file, which may be closed afterwards. Raises: OSError."""
        self._counts = memoryview(mmap.mmap(fd, 4 * MAX_FRONTS)).cast("I")
        self._front_index = front_index

    @staticmethod
    def new_file() -> int:
        """A descriptor of a new file in memory, without any front. Raises: OSError."""
        fd = os.memfd_create("slipstream-shares")
        os.write(fd, _NO_FRONT.to_bytes(4, sys.byteorder) * MAX_FRONTS)
        return fd

    def set(self, num: int) -> None:
        """Set this front's number of connections."""
        self._counts[self._front_index] = num

    def clear(self) -> None:
        """Mark this front's index as free."""
        self.set(_NO_FRONT)

    @property
    def is_ahead(self) -> bool:
        """True if this front has clearly more connections than another one."""
        return self._counts[self._front_index] > min(self._counts) + _AHEAD


class _Inherited(msgspec.Struct):
    """A child's inheritance: the descriptors of its sockets and its front index."""

    sockets: list[int]
    shares: int
    front_index: int


class Listeners:
    """Listening sockets, and the file with the shares of the fronts that accept from them.

    front_index: of this process. path: of a unix socket made by this process.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        shares_fd: int,
        front_index: int = 0,
        path: str | None = None,
    ) -> None:
        self._path, self._inode = path, None if path is None else os.stat(path).st_ino
        self.sockets = sockets
        self._shares_fd = shares_fd
        self._front_index = front_index

    @classmethod
    def at(cls, host: str, port: int) -> Listeners:
        """Listen at every address of `host` with one port; port 0 takes any free port.

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
        """Listen at a unix socket, which is removed by `stop`.

        A socket left by a dead process is replaced. Its folder and the umask decide which users may
        connect.

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
        """The sockets inherited from the parent; None where it passes none."""
        given = os.environ.pop(LISTENERS_VARIABLE, None)
        if given is None:
            return None
        found = msgspec.json.decode(given, type=_Inherited)
        sockets = [socket.socket(fileno=fd) for fd in found.sockets]
        for one in sockets:
            one.setblocking(False)
        for fd in (*found.sockets, found.shares):
            os.set_inheritable(fd, False)
        return cls(sockets, found.shares, found.front_index)

    @property
    def port(self) -> int | None:
        """The port; None for a unix socket, and once the sockets are closed."""
        if not self.sockets or self.sockets[0].family == socket.AF_UNIX:
            return None
        return port_of(self.sockets[0])

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptors that a child has to inherit."""
        return (*[one.fileno() for one in self.sockets], self._shares_fd)

    def for_child(self, front_index: int) -> str:
        """The value of LISTENERS_VARIABLE for a child that inherits `fds`. Closed sockets are left
        out.

        front_index: the child's, in [0, MAX_FRONTS).
        """
        sockets = [one.fileno() for one in self.sockets]
        return msgspec.json.encode(_Inherited(sockets, self._shares_fd, front_index)).decode()

    def shares(self) -> ConnectionShares:
        """The shares, as this process's front sees them. Raises: OSError."""
        return ConnectionShares(self._shares_fd, self._front_index)

    def stop(self) -> None:
        """Close the sockets of this process; other processes keep theirs. Idempotent."""
        _close_all(self.sockets)
        self.sockets.clear()
        if self._path is not None:
            with contextlib.suppress(OSError):
                if os.stat(self._path).st_ino == self._inode:
                    os.unlink(self._path)
            self._path = None

    def close(self) -> None:
        """Close everything. May be called only once."""
        self.stop()
        os.close(self._shares_fd)


def port_of(listener: socket.socket) -> int:
    """The port of a TCP listener."""
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
            if error.errno != errno.EADDRINUSE or not _is_stale_socket(path):
                raise
            os.unlink(path)
            one.bind(path)
        one.listen(_BACKLOG)
    except BaseException:
        one.close()
        raise
    return one


def _is_stale_socket(path: str) -> bool:
    """True if this is a socket on which no process listens."""
    if not stat.S_ISSOCK(os.lstat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(path) == errno.ECONNREFUSED


def _has_pending(listener: socket.socket) -> bool:
    """True if a connection is pending."""
    polled = select.poll()
    polled.register(listener, select.POLLIN)
    return bool(polled.poll(0))


def _close_all(sockets: Sequence[socket.socket]) -> None:
    for one in sockets:
        one.close()


class Acceptor:
    """Accepts connections from `listeners`, which it owns, until it is closed.

    new_protocol: makes the protocol of a connection. Its user calls `release` when the connection
        has ended.
    most: the maximum number of connections. Others stay in the kernel's queue, for another front or
        until a connection here ends.
    make_room: closes an idle connection; returns whether one is closing.
    tls: the TLS context of all connections.
    handshake_s: the limit of a TLS handshake in seconds.
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
        self.tls, self._handshake_s = tls, None if tls is None else handshake_s
        self._num_held = 0  # connections, including those being opened
        self._num_failed_handshakes = 0
        self._is_closed = False
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[object]] = set()
        self._shares.set(0)
        for one in listeners.sockets:
            self._loop.add_reader(one, self._accept, one)

    def release(self) -> None:
        """Note that a connection has ended."""
        self._count(-1)

    def close(self) -> None:
        """Accept no more connections. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for one in self._listeners.sockets:
            self._loop.remove_reader(one)
        self._listeners.close()
        self._shares.clear()

    def _accept(self, listener: socket.socket) -> None:
        if self._shares.is_ahead:
            self._pause(listener, _YIELD_S)
            return
        self._accept_some(listener)

    def _accept_some(self, listener: socket.socket) -> None:
        for _ in range(_MAX_AT_ONCE):
            if self._num_held >= self._most:
                if not _has_pending(listener):
                    return  # taken by another front
                if self._make_room():
                    self._pause(listener, _YIELD_S)
                else:
                    self._pause_after_failure(
                        listener, "the limit of connections is reached, and none is idle"
                    )
                return
            try:
                connection, address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return  # taken by another front, or closed by the peer
            except OSError as error:
                if error.errno not in _NO_RESOURCES:
                    raise
                self._pause_after_failure(listener, str(error))
                return
            connection.setblocking(False)
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opening = self._loop.connect_accepted_socket(
                self._new_protocol,
                connection,
                ssl=self.tls,
                ssl_handshake_timeout=self._handshake_s,
            )
            task: asyncio.Task[object] = self._loop.create_task(opening)
            self._count(1)
            self._tasks.add(task)
            peer = address[0] if isinstance(address, tuple) else "a Unix socket"
            task.add_done_callback(partial(self._opened, peer))

    def _opened(self, peer: str, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            self.release()
        elif (error := task.exception()) is not None:
            self.release()  # the connection was not opened
            if isinstance(error, ssl.SSLError):
                self._note_failed_handshake(peer, error)

    def _note_failed_handshake(self, peer: str, error: ssl.SSLError) -> None:
        """Log the first, second, fourth, … one, as any client can cause very many."""
        self._num_failed_handshakes += 1
        num = self._num_failed_handshakes
        if num & (num - 1):
            return
        is_http = error.reason == "HTTP_REQUEST"
        why = "HTTP without TLS; use https://" if is_http else error.reason or error
        times = "1 time" if num == 1 else f"{num} times"
        _logger.warning("no TLS connection with %s: %s (%s)", peer, why, times)

    def _count(self, num: int) -> None:
        self._num_held += num
        if not self._is_closed:
            self._shares.set(self._num_held)

    def _pause_after_failure(self, listener: socket.socket, why: str) -> None:
        _logger.error("no connection is accepted for %g s: %s", _PAUSE_S, why)
        self._pause(listener, _PAUSE_S)

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(seconds, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if not self._is_closed:
            self._loop.add_reader(listener, self._accept, listener)
            self._accept_some(listener)  # uneven or not
