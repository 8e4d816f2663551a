"""A stack as a context manager: starts a supervisor process, reads its events and stops it.

- The constructor returns a stack that is ready, or raises and leaves nothing behind.
- The stack ends with `stop`, when the `with` block exits, when the object is garbage collected, or
  with this process, however that ends.
- Ctrl-C in the terminal reaches this process only.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Unpack

from slipstream.client.async_client import AsyncClient
from slipstream.client.client import Client
from slipstream.client.endpoints import http_address_in
from slipstream.stack.plan.front_plan import is_front
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.runtime_dir import new_runtime_dir
from slipstream.stack.settings import StackOptions, settings_from
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessStarted,
    StackEvent,
    StackFailed,
    StackReady,
)
from slipstream.stack.supervisor_process import StackError, SupervisorProcess
from slipstream.tracing.part_files import checked_trace, discard_parts
from slipstream.tracing.parts import merge_parts

_MAX_UNREAD = 1000  # events; older ones are dropped


class StackArguments(StackOptions, total=False):
    """The keyword arguments of `Stack`, without the model."""

    runtime_dir: str | os.PathLike[str] | None
    start_timeout_s: float
    verbose: bool
    replica: str


class Stack:
    """A running stack of server processes, at its own address.

    model: a local folder, a hub id, `simulated:OPTION=VALUE,...` or `random:NAME`; None is the
        bundled demo model.
    runtime_dir: the folder of the stack's sockets; None makes a new one and removes it at the end.
    start_timeout_s: how long the start, which loads the model, may take in seconds.
    verbose: log at INFO to standard error instead of WARNING. The environment variable
        SLIPSTREAM_LOG_LEVEL overrides it.
    replica: the stack's name among the replicas of a fleet, by which clients know it again at
        another address; empty: it is known by its address.
    settings: see `StackSettings`; `http_port=0` starts an HTTP front, at `http_address`.

    Raises: BadRequestError (a ValueError) for an unknown option or an invalid value; StackError
    where the stack does not become ready.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 600.0,
        verbose: bool = False,
        replica: str = "",
        **settings: Unpack[StackOptions],
    ) -> None:
        checked = settings_from({**settings, "model": None if model is None else os.fspath(model)})
        folder = new_runtime_dir() if runtime_dir is None else Path(runtime_dir).absolute()
        config = plan_stack(
            checked,
            folder,
            parent_pid=os.getpid(),
            may_return=runtime_dir is not None,
            replica=replica,
        )
        self._trace = checked_trace(checked.trace)
        if self._trace is not None:
            discard_parts(self._trace)
        self.address = config.address
        self.http_address: str | None = None  # start of a URL, or unix:PATH; None without a front
        self._pids: dict[str, int] = {}
        self._unread: deque[StackEvent] = deque(maxlen=_MAX_UNREAD)
        self._lock = threading.Lock()  # guards http_address, _pids, _unread and reading events
        self._supervisor = SupervisorProcess(
            config,
            removes_folder=runtime_dir is None,
            log_format=checked.log_format,
            verbose=verbose,
            at_end=partial(_merge, self._trace),
        )
        try:
            self._wait_until_ready(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the stack by name, including the supervisor's.

        A process that has died is missing until its successor starts. Spares are not included.
        """
        with self._lock:
            self._read_events()
            return {"supervisor": self._supervisor.pid, **self._pids}

    def events(self) -> list[StackEvent]:
        """The events of the stack since the last call, oldest first; at most the last 1,000."""
        with self._lock:
            self._read_events()
            events = list(self._unread)
            self._unread.clear()
            return events

    def next_event(self, timeout_s: float) -> StackEvent | None:
        """Wait for the next event; None after `timeout_s`, or once the stack has ended."""
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._read_events()
                if self._unread:
                    return self._unread.popleft()
                if self._supervisor.has_told_all:
                    return None
            if not self._supervisor.wait_for_events(max(0.0, deadline - time.monotonic())):
                return None

    @property
    def is_running(self) -> bool:
        """True while the stack runs: False once it was stopped or has failed."""
        return self._supervisor.is_running

    def client(self) -> Client:
        """A new client of this stack; close it when done with it."""
        return Client(self.address, trace=self._trace)

    def async_client(self) -> AsyncClient:
        """A new asyncio client of this stack; close it when done with it."""
        return AsyncClient(self.address, trace=self._trace)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, from a new thread, when the stack has ended for any reason."""
        self._supervisor.when_ended(callback)

    def stop(self) -> None:
        """Stop the stack. Idempotent.

        Its processes have 3 s to end and are killed then; this waits up to 10 s more for the kernel
        to end them.
        """
        self._supervisor.stop()

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        ready = []
        while event := self.next_event(max(0.0, deadline - time.monotonic())):
            match event:
                case ProcessReady():
                    ready.append(event.name)
                case StackReady():
                    return
                case StackFailed():
                    raise StackError(event.error)
        if self._supervisor.has_told_all:
            raise self._supervisor.ended_error()
        raise StackError(
            f"the stack was not ready after start_timeout_s={timeout_s:g} "
            f"(ready processes: {', '.join(ready) or 'none'})"
        )

    def _read_events(self) -> None:
        for event in self._supervisor.events():
            self._unread.append(event)
            match event:
                case ProcessStarted():
                    self._pids[event.name] = event.pid
                case ProcessReady() if is_front(event.name):
                    self.http_address = http_address_in(event.detail)
                case ProcessEnded():
                    self._pids.pop(event.name, None)


def _merge(trace: str | None) -> None:
    if trace is not None:
        merge_parts(trace)
