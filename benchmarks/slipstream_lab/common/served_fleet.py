"""Several replicas and their HTTP fronts as a context manager, with the interface of a `Stack`.

- A process of replica I is named `replica-I: NAME`, as the fleet's supervisor tells of it, and
  `replica-I` is the process that supervises it.
- A process that dies with its replica is missing from then on, though nothing tells of its end.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from slipstream.client.client import Client
from slipstream.client.endpoints import http_address_in
from slipstream.errors import SlipstreamError
from slipstream.stack.children.line_pipe import LineReader
from slipstream.stack.plan.front_plan import is_front
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessStarted,
    SpareReady,
    StackEvent,
    StackFailed,
    StackReady,
)
from slipstream.stack.supervisor_process import StackError
from slipstream_ipc.messages import Fault
from slipstream_ipc.process import die_with_parent
from slipstream_lab.common.fleet_process import FleetConfig

_START_S = 120.0
_END_S = 30.0
_OF_REPLICA = ": "


class ServedFleet:
    """Running replicas at their addresses. Used from one thread, which is the one that starts it.

    model, settings: as of a `Stack`. Raises: BadRequestError for wrong settings; SlipstreamError
    where the fleet does not become ready.
    """

    def __init__(self, model: str, num_replicas: int, **settings: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="slipstream-fleet-")
        self.runtime_dir = Path(self._folder.name) / "run"
        sockets = [self.runtime_dir / f"replica-{at}" / "client.sock" for at in range(num_replicas)]
        self.address = ",".join([f"ipc://{socket}" for socket in sockets])
        self.http_address: str | None = None
        self._pids: dict[str, int] = {}
        self._unread: deque[StackEvent] = deque()
        given = {"spare_core": False, **settings, "model": model}
        settings_from(given)
        config = FleetConfig(given, num_replicas, str(self.runtime_dir))
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream_lab.common.fleet_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            preexec_fn=partial(die_with_parent, os.getpid()),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._events = LineReader(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        try:
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.close()
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process ids by name, the supervisor's among them; spares are not included."""
        self._read_events()
        return {"supervisor": self._process.pid, **self._pids}

    @property
    def is_running(self) -> bool:
        """Whether the fleet's supervisor runs."""
        return self._process.poll() is None

    def next_event(self, timeout_s: float) -> StackEvent | None:
        """Wait for the next event; None after `timeout_s`, or once the fleet has ended."""
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                self._read_events()
                if self._unread:
                    return self._unread.popleft()
                left_s = max(0.0, deadline - time.monotonic())
                if self._events.has_ended() or not selector.select(left_s):
                    return None

    def client(self) -> Client:
        """A new client of all replicas; close it when done with it."""
        return Client(self.address)

    def stop(self) -> None:
        """End the fleet. Idempotent."""
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._events.close()
        self._folder.cleanup()

    def __enter__(self) -> ServedFleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        spares: list[StackEvent] = []  # of replicas that were ready before the others
        while event := self.next_event(max(0.0, deadline - time.monotonic())):
            match event:
                case SpareReady():
                    spares.append(event)
                case StackReady():
                    self._unread.extendleft(reversed(spares))
                    return
                case StackFailed():
                    raise StackError(event.error)
        raise SlipstreamError(Fault("engine", f"the fleet was not ready after {_START_S:g} s"))

    def _read_events(self) -> None:
        for line in self._events.read():
            event: StackEvent = msgspec.json.decode(line, type=StackEvent)
            self._unread.append(event)
            match event:
                case ProcessStarted():
                    self._pids[event.name] = event.pid
                case ProcessReady() if is_front(event.name):
                    self.http_address = http_address_in(event.detail)
                case ProcessEnded():
                    for name in names_within(event.name, self._pids):
                        del self._pids[name]


def names_within(name: str, names: Iterable[str]) -> list[str]:
    """Of `names`, this one, and those of the processes of a replica of this name."""
    return [each for each in names if each == name or each.startswith(name + _OF_REPLICA)]


def own_name(name: str) -> str:
    """A process's name within its stack."""
    return name.rpartition(_OF_REPLICA)[2]


def replica_of(name: str) -> str:
    """The replica that a process of this name belongs to; empty for one of none."""
    return name.rpartition(_OF_REPLICA)[0]
