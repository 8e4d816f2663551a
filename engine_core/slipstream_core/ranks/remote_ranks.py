"""The core's end of the ranks on other machines: waits for them, sends them plans, watches them.

They connect to the address that the core binds once it is activated: a ROUTER over TCP, with CURVE
keys. Ranks may come before the core does, and in any order; those of a dead core end, and their
successors wait for the next one.

- Plans are sent in the order of steps, each as the bytes that ranks on this machine read. A rank
  says what it has computed; none is sent more than NUM_SLOTS plans ahead.
- A rank is lost when its connection ends, or is silent for `silent_s`. `on_end` is then told of an
  end by SIGKILL, as of a rank that was killed here, or of the failure that the rank has reported.
- One rank's place is taken by one process; another one is to try again, as the first may be lost
  and not known to be. Ranks of another version, model or number of ranks are refused for good.
- The socket is used under a lock, as several threads read it: the engine's, that of connections
  that end, and one that looks once in a while, for those that are to be refused.
"""

from __future__ import annotations

import contextlib
import logging
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import zmq

from slipstream_core.config import CoreConfig
from slipstream_core.load_error import RanksMissingError
from slipstream_core.model.fingerprint import fingerprint_of_files
from slipstream_core.ranks.bus import NUM_SLOTS, BusStalledError
from slipstream_core.ranks.rank_messages import (
    PLAN_NUMBER,
    Assign,
    FromRank,
    Join,
    Joined,
    RankFailed,
    Refuse,
    Released,
    ToRank,
    decode_from_rank,
    encode,
)
from slipstream_core.ranks.watch import RankEnd
from slipstream_ipc.messages import Status
from slipstream_ipc.process import installed_version
from slipstream_ipc.telemetry.recent_warnings import RecentWarnings
from slipstream_ipc.transport.addresses import host_of
from slipstream_ipc.transport.connections import Connections, inode_of, raise_file_limit
from slipstream_ipc.transport.curve import load_server_keys
from slipstream_ipc.transport.sockets import MAX_READ_AT_ONCE, Listener, bind_tcp_router

logger = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 16
_LOOK_S = 1.0  # between two looks at what nothing waits for
_CLOSING_S = 5.0  # from when a connection has ended until its descriptor is closed
_LOOK_CLOSED_S = 0.001  # between two looks whether it is
_WAIT_S = 0.05  # at most, until what has come is looked at
_FETCH = "with nnodes every machine needs them before it starts (`hf download MODEL`)"
_NUM_LAST_READS = 64  # at most, for the last words of a rank behind what others send


