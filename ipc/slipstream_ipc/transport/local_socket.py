"""Unix sockets between the processes of one user: connections, and the end that accepts them.

Beside the ZeroMQ socket at `ipc://PATH` a server listens at `PATH.local`. What crosses it is the
same: a message is its length (u32, little-endian) and its bytes. There is no thread between the two
ends, a message is one call on each side, and the death of a process is an end of file on the other.

- Nothing blocks. What the kernel does not take waits in the connection, at most MAX_UNSENT_BYTES
  and one message; beyond that `send` says False, as a full ZeroMQ socket does.
- One `fill` reads CHUNK_BYTES or one large message. A length beyond the limit breaks the
  connection; before a Hello the limit is MAX_STRANGER_BYTES.
- What had arrived before the other end went away is read, also where a send fails first.
- A listener has a bounded number of connections. The oldest one without a Hello makes room; where
  all have sent one, a new connection is closed at once.
- Both ends check that the other belongs to this user.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path

from slipstream_ipc._native import read_messages, send_message
from slipstream_ipc.transport.addresses import IPC, check_socket_folder

MAX_UNSENT_BYTES = 2**20
MAX_STRANGER_BYTES = 2**16
CHUNK_BYTES = 2**14  # as in local_io.c
PREFIX_BYTES = 4  # likewise: a message's length, u32 little-endian

_LARGE_BYTES = 2**16  # from here on, copying a message to put its length in front costs more
_SLACK_BYTES = 2**20  # beyond the codec's limit, so that the codec can say what is wrong
_BACKLOG = 1024
_MAX_EVENTS = 64
_MAX_ACCEPTED = 64  # connections in one turn
_MAX_LAST_READS = 64  # after a send that failed: a kernel's buffer holds less
_SUFFIX = ".local"  # beside ZeroMQ's socket of the same name (decision 008)
_CREDENTIALS = struct.Struct("=iII")  # of a peer: process, user, group
_EPOLLOUT = int(select.EPOLLOUT)  # as a plain number
_READ, _READ_AND_WRITE = int(select.EPOLLIN), int(select.EPOLLIN) | _EPOLLOUT

logger = logging.getLogger(__name__)


class LocalConnection:
    """One end of a connection. `messages` are those that have arrived and are not taken yet."""

    is_socket = True  # `fd` is what to read; otherwise messages arrive by themselves

    def __init__(self, sock: socket.socket, max_message_bytes: int) -> None:
        """`on_write_wish` is called when unsent bytes begin or cease to wait for the kernel."""
        sock.setblocking(False)
        self.fd = sock.fileno()
        self.messages: deque[bytes] = deque()
        self.is_broken = False
        self.on_write_wish: Callable[[LocalConnection], None] | None = None
        self.max_bytes = max_message_bytes + _SLACK_BYTES
        self._socket = sock
        self._append = self.messages.append
        self._rest = b""  # the beginning of a message
        self._large: bytearray | None = None  # the message that is arriving …
        self._num_large = 0  # … and how many bytes of it have
        self._unsent: deque[memoryview] = deque()
        self.num_unsent = 0  # bytes that wait until the kernel takes them

    @property
    def has_unsent(self) -> bool:
        """True if bytes wait until the kernel takes them."""
        return self.num_unsent > 0

    @property
    def is_bare(self) -> bool:
        """True if the next bytes to arrive begin a message and nothing waits here meanwhile."""
        is_whole = not self._rest and self._large is None
        return is_whole and not (self.messages or self.num_unsent or self.is_broken)

    def send(self, message: bytes) -> bool:
        """Send a message, or keep it for `flush`; False if too much waits, or the peer is gone."""
        if self.num_unsent or len(message) >= _LARGE_BYTES:
            return self._send_large(message)
        try:
            num = send_message(self.fd, message)
        except OSError:
            self._fail()
            return False
        if num < len(message) + PREFIX_BYTES:
            data = len(message).to_bytes(PREFIX_BYTES, "little") + message
            self._keep(memoryview(data)[num:])
        return True

    def flush(self) -> None:
        """Send what waits, as far as the kernel takes it."""
        if not self.num_unsent:
            return
        try:
            while self._unsent:
                part = self._unsent[0]
                num = self._socket.send(part)
                self.num_unsent -= num
                if num < len(part):
                    self._unsent[0] = part[num:]
                    return
                self._unsent.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._fail()
        if self.on_write_wish is not None:
            self.on_write_wish(self)

    def fill(self) -> None:
        """Add to `messages` what has arrived, and note an end of file."""
        if self.is_broken:
            return
        if self._large is not None:
            self._fill_large(self._large)
            return
        if self._rest:
            rest, self._rest = self._rest, b""
            self._cut(rest + self._read())
            return
        more = read_messages(self.fd, self._append, self.max_bytes)
        if more:
            self._cut(more)
        elif more is None:
            self.is_broken = True

    def take_in(self, data: bytes) -> bool:
        """Add to `messages` what was read from `fd` elsewhere while the connection `is_bare`; empty
        at the end of file. Returns whether it consists of whole messages.
        """
        if not data:
            self.is_broken = True
            return False
        self._cut(data)
        return not (self._rest or self._large is not None or self.is_broken)

    def close(self) -> None:
        """Close it. What the kernel has taken still arrives."""
        self.is_broken = True
        self.on_write_wish = None
        self.fd = -1  # the number may be another descriptor's from now on
        self._socket.close()

    def _read(self) -> bytes:
        try:
            data = self._socket.recv(CHUNK_BYTES)
        except BlockingIOError:
            return b""
        except OSError:
            data = b""
        self.is_broken = not data
        return data

    def _cut(self, data: bytes) -> None:
        begin, end = PREFIX_BYTES, len(data)
        while begin <= end:
            num_bytes = int.from_bytes(data[begin - PREFIX_BYTES : begin], "little")
            if num_bytes > self.max_bytes:
                self.is_broken = True
                return
            if begin + num_bytes > end:
                if num_bytes > CHUNK_BYTES:
                    self._large = bytearray(num_bytes)
                    self._num_large = end - begin
                    self._large[: self._num_large] = data[begin:]
                    self._fill_large(self._large)
                    return
                break
            self.messages.append(data[begin : begin + num_bytes])
            begin += num_bytes + PREFIX_BYTES
        self._rest = data[begin - PREFIX_BYTES :]

    def _fill_large(self, message: bytearray) -> None:
        with memoryview(message) as view:
            while self._num_large < len(message):
                try:
                    num = self._socket.recv_into(view[self._num_large :])
                except BlockingIOError:
                    return
                except OSError:
                    num = 0
                if not num:
                    self.is_broken = True
                    return
                self._num_large += num
        self._large = None
        self.messages.append(bytes(message))

    def _send_large(self, message: bytes) -> bool:
        """Send a message that is large, or behind others that wait."""
        prefix = len(message).to_bytes(PREFIX_BYTES, "little")
        num = 0
        if self.num_unsent:
            if self.num_unsent >= MAX_UNSENT_BYTES:
                return False
        else:
            try:
                num = self._socket.sendmsg((prefix, message))
            except BlockingIOError:
                pass
            except OSError:
                self._fail()
                return False
        if num < PREFIX_BYTES:
            self._keep(memoryview(prefix)[num:])
        num_sent = max(0, num - PREFIX_BYTES)
        if num_sent < len(message):
            self._keep(memoryview(message)[num_sent:])
        return True

    def _fail(self) -> None:
        """The peer is gone: nothing more is sent, and what it had sent before is read."""
        self._unsent.clear()
        self.num_unsent = 0
        for _ in range(_MAX_LAST_READS):
            if self.is_broken:
                return
            self.fill()
        self.is_broken = True

    def _keep(self, part: memoryview) -> None:
        is_first = not self.num_unsent
        self._unsent.append(part)
        self.num_unsent += len(part)
        if is_first and self.on_write_wish is not None:
            self.on_write_wish(self)


def connect_local(address: str, max_message_bytes: int) -> LocalConnection | None:
    """A connection to the server at an ipc:// address; None where there is none to be had now."""
    try:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    except OSError:  # this process has no descriptor left
        return None
    try:
        sock.connect(_path_of(address))
        if _is_own(sock):
            return LocalConnection(sock, max_message_bytes)
    except OSError:  # no server, or too many clients at once
        pass
    sock.close()
    return None


