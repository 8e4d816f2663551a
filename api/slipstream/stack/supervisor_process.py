"""A supervisor as a child process: tells its events, and ends with the process that started it.

- It ends with `stop`, when the object is garbage collected, or with this process, however that
  ends.
- Ctrl-C in the terminal reaches this process only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from slipstream.errors import SlipstreamError
from slipstream.stack.children.fork_client import ForkClient
from slipstream.stack.children.line_pipe import LineReader
from slipstream.stack.runtime_dir import remove_leftovers
from slipstream.stack.supervisor_events import StackEvent, SupervisorConfig
from slipstream_ipc.child import ChildProcess, execute, module_command, pipe
from slipstream_ipc.messages import Fault
from slipstream_ipc.telemetry.logs import LOG_FORMAT_VARIABLE, LOG_LEVEL_VARIABLE

SUPERVISOR_MODULE = "slipstream.stack.supervisor"
_END_S = 14.0  # the supervisor takes at most 13
_STANDARD_ERROR = 2


class StackError(SlipstreamError):
    """A stack could not be started, or has ended; the message has the reason its processes gave."""

    def __init__(self, message: str) -> None:
        super().__init__(Fault("engine", message))


class SupervisorProcess:
    """Starts a supervisor of `config`, and does not wait until it is ready.

    removes_folder: remove its runtime directory at the end. verbose: log at INFO to standard error
    instead of WARNING; the environment variable SLIPSTREAM_LOG_LEVEL overrides it. at_end: called
    when it has been stopped.

    Raises: StackError where it ends before it has taken its config.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        removes_folder: bool,
        log_format: str,
        verbose: bool = False,
        at_end: Callable[[], object] = lambda: None,
    ) -> None:
        level = os.environ.get(LOG_LEVEL_VARIABLE) or ("INFO" if verbose else "WARNING")
        environment = {**os.environ, LOG_LEVEL_VARIABLE: level, LOG_FORMAT_VARIABLE: log_format}
        self._process, self._stdin, stdout = start_supervisor(environment)
        self._events = LineReader(stdout)
        self._finalizer = weakref.finalize(
            self,
            _stop,
            self._process,
            self._stdin,
            self._events,
            Path(config.runtime_dir),
            removes_folder,
            os.getpid(),
            at_end,
        )
        try:
            self._send(config)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """True while the process runs: False once it was stopped or has failed."""
        return self._process.ended() is None

    @property
    def has_told_all(self) -> bool:
        """True if no further event will come."""
        return self._events.has_ended()

    def events(self) -> list[StackEvent]:
        """The events that have come since the last call. For one thread at a time."""
        return [msgspec.json.decode(line, type=StackEvent) for line in self._events.read()]

    def wait_for_events(self, timeout_s: float | None) -> bool:
        """Wait until there may be news, its end among them. Returns whether there are."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._events, selectors.EVENT_READ)
            return bool(selector.select(timeout_s))

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end. Returns the exit code. Raises: subprocess.TimeoutExpired."""
        return self._process.wait(timeout_s)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Call `callback` once, from a new thread, when it has ended for any reason."""

        def wait(process: ChildProcess) -> None:
            process.wait()
            callback()

        # the thread refers to the process, not to `self`, so that a dropped one still ends
        name = "slipstream-stack-end"
        threading.Thread(target=wait, args=(self._process,), name=name, daemon=True).start()

    def ended_error(self) -> StackError:
        """The error for an end that no event has explained. Waits for that end."""
        code = self._process.wait()
        return StackError(f"the supervisor ended with code {code}; standard error has more")

    def stop(self) -> None:
        """Stop it and its children. Idempotent.

        These have 3 s to end and are killed then; this waits up to 10 s more for the kernel to end
        them.
        """
        self._finalizer()

    def _send(self, config: SupervisorConfig) -> None:
        try:
            self._stdin.write(msgspec.json.encode(config) + b"\n")
            self._stdin.flush()
        except BrokenPipeError as error:
            raise self.ended_error() from error


class StartedSupervisor(NamedTuple):
    """A supervisor, what writes to its standard input, and what reads its standard output."""

    process: ChildProcess
    stdin: IO[bytes]
    stdout_fd: int

    def discard(self) -> None:
        """End it, before it has a config."""
        self.stdin.close()
        os.close(self.stdout_fd)
        self.process.reap()


def start_supervisor(
    environment: Mapping[str, str], before: Callable[[], object] | None = None
) -> StartedSupervisor:
    """A supervisor with this environment, in a session of its own. before: see `execute`. Raises:
    OSError.
    """

    def start(stdin: int, stdout: int) -> ChildProcess:
        command = module_command(SUPERVISOR_MODULE)
        return execute(
            command, environment, stdin=stdin, stdout=stdout, leads="session", before=before
        )

    started = _with_pipes(start)
    assert started is not None
    return started


def fork_supervisor(zygote: ForkClient, environment: Mapping[str, str]) -> StartedSupervisor | None:
    """A supervisor with this environment, in a session of its own, as a fork of what `zygote` has
    imported; None where that is not a supervisor. Raises: OSError, as `ForkClient.fork` does.
    """

    def start(stdin: int, stdout: int) -> ChildProcess | None:
        streams = {0: stdin, 1: stdout, 2: _STANDARD_ERROR}
        return zygote.fork(
            SUPERVISOR_MODULE, environment, streams, is_whole=True, leads_session=True
        )

    return _with_pipes(start)


def _with_pipes(start: Callable[[int, int], ChildProcess | None]) -> StartedSupervisor | None:
    """The supervisor that `start` starts with a standard input and output; None where it starts
    none.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        stdin, stdin_end = pipe(theirs, ours)
        stdout_end, stdout = pipe(ours, theirs)
        if (process := start(stdin, stdout)) is None:
            return None
        ours.pop_all()
        return StartedSupervisor(process, os.fdopen(stdin_end, "wb"), stdout_end)


def _stop(
    process: ChildProcess,
    stdin: IO[bytes],
    events: LineReader,
    folder: Path,
    removes_folder: bool,
    owner: int,
    at_end: Callable[[], object],
) -> None:
    if os.getpid() != owner:
        return  # in a fork of the process that owns the supervisor
    try:
        with contextlib.suppress(BrokenPipeError):
            stdin.close()  # tells the supervisor to stop
        process.reap(_END_S)  # where it is killed, its children die with it: see `Child`
    finally:
        events.close()
        if removes_folder:
            shutil.rmtree(folder, ignore_errors=True)
        elif (process.ended() or 0) < 0:  # killed before it could clean up
            remove_leftovers(folder)
        at_end()
