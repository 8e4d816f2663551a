"""How many connections an accepting socket holds open.

Every connection takes a file descriptor, and libzmq ends the process that has none left when a
client connects over ipc://. So the descriptors of a process are counted before a socket is bound,
and connections take no more than it can spare: `Connections` hears of each one from the socket's
monitor, on a thread of its own, and shuts down the oldest that have said nothing yet.

Rules:
- A stranger is a connection that has not said Hello. There are at most `max_strangers` of them
  besides those over ipc://, which come from this user's processes and are shut down last.
- A connection that has said Hello is never shut down. Where they alone reach `max_connections`,
  newcomers are shut down at once.
- libzmq tells of a connection's end before it closes the descriptor. A descriptor is judged by what
  was told of it once all that was told has been read, and its inode has to be the same still: so
  what is shut down is the connection that was accepted, and not what came after it.
- The monitor's queue is short. Where this thread is late, libzmq's waits for it before it accepts
  more, so at most MAX_UNSEEN connections are open that are not counted yet.
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

import zmq

HANDSHAKE_S = 10.0  # a connection that is not through with its handshake by then is closed

MAX_UNSEEN = 1002  # the queue: libzmq's own 1,000 and our 1; one that waits to get in
_OWN_FILES = 64  # that a process may open after it is bound
_MAX_STRANGERS = 1024
_LOW_LIMIT = 4096
_TOLD = struct.Struct("=HI")  # of a monitor's first frame: the event, its value
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

logger = logging.getLogger(__name__)


def raise_file_limit() -> int:
    """Let this process have as many files open as it may ask for; how many these are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # not everywhere as many as the limit says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else 2**31 - 1


def num_spare_files(limit: int) -> int:
    """Descriptors that connections may take in a process that may have `limit` of them open."""
    num_open = len(os.listdir("/proc/self/fd"))
    left = max(0, limit - num_open - _OWN_FILES)
    return max(1, left - min(MAX_UNSEEN, left // 2))


class ConnectionTable:
    """The open connections of a socket, by descriptor: which of them are to be shut down. Pure."""

    def __init__(self, max_connections: int, max_strangers: int) -> None:
        """Both at least 1."""
        self._max_connections = max_connections
        self._max_strangers = max_strangers
        self._known: set[int] = set()  # said Hello
        self._remote: dict[int, int] = {}  # strangers over tcp://, oldest first, and their inodes
        self._local: dict[int, int] = {}  # … over ipc://

    def __len__(self) -> int:
        return len(self._known) + len(self._remote) + len(self._local)

    def accepted(self, fd: int, inode: int, *, is_local: bool) -> None:
        """A new one. What had the descriptor before is gone."""
        self.closed(fd)
        (self._local if is_local else self._remote)[fd] = inode

    def closed(self, fd: int) -> None:
        """It is no more. Idempotent."""
        self._known.discard(fd)
        self._remote.pop(fd, None)
        self._local.pop(fd, None)

    def heard(self, fd: int) -> None:
        """It said Hello."""
        if fd in self._remote or fd in self._local:
            self.closed(fd)
            self._known.add(fd)

    def take_surplus(self) -> list[tuple[int, int]]:
        """Those to be shut down, with their inodes; they are forgotten here."""
        surplus = []
        while len(self._remote) > self._max_strangers or len(self) > self._max_connections:
            strangers = self._remote or self._local
            if not strangers:
                break
            fd = next(iter(strangers))
            surplus.append((fd, strangers.pop(fd)))
        return surplus


class Connections:
    """Bounds the connections of one accepting socket."""

    def __init__(self, limit: int) -> None:
        """`limit`: descriptors that this process may have."""
        most = num_spare_files(limit)
        self._table = ConnectionTable(most, min(_MAX_STRANGERS, -(-most // 2)))
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
        """Begin, before the socket is bound, on a thread that ends with it or with the context."""
        # a shadow: `context.destroy` closes the sockets it made, and this one is another thread's
        shadow: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context)
        events = shadow.socket(zmq.PAIR)
        events.setsockopt(zmq.LINGER, 0)
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
        """A connection has said Hello. To be called by the thread that reads the socket."""
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
                except Exception:  # where nobody reads, libzmq's thread waits for ever
                    logger.exception("a connection could not be looked at")

    def _read(self, events: zmq.Socket[bytes]) -> bool:
        """Wait for something, then take in all there is; False: the socket is closed."""
        told, address = events.recv_multipart()
        while True:
            event, fd = _TOLD.unpack(told)
            if event == zmq.EVENT_MONITOR_STOPPED:
                return False
            inode = _inode(fd) if event == zmq.EVENT_ACCEPTED else None
            if inode is None:
                self._table.closed(fd)
            else:
                self._table.accepted(fd, inode, is_local=address.startswith(b"ipc:"))
            heard = self._heard.copy()  # that they were accepted has been told by now
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
            if _inode(fd) == inode:
                _shut_down(fd)
        if surplus:
            before = self.num_shut_down
            self.num_shut_down += len(surplus)
            if self.num_shut_down.bit_length() > before.bit_length():  # there may be very many
                logger.warning(
                    "too many connections: %d that had said nothing were shut down so far",
                    self.num_shut_down,
                )


def _inode(fd: int) -> int | None:
    try:
        return os.fstat(fd).st_ino
    except OSError:
        return None  # closed by now


def _shut_down(fd: int) -> None:
    """End a connection; its descriptor stays libzmq's to close."""
    with contextlib.suppress(OSError):
        connection = socket.socket(fileno=fd)
        try:
            connection.shutdown(socket.SHUT_RDWR)
        finally:
            connection.detach()