class LocalListener:
    """Accepts connections and reads them. `fd` is readable when `ready` has something to do."""

    def __init__(self, address: str, *, max_message_bytes: int, max_connections: int) -> None:
        """Listen beside the ipc:// address, in the place of a predecessor.

        Raises: PermissionError if other users may enter the folder; OSError.
        """
        check_socket_folder(address)
        self._path = Path(_path_of(address))
        self._max_message_bytes = max_message_bytes
        self._max_connections = max_connections
        self._connections: dict[int, LocalConnection] = {}  # by descriptor
        self._strangers: dict[int, LocalConnection] = {}  # those without a Hello, oldest first
        self.unread: deque[LocalConnection] = deque()  # what `ready` returns
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()
        self._other_fd = -1  # see `watch`
        self.is_other_ready = False
        self.num_refused = 0  # closed to make room, or because there was none
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            self._path.unlink(missing_ok=True)
            self._listener.bind(str(self._path))
            self._inode = self._path.stat().st_ino
            self._listener.listen(_BACKLOG)
        except OSError:
            self._listener.close()
            self._epoll.close()
            raise
        self._epoll.register(self._listener, _READ)

    def __len__(self) -> int:
        return len(self._connections)

    def ready(self) -> deque[LocalConnection]:
        """Connections with messages to take, or broken ones; the caller removes them from it."""
        self.is_other_ready = False
        for fd, event in self._epoll.poll(0, _MAX_EVENTS):
            connection = self._connections.get(fd)
            if connection is None:
                if fd == self._other_fd:
                    self.is_other_ready = True
                elif fd == self._listener.fileno():
                    self._accept()
                continue
            if event & _EPOLLOUT:
                connection.flush()
            if event & ~_EPOLLOUT or connection.is_broken:
                if not connection.messages:  # else more than one turn's are waiting
                    connection.fill()
                self.read_later(connection)
        return self.unread

    def watch(self, fd: int) -> None:
        """Have `fd` and `is_other_ready` report another descriptor too, a ROUTER's."""
        self._other_fd = fd
        self._epoll.register(fd, _READ)

    def read_later(self, connection: LocalConnection) -> None:
        """Have `ready` return this connection, of which messages are left."""
        if connection not in self.unread:
            self.unread.append(connection)

    def heard(self, connection: LocalConnection) -> None:
        """The connection has sent a Hello."""
        if self._strangers.pop(connection.fd, None) is not None:
            connection.max_bytes = self._max_message_bytes + _SLACK_BYTES

    def drop(self, connection: LocalConnection) -> None:
        """Close a connection. Idempotent."""
        if self._connections.get(connection.fd) is not connection:
            return
        del self._connections[connection.fd]
        self._strangers.pop(connection.fd, None)
        connection.close()  # which takes it out of the epoll

    def beat(self) -> None:
        """Accept again after a time without free descriptors. To be called periodically."""
        with contextlib.suppress(FileExistsError):
            self._epoll.register(self._listener, _READ)

    def close(self) -> None:
        """Close all connections and end listening."""
        for connection in list(self._connections.values()):
            connection.flush()
            self.drop(connection)
        self._epoll.close()
        self._listener.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:  # else a successor's
                self._path.unlink()

    def _accept(self) -> None:
        for _ in range(_MAX_ACCEPTED):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._epoll.unregister(self._listener)  # it would stay readable: until `beat`
                return
            if not _is_own(sock) or not self._make_room():
                sock.close()
                continue
            connection = LocalConnection(sock, self._max_message_bytes)
            connection.max_bytes = MAX_STRANGER_BYTES
            connection.on_write_wish = self._watch
            self._connections[connection.fd] = self._strangers[connection.fd] = connection
            self._epoll.register(connection.fd, _READ)

    def _make_room(self) -> bool:
        """Return True if one more connection may come, after closing the oldest without a Hello if
        needed.
        """
        if len(self._connections) < self._max_connections:
            return True
        self.num_refused += 1
        if self.num_refused.bit_count() == 1:  # a warning per doubling
            logger.warning("too many local connections: %d were closed so far", self.num_refused)
        oldest = next(iter(self._strangers.values()), None)
        if oldest is None:
            return False
        self.drop(oldest)
        return True

    def _watch(self, connection: LocalConnection) -> None:
        self._epoll.modify(connection.fd, _READ_AND_WRITE if connection.has_unsent else _READ)


def listen_local(
    address: str, *, max_message_bytes: int, max_connections: int
) -> LocalListener | None:
    """A listener beside an ipc:// address, or None where there can be none, which is logged."""
    try:
        return LocalListener(
            address, max_message_bytes=max_message_bytes, max_connections=max_connections
        )
    except FileNotFoundError:  # the folder: binding the address itself says so
        return None
    except OSError as error:
        logger.warning("local clients are served by ZeroMQ alone: %s", error)
        return None


def _path_of(address: str) -> str:
    return address.removeprefix(IPC) + _SUFFIX


def _is_own(sock: socket.socket) -> bool:
    """True if the other end belongs to this user."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    except OSError:
        return False
    return bool(_CREDENTIALS.unpack(raw)[1] == os.getuid())
