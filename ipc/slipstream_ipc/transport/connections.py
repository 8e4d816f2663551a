"""Bounds how many connections an accepting socket holds open.

Every connection takes a file descriptor, and libzmq aborts a process that has none left when a
client connects over ipc://. So the free descriptors are counted before a socket is bound, and
connections take no more than the process can spare: `Connections` follows the socket's monitor on a
thread and shuts down the oldest connections that have not sent a Hello.

- At most `max_without_hello` connections over tcp:// may be without a Hello; those over ipc://
  belong to this user's processes and are shut down last.
- A connection that has sent a Hello is never shut down. When these alone reach `max_connections`,
  new connections are shut down at once.
- libzmq reports a connection's end before it closes the descriptor. A descriptor is shut down only
  after all pending events have been read and if its inode is unchanged: so it still is the
  connection that was accepted, and not a later one with the same number.
- The monitor's queue is short. When this thread falls behind, libzmq's thread waits for it before
  accepting more, so at most MAX_UNSEEN open connections are not counted yet.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import secrets
import socket
import struct
import threading
from collections.abc import Callable

import zmq

HANDSHAKE_S = 10.0  # libzmq closes a connection whose handshake takes longer

MAX_UNSEEN = 1002  # libzmq's queue of 1,000, ours of 1, and one event waiting to be queued
_OWN_FILES = 64  # descriptors that a process may open after its socket is bound
_MAX_WITHOUT_HELLO = 1024
_LOW_LIMIT = 4096
_MONITOR_FRAME = struct.Struct("=HI")  # a monitor's first frame: the event and its value
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

MAX_LOCAL_CONNECTIONS = 4096

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Raise the soft limit of open files to the hard one; returns the resulting limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow fewer than the hard limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31 - 1


def num_spare_files(limit: int) -> int:
    """Descriptors left for connections in a process that may open `limit`, at least 1."""
    num_open = len(os.listdir("/proc/self/fd"))
    left = max(0, limit - num_open - _OWN_FILES)
    return max(1, left - min(MAX_UNSEEN, left // 2))


class ConnectionTable:
    """The open connections of a socket by descriptor, and which are to be shut down. No I/O."""

    def __init__(self, max_connections: int, max_without_hello: int) -> None:
        """Both are at least 1."""
        self._max_connections = max_connections
        self._max_without_hello = max_without_hello
        self._known: set[int] = set()  # have sent a Hello
        self._remote: dict[int, int] = {}  # over tcp://, without a Hello, oldest first: fd to inode
        self._local: dict[int, int] = {}  # the same over ipc://

    def __len__(self) -> int:
        return len(self._known) + len(self._remote) + len(self._local)

    def accepted(self, fd: int, inode: int, *, is_local: bool) -> None:
        """Add a connection; an earlier one with the same descriptor has been closed."""
        self.closed(fd)
        (self._local if is_local else self._remote)[fd] = inode

    def closed(self, fd: int) -> None:
        """Remove a connection. Idempotent."""
        self._known.discard(fd)
        self._remote.pop(fd, None)
        self._local.pop(fd, None)

    def heard(self, fd: int) -> None:
        """The connection has sent a Hello."""
        if fd in self._remote or fd in self._local:
            self.closed(fd)
            self._known.add(fd)

    def take_surplus(self) -> list[tuple[int, int]]:
        """Remove and return the connections to be shut down, as (descriptor, inode)."""
        surplus = []
        while len(self._remote) > self._max_without_hello or len(self) > self._max_connections:
            silent = self._remote or self._local
            if not silent:
                break
            fd = next(iter(silent))
            surplus.append((fd, silent.pop(fd)))
        return surplus


class Connections:
    """Bounds the connections of one accepting socket."""

    def __init__(self, limit: int, on_closed: Callable[[int], None] | None = None) -> None:
        """`limit`: descriptors that this process may open. on_closed: called in the watching thread
        with the descriptor of a connection that has ended, which another one may have by now.
        """
        self._on_closed = on_closed
        most = num_spare_files(limit)
        self.max_local = min(MAX_LOCAL_CONNECTIONS, most // 2)  # of what is spare
        most = max(1, most - self.max_local)
        self._table = ConnectionTable(most, min(_MAX_WITHOUT_HELLO, -(-most // 2)))
        self._heard: set[int] = set()  # written by the thread that reads the socket
        self.num_shut_down = 0
        if limit < _LOW_LIMIT:
            logger.warning(
                "this process may have %d files open (`ulimit -Hn`), so at most %d connections",
                limit,
                most,
            )

    def watch(
        self, context: zmq.Context[zmq.Socket[bytes]], accepting: zmq.Socket[bytes]
    ) -> threading.Thread:
        """Start the watching thread, before the socket is bound; it ends with socket or context."""
        # a shadow: `context.destroy` closes a context's sockets, and this one is another thread's
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        events = shadow.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
        # a short queue: libzmq waits for this thread before it accepts more (decision 015)
        events.setsockopt(zmq.RCVHWM, 1)
        address = f"inproc://connections-{secrets.token_hex(8)}"
        accepting.monitor(address, _EVENTS)
        events.connect(address)
        thread = threading.Thread(
            target=self._watch, args=(events,), name="slipstream-connections", daemon=True
        )
        thread.start()
        return thread

    def heard(self, fd: int) -> None:
        """A connection has sent a Hello. To be called by the thread that reads the socket."""
        self._heard.add(fd)

    def _watch(self, events: zmq.Socket[bytes]) -> None:
        with events:
            while True:
                try:
                    if not self._read(events):
                        return
                    self._shut_down_surplus()
                except zmq.ContextTerminated:
                    return
                except Exception:  # unless events are read, libzmq's thread waits forever
                    logger.exception("watching the connections failed")

    def _read(self, events: zmq.Socket[bytes]) -> bool:
        """Wait for an event, then process all pending ones; False if the socket is closed."""
        told, address = events.recv_multipart()
        while True:
            event, fd = _MONITOR_FRAME.unpack(told)
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            if event == zmq.EVENT_DISCONNECTED and self._on_closed is not None:
                self._on_closed(fd)
            inode = inode_of(fd) if event == zmq.EVENT_ACCEPTED else None
            if inode is None:
                self._table.closed(fd)
            else:
                self._table.accepted(fd, inode, is_local=address.startswith(b"ipc:"))
            heard = self._heard.copy()  # their ACCEPTED events are read by the end of this loop
            try:
                told, address = events.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
        for fd in heard:
            self._table.heard(fd)
            self._heard.discard(fd)
        return True

    def _shut_down_surplus(self) -> None:
        surplus = self._table.take_surplus()
        for fd, inode in surplus:
            if inode_of(fd) == inode:
                _shut_down(fd)
        if surplus:
            before = self.num_shut_down
            self.num_shut_down += len(surplus)
            if self.num_shut_down.bit_length() > before.bit_length():  # a warning per doubling
                logger.warning(
                    "too many connections: %d that sent no Hello were closed so far",
                    self.num_shut_down,
                )


def inode_of(fd: int) -> int | None:
    """The inode that distinguishes a connection from a later one with the same descriptor; None if
    the descriptor is closed.
    """
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None  # closed by now


def _shut_down(fd: int) -> None:
    """Shut down a connection; libzmq closes its descriptor."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