class RemoteRank:
    """A place among the ranks of other machines, and the process that has it.

    route, fd, inode: of its connection; the descriptor is -1 while there is none. num_released:
    plans that it has computed.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.route = b""
        self.fd = -1
        self.inode: int | None = None
        self.pid = 0
        self.has_joined = False
        self.is_lost = False  # and with it this core
        self.num_released = 0
        self.failed: RankFailed | None = None

    @property
    def has_descriptor(self) -> bool:
        """True if its descriptor is still that of its connection."""
        return self.inode is not None and inode_of(self.fd) == self.inode


class RemoteRanks:
    """The ranks of a core that are on other machines."""

    def __init__(self, config: CoreConfig, on_end: Callable[[RankEnd], None]) -> None:
        """on_end: called in another thread when one of them is lost. It binds nothing yet."""
        assert config.nodes is not None
        self._config = config
        self._nodes = config.nodes
        self._on_end = on_end
        first, size = config.num_local_ranks, config.tensor_parallel_size
        self._ranks = [RemoteRank(index) for index in range(first, size)]
        self._lock = threading.Lock()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._fingerprint = b""
        self._refused = ""  # why a rank was refused last
        self._refusals = RecentWarnings(logger)
        self._ignored: set[str] = set()  # what was ignored so far
        self._is_read = True  # whether the last look left nothing unread
        self._is_assigned = False
        self._is_closed = threading.Event()
        self._look: threading.Thread | None = None
        self._num_sent = 0

    def listen(self) -> str:
        """Bind the address; its host. Raises RanksMissingError."""
        nodes = self._nodes
        self._fingerprint = fingerprint_of_files(self._config.model)
        if not self._fingerprint:  # no rank could show that it has them
            why = f"its files are not on this machine; {_FETCH}"
            raise RanksMissingError(self._config.model, why)
        connections = Connections(raise_file_limit(), self._on_closed)
        try:
            keys = None
            if nodes.keys is not None:
                keys = load_server_keys(Path(nodes.keys), for_ranks=True)
            self._socket = bind_tcp_router(
                self._context,
                Listener(nodes.address, keys, nodes.insecure),
                max_message_bytes=_MAX_MESSAGE_BYTES,
                connections=connections,
                silent_s=nodes.silent_s,
            )
        except (ValueError, OSError, zmq.ZMQError) as error:
            why = f"cannot listen at {nodes.address} for ranks on other machines: {error}"
            raise RanksMissingError(self._config.model, why) from error
        self._connections = connections
        self._look = threading.Thread(target=self._look_around, name="remote-ranks", daemon=True)
        self._look.start()
        return host_of(nodes.address)

    def gather(self, settled: CoreConfig, meeting: tuple[str, int]) -> None:
        """Wait until all of them have come, and have them load. settled: the core's settings as
        they hold; meeting: where the group meets.

        Raises RanksMissingError where they do not come within `join_timeout_s`.
        """
        logger.info("waiting for %s at %s", self._missing(), self._nodes.address)
        end = time.monotonic() + self._nodes.join_timeout_s
        self._wait_until(lambda: all(rank.fd >= 0 for rank in self._ranks), end)
        with self._lock:
            self._is_assigned = True
            for rank in self._ranks:
                if not self._send(rank.route, Assign(settled, meeting)):
                    self._lose(rank)
        self._wait_until(lambda: all(rank.has_joined for rank in self._ranks), end)
        logger.info("all ranks have come")

    def put(self, plan: memoryview, *, timeout_s: float) -> None:
        """Send a plan to all of them. Raises BusStalledError where one of them has not computed
        earlier ones within `timeout_s`.
        """
        number = PLAN_NUMBER.pack(self._num_sent)
        if not self._has_room():
            self._wait_for_room(timeout_s)
        with self._lock:
            assert self._socket is not None
            for rank in self._ranks:
                with contextlib.suppress(zmq.ZMQError):  # it is lost, which is told elsewhere
                    self._socket.send_multipart((rank.route, number, plan), zmq.NOBLOCK)
        self._num_sent += 1

    def close(self) -> None:
        """End the connections, and so the ranks. Idempotent."""
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        if self._look is not None:
            self._look.join()
        with self._lock:
            if self._socket is not None:
                self._socket.close(linger=0)
        self._context.term()

    # ---- waiting ---------------------------------------------------------------------------

    def _wait_until(self, is_so: Callable[[], bool], end: float) -> None:
        """Raises RanksMissingError."""
        while not is_so():
            if time.monotonic() > end:
                nodes = self._nodes
                within = f"within {nodes.join_timeout_s:g} s (join_timeout_s)"
                why = f"{self._missing()} did not come to {nodes.address} {within}"
                if self._refused:
                    why += f"; the last that was refused: {self._refused}"
                raise RanksMissingError(self._config.model, why)
            self._wait_for_input()

    def _has_room(self) -> bool:
        return self._num_sent - min(rank.num_released for rank in self._ranks) < NUM_SLOTS

    def _wait_for_room(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        with self._lock:
            self._read()
        while not self._has_room():
            if time.monotonic() > end:
                raise BusStalledError(f"a rank has released no plan for {timeout_s:g} s")
            self._wait_for_input()

    def _wait_for_input(self) -> None:
        assert self._socket is not None
        # without the lock; another thread may have read what it would tell of, hence the timeout
        select.select([self._socket.fileno()], [], [], _WAIT_S if self._is_read else 0)
        with self._lock:
            self._read()

    def _look_around(self) -> None:
        while not self._is_closed.wait(_LOOK_S):
            with self._lock:
                self._read()

    # ---- reading, under the lock -----------------------------------------------------------

    def _read(self) -> None:
        """Handle what has come; of a flood a part."""
        for route, fd, body in self._received():
            rank = next((each for each in self._ranks if each.route == route), None)
            match body:
                case Join():
                    self._join(body, route, fd)
                case _ if rank is None:
                    self._ignore("a rank that has not joined")
                case Joined():
                    rank.has_joined = True
                case Released(num):
                    rank.num_released = num
                case RankFailed():
                    rank.failed = body

    def _received(self) -> Iterator[tuple[bytes, int, FromRank]]:
        socket = self._socket
        self._is_read = socket is None
        for _ in range(MAX_READ_AT_ONCE):
            if socket is None or not int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                self._is_read = True
                return
            route = socket.recv(zmq.NOBLOCK)
            part = socket.recv(zmq.NOBLOCK, copy=False)
            if part.more:
                socket.recv_multipart(zmq.NOBLOCK)
                self._ignore("a message of several parts")
                continue
            try:
                body = decode_from_rank(part.bytes)
            except (msgspec.DecodeError, ValueError, RecursionError) as error:
                self._ignore("a message that is none of a rank", str(error))
                continue
            yield route, int(part.get(zmq.SRCFD)), body

    def _ignore(self, what: str, why: str = "") -> None:
        """Log it, the first time."""
        if what not in self._ignored:
            self._ignored.add(what)
            logger.warning("ignoring %s%s", what, f": {why}" if why else "")

    def _join(self, join: Join, route: bytes, fd: int) -> None:
        why = self._refusal(join)
        if why:
            self._refuse(join, route, Refuse(why))
            return
        rank = self._ranks[join.index - self._ranks[0].index]
        if rank.is_lost:
            return  # this core ends, and the next one will hear of it
        if rank.fd >= 0:
            why = f"process {rank.pid} is rank {join.index}, as far as is known"
            self._refuse(join, route, Refuse(why, is_final=False))
            return
        self._connections.heard(fd)
        rank.route, rank.fd, rank.pid = route, fd, join.pid
        rank.inode = inode_of(fd)

    def _refuse(self, join: Join, route: bytes, refuse: Refuse) -> None:
        self._refused = f"rank {join.index} (process {join.pid}): {refuse.why}"
        self._refusals.warn("refused %s", self._refused)
        self._send(route, refuse)

    def _refusal(self, join: Join) -> str:
        """The reason why a rank can have no place; empty if it can."""
        config, version = self._config, installed_version()
        if join.version != version:
            return f"its version is {join.version or 'unknown'}, the core's {version or 'unknown'}"
        own = config.tensor_parallel_size, config.num_nodes
        if (join.size, join.num_nodes) != own:
            return (
                f"it is one of {join.size} ranks on {join.num_nodes} machines, the core of "
                f"{own[0]} on {own[1]} (tensor_parallel_size, nnodes)"
            )
        if not self._ranks[0].index <= join.index < config.tensor_parallel_size:
            return f"rank {join.index} is not on another machine"
        if not join.fingerprint:
            return f"the files of its model are not on its machine; {_FETCH}"
        if join.fingerprint != self._fingerprint:
            return "the files of its model are not those of the core's"
        return ""

    def _send(self, route: bytes, body: ToRank) -> bool:
        """Send to a rank; return False if it is away or has no room."""
        assert self._socket is not None
        try:
            self._socket.send_multipart((route, encode(body)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    # ---- ends ------------------------------------------------------------------------------

    def _on_closed(self, fd: int) -> None:
        """A connection has ended; called in the thread that watches connections.

        It is told before the descriptor is closed, and handled perhaps after a rank has got the
        same one.
        """
        for _ in range(_NUM_LAST_READS):
            with self._lock:
                if self._is_closed.is_set():
                    return
                self._read()  # a rank's last words, or the Join of one that has ended since
                rank = next((each for each in self._ranks if each.fd == fd), None)
                if self._is_read or (rank is not None and rank.failed is not None):
                    break
        if rank is None:
            return
        end = time.monotonic() + _CLOSING_S
        while rank.has_descriptor and time.monotonic() < end:
            self._is_closed.wait(_LOOK_CLOSED_S)
        with self._lock:
            if rank.fd == fd and not rank.has_descriptor and not self._is_closed.is_set():
                self._lose(rank)

    def _lose(self, rank: RemoteRank) -> None:
        if not self._is_assigned:  # the next one may have its place
            logger.warning("rank %d (process %d) has gone again", rank.index, rank.pid)
            rank.fd, rank.route = -1, b""
            return
        if rank.is_lost:
            return
        rank.is_lost = True
        failed = rank.failed
        if failed is None:
            words = f"the connection to rank {rank.index} is lost"
            end = RankEnd(rank.index, rank.pid, -signal.SIGKILL, Status(last_words=words))
        else:
            status = Status(
                last_words=failed.words,
                error=failed.error,
                is_misconfigured=failed.is_misconfigured,
            )
            end = RankEnd(rank.index, rank.pid, 1, status)
        threading.Thread(target=self._on_end, args=(end,), daemon=True).start()

    def _missing(self) -> str:
        missing = [
            str(rank.index)
            for rank in self._ranks
            if rank.fd < 0 or (self._is_assigned and not rank.has_joined)
        ]
        return f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}"
