"""A whole stack as a context manager: started, watched and ended from Python.

Owns: the supervisor's process, and the pipe that ties its life to ours. Does not know: which
processes a stack has (`plan`), how they are kept (`supervisor`).

Rules:
- The constructor returns a stack that is ready, or raises and leaves nothing behind.
- The stack ends with `stop`, with the `with` block, with the object, or with this process,
  whichever is first and however it ends.
- Ctrl-C in the terminal reaches this process alone.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from slipstream.async_client import AsyncClient
from slipstream.client import Client
from slipstream.endpoints import http_address_in
from slipstream.errors import SlipstreamError
from slipstream.events import Event, ProcessReady, StackFailed, StackReady, SupervisorConfig
from slipstream.lines import LineReader
from slipstream.plan import FRONT, plan_stack
from slipstream.settings import settings_from
from slipstream_ipc.messages import Fault

LOG_LEVEL_VARIABLE = "SLIPSTREAM_LOG_LEVEL"
_STOP_S = 4.5  # the supervisor takes at most 4


class StackError(SlipstreamError):
    """A stack could not be started, with the reason that its processes gave."""

    def __init__(self, message: str) -> None:
        super().__init__(Fault("engine", message))


class Stack:
    """A running stack of its own, with an address of its own.

    model: a local folder, a hub id, `simulated:OPTION=VALUE,...`; None is the bundled demo model.
    runtime_dir: where its sockets lie; None makes a fresh folder and removes it at the end.
    start_timeout_s: how long loading the model may take.
    verbose: let the processes log what they do to standard error, not only what goes wrong. The
    environment variable SLIPSTREAM_LOG_LEVEL overrides it.
    settings: see `StackSettings`; `http_port=0` starts an HTTP front, at `http_address`.

    Raises: BadRequestError (a ValueError) for an unknown option or a value out of range; StackError
    where the stack does not become ready.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        runtime_dir: str | os.PathLike[str] | None = None,
        start_timeout_s: float = 600.0,
        verbose: bool = False,
        **settings: Any,
    ) -> None:
        checked = settings_from({**settings, "model": None if model is None else os.fspath(model)})
        folder = _fresh_folder() if runtime_dir is None else Path(runtime_dir).absolute()
        config = plan_stack(checked, folder, parent_pid=os.getpid())
        level = os.environ.get(LOG_LEVEL_VARIABLE, "INFO" if verbose else "WARNING")
        self.address = config.address
        self.http_address: str | None = None  # as the start of a URL; None without a front
        self._pids: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "slipstream.supervisor"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, LOG_LEVEL_VARIABLE: level},
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._events = LineReader(os.dup(self._process.stdout.fileno()))
        self._process.stdout.close()
        to_remove = folder if runtime_dir is None else None
        self._finalizer = weakref.finalize(
            self, _end, self._process, self._events, to_remove, os.getpid()
        )
        try:
            self._send(config)
            self._wait_until_ready(start_timeout_s)
        except BaseException:
            self.stop()
            raise

    @property
    def pids(self) -> dict[str, int]:
        """The process ids of the stack by name, the supervisor's among them."""
        for event in self._new_events():
            self._note(event)
        return {"supervisor": self._process.pid, **self._pids}

    @property
    def is_running(self) -> bool:
        """Whether the stack has neither been stopped nor failed."""
        return self._process.poll() is None

    def client(self) -> Client:
        """A new client of this stack; close it when done with it."""
        return Client(self.address)

    def async_client(self) -> AsyncClient:
        """A new asyncio client of this stack; close it when done with it."""
        return AsyncClient(self.address)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call back, from a thread of its own, once the stack has ended, for whatever reason."""

        def wait(process: subprocess.Popen[bytes]) -> None:
            process.wait()
            callback()

        # it holds the process, not us: a stack that is forgotten ends all the same
        name = "slipstream-stack-end"
        threading.Thread(target=wait, args=(self._process,), name=name, daemon=True).start()

    def stop(self) -> None:
        """End the stack, within 5 seconds. Does nothing where that has been done."""
        self._finalizer()

    def __enter__(self) -> Stack:
        return self

    def __exit__(
        self,
        _type: type[BaseException] | None,
        _error: BaseException | None,
        _traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _send(self, config: SupervisorConfig) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(config) + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise StackError(self._how_it_ended()) from error

    def _wait_until_ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            while True:
                for event in self._new_events():
                    self._note(event)
                    match event:
                        case StackReady():
                            return
                        case StackFailed():
                            raise StackError(event.error)
                if self._events.has_ended():
                    raise StackError(self._how_it_ended())
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    ready = ", ".join(self._pids) or "none"
                    raise StackError(
                        f"the stack was not ready after start_timeout_s={timeout_s:g} "
                        f"(ready processes: {ready})"
                    )

    def _note(self, event: Event) -> None:
        if isinstance(event, ProcessReady):
            self._pids[event.name] = event.pid
            if event.name == FRONT:
                self.http_address = http_address_in(event.detail)

    def _new_events(self) -> list[Event]:
        return [msgspec.json.decode(line, type=Event) for line in self._events.read()]

    def _how_it_ended(self) -> str:
        return f"the supervisor ended with code {self._process.wait()}; standard error has more"


def _fresh_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"slipstream-{secrets.token_hex(6)}"


def _end(
    process: subprocess.Popen[bytes], events: LineReader, folder: Path | None, owner: int
) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that the stack belongs to
    assert process.stdin is not None
    try:
        process.stdin.close()  # the supervisor's sign to stop
        process.wait(_STOP_S)
    except (subprocess.TimeoutExpired, BrokenPipeError):
        pass
    finally:
        process.kill()  # its children die with it
        process.wait()
        events.close()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)
