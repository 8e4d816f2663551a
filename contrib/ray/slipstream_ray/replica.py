"""A replica: a stack, and what it says of itself, in the process of a Ray actor.

- Its ranks on other machines are started before the stack, which waits for them (`RankHost`).
- Its calls take and give bytes (see `actor_messages`) and raise none of our errors: Ray pickles.
- When the stack ends by itself, so does the process: Ray starts the actor again, and it another
  stack, at another address under the same name.
- When the process is killed, the stack ends with it.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq
from msgspec.structs import replace

from slipstream.client.connection.cluster import Cluster
from slipstream.errors import SlipstreamError
from slipstream.stack.settings import StackSettings
from slipstream.stack.stack import Stack
from slipstream_ipc.messages import Load
from slipstream_ipc.transport.addresses import TCP
from slipstream_ipc.transport.poller import Poller
from slipstream_ray.actor_messages import (
    FleetSpec,
    ReplicaReport,
    ScaleGoal,
    decoded,
    encoded,
)

LOWEST_PORT = 20_000  # above the ports of Ray's workers
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # which the kernel gives to connections
_DEFAULT_END = 32_768
_ATTACH_S = 10.0
_CRASHED = 1  # exit code


class RayReplica:
    """Starts a stack that clients reach at `host`, and answers for it."""

    def __init__(
        self,
        spec: bytes,
        name: str,
        host: str,
        end: Callable[[int], object] = os._exit,
        start_ranks: Callable[[StackSettings], object] = lambda _: None,
    ) -> None:
        """spec: a FleetSpec. name: the replica's, which it keeps when it is started again. end:
        ends the process. start_ranks: starts those of the other machines of these settings, and
        returns what keeps them.
        """
        self._end = end
        self._goal: ScaleGoal | None = None
        self._is_draining = False
        self._stack: Stack | None = None
        self._load: LoadReader | None = None
        self._address = self._error = ""
        try:
            settings = at_host(decoded(spec, FleetSpec).settings, host)
            self._ranks = start_ranks(settings)
            self._stack = Stack(verbose=True, replica=name, **msgspec.structs.asdict(settings))
        except (SlipstreamError, msgspec.MsgspecError, OSError) as error:
            self._error = " ".join(str(error).split()) or type(error).__name__
            return
        assert settings.listen is not None
        self._address = settings.listen
        self._load = LoadReader(self._stack.address)
        self._stack.when_ended(self._on_end)

    def report(self) -> bytes:
        """A ReplicaReport."""
        load = None
        has_ended = self._stack is not None and not self._stack.is_running
        if has_ended:
            self.close()  # removes what it has left
        elif self._load is not None:
            load = self._load.read()
        return encoded(
            ReplicaReport(
                self._address, self._error, self._is_draining, has_ended, load, self._goal
            )
        )

    def remember(self, goal: bytes) -> None:
        """Keep a ScaleGoal for the report."""
        self._goal = decoded(goal, ScaleGoal)

    def drain(self) -> None:
        """Let the stack take nothing new, and end. Idempotent."""
        if not self._is_draining and self._stack is not None:
            self._is_draining = True
            with suppress(ProcessLookupError):
                os.kill(self._stack.pids["supervisor"], signal.SIGTERM)

    def close(self) -> None:
        """End the stack at once. Idempotent."""
        if self._stack is not None:
            self._stack.stop()
        if self._load is not None:
            self._load.close()
            self._load = None

    def _on_end(self) -> None:
        if not self._is_draining:
            self._end(_CRASHED)


class LoadReader:
    """A client of the stack that hears its load. It takes turns when it is read."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        now = time.monotonic()
        self._cluster = Cluster(self._context, address, _ATTACH_S, Poller(), now, is_fleet=True)

    def read(self) -> Load | None:
        """The last load that the stack has reported; None before the first report."""
        self._cluster.turn(time.monotonic())
        [status] = self._cluster.statuses()
        return status.load

    def close(self) -> None:
        """Close its sockets. To be called: where a context is collected together with its sockets,
        it may wait for them for ever.
        """
        self._cluster.close()
        self._context.destroy(linger=0)


def at_host(settings: StackSettings, host: str) -> StackSettings:
    """The settings of a replica that clients, and ranks of other machines, reach at this host."""
    num = settings.output_workers
    is_spread = settings.nnodes > 1
    listen = listen_address(host, num + is_spread)
    placed = replace(settings, listen=listen)
    if not is_spread:
        return placed
    master_port = int(listen.rpartition(":")[2]) + num
    return replace(placed, master_addr=host, master_port=master_port)


def listen_address(host: str, num_ports: int) -> str:
    """A tcp:// address with a port that is free, and so are the next ones; at random, so that
    replicas which start at once do not choose the same.

    The port may be taken before it is used: then the start fails, and another one succeeds.
    """
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _DEFAULT_END
    num = max(end, LOWEST_PORT + 1000) - LOWEST_PORT - num_ports
    while True:
        first = LOWEST_PORT + secrets.randbelow(num)
        if all(_is_free(host, port) for port in range(first, first + num_ports)):
            return f"{TCP}[{host}]:{first}" if ":" in host else f"{TCP}{host}:{first}"


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as candidate:
        try:
            candidate.bind((host, port))
        except OSError:
            return False
    return True
