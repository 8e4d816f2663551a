"""One child process of a stack: starting it, sending it commands, reading its status, reaping it.

This is the parent's half of the contract in `slipstream_ipc.process`.

- A child is started from the main thread (the parent-death signal is bound to the forking thread)
  and has that signal set before its first line of Python runs: no child outlives its parent,
  however early the parent dies.
- A child leads its own process group, so a terminal's Ctrl-C reaches only the supervisor, and the
  processes that a child started are gone when the child is reaped.
- A child's standard output goes to our standard error, so our standard output stays ours.
- The parent never blocks on a child that does not read. Commands are kept until they fit into the
  pipe; statistics are dropped unless the child has read everything before, as later ones supersede
  them.
- Unreadable status lines are logged with the child's name, and have no other effect.
- Whether a child caused its own end is determined, not guessed. It did where it died of a fatal
  signal, exited with a code other than 0, hung while it used CPU time and was not stopped, or died
  of SIGKILL and the kernel has counted an out-of-memory kill in our cgroup since its last
  heartbeat. Any other end came from outside, and is charged to no request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import msgspec

from slipstream.stack.children.child_status import status_of
from slipstream.stack.children.fork_client import ForkClient, ForkRefusedError
from slipstream.stack.children.line_pipe import LineReader, LineWriter
from slipstream.stack.children.listeners import LISTENERS_VARIABLE, Listeners
from slipstream.stack.children.process_usage import (
    cpu_wait_s,
    is_stopped,
    num_oom_kills,
    num_oom_kills_lately,
    usage_of,
)
from slipstream_ipc.child import ChildProcess, execute, fork, pipe
from slipstream_ipc.fork_server import ENVIRONMENT
from slipstream_ipc.messages import OwnProcess
from slipstream_ipc.process import (
    CONTROL_FD_VARIABLE,
    NAME_VARIABLE,
    PARENT_PID_VARIABLE,
    STATUS_FD_VARIABLE,
    VERSION_VARIABLE,
    Activate,
    ChildCommand,
    Condition,
    CoreEnded,
    Drain,
    Reload,
    die_with_parent,
    installed_version,
)
from slipstream_ipc.run_delay import RunDelay
from slipstream_ipc.telemetry.statistics import CoreNumbers, Numbers

_STANDARD_ERROR = 2
_VERSION = installed_version()  # when this process began; another may be installed later
# signals that a process causes itself; others are sent to it
_FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
# of the time in which it was not kept waiting for a CPU (decision 012)
_BUSY_CPU_SHARE = 0.1
_LEAST_CPU_SHARE = 0.02  # of all time: with less than that, a loop that does not hang may be silent
_logger = logging.getLogger(__name__)


class ChildSpec(msgspec.Struct, frozen=True):
    """The process to start: `argv`, with `config` (JSON) on its standard input.

    has_spare: a spare waits to replace it. drains: it serves users' requests, and reports when
    none is left. receives_condition: it is sent the condition and statistics of the stack.
    forks: its module, where it may run in a fork: its `main` is what `argv` would run. preloads: a
    fork server is to import it; else only a process that has imported it already forks.
    front_index: the number of a child that accepts connections from the supervisor's sockets, among
    such children; None for others.
    """

    name: str
    argv: tuple[str, ...]
    config: msgspec.Raw
    has_spare: bool = False
    drains: bool = False
    receives_condition: bool = False
    forks: str | None = None
    front_index: int | None = None
    preloads: bool = False


class ChildExit(msgspec.Struct, frozen=True):
    """The end of a child. is_own_fault: the child caused it itself."""

    how: str
    is_own_fault: bool


class Child:
    """A child process, from its start until it is reaped.

    State: starting -> ready -> gone, or starting -> gone.
    """

    def __init__(
        self,
        spec: ChildSpec,
        listeners: Listeners | None = None,
        fork_server: ForkClient | None = None,
    ) -> None:
        """listeners: inherited by a child with a front index. Raises: OSError."""
        listening: dict[str, str] = {}
        inherited: tuple[int, ...] = ()
        if listeners is not None and spec.front_index is not None:
            listening[LISTENERS_VARIABLE] = listeners.for_child(spec.front_index)
            inherited = listeners.fds
        self.name = spec.name
        self.state: Literal["starting", "ready", "gone"] = "starting"
        self.is_active = False  # whether it was activated; a spare is not
        self.is_drained = not spec.drains
        self.num_running: int | None = None  # requests, when it was told to drain
        self.wants_statistics = False  # and has not got them yet
        self.num_cut = 0  # of them, what the drain's end cut off
        self.detail = ""
        self.error = ""  # why it cannot serve, for the user
        self.is_misconfigured = False  # the configuration is at fault
        self.started_at = time.monotonic()
        self.available_at: float | None = None  # since when it serves, or waits as a spare
        self.last_beat_at: float | None = None  # its last heartbeat; None while none is expected
        self.numbers: Numbers | None = None  # as last reported
        self.processes: dict[str, OwnProcess] = {}  # that it runs itself, as last reported
        self._condition: Condition | None = None  # as last sent to it
        self._has_beats = False  # it sends heartbeats, or will once it is ready
        self._num_bad_lines = 0
        self._last_words = ""
        self._kill_reason = ""
        self._is_kill_own_fault = False  # whether it caused the reason it was killed for
        # at `measure_cpu`: time, CPU time, and time spent waiting for a CPU
        self._cpu_start: tuple[float, float, float] | None = None
        self._run_delay = RunDelay()  # since that moment
        self._num_oom_kills = num_oom_kills()  # at its last heartbeat
        self._process, pipes = _started(spec, fork_server, listening, inherited)
        self.status = LineReader(pipes.status)
        self._commands = LineWriter(pipes.control)
        with contextlib.suppress(BrokenPipeError), os.fdopen(pipes.stdin, "wb") as stdin:
            stdin.write(bytes(spec.config))  # the death of a child is noticed by its exit

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._process.pid

    def activate(self, activation: Activate) -> None:
        """Tell it to serve."""
        self.is_active = True
        self.available_at = None
        self._send(activation)

    @property
    def has_news(self) -> bool:
        """True if the supervisor reads the child's beats at once: they report a load, or child
        processes.
        """
        # lines of the others wait for the turns that these cause (decision 014)
        return isinstance(self.numbers, CoreNumbers) or bool(self.processes and self.is_active)

    def drain(self, within_s: float) -> None:
        """Tell it to take no new requests, and to end those that still run after `within_s`."""
        self._send(Drain(within_s))

    def reload(self) -> None:
        """Tell it to read keys and certificates anew."""
        self._send(Reload())

    def tell_core_ended(
        self, *, died_within: bool, suspects: tuple[bytes, ...] | None = None
    ) -> None:
        """Tell a worker that its core has ended. suspects: see `CoreEnded`."""
        self._send(CoreEnded(died_within, suspects))

    def send_condition(self, condition: Condition) -> None:
        """Send it the condition of the stack if that has changed."""
        if condition != self._condition:
            self._condition = condition
            self._send(condition)

    def offer(self, line: bytes) -> None:
        """Send it an encoded command if it has read everything before; else drop the command."""
        self._commands.offer(line)

    def read_status(self) -> None:
        """Read and apply its status lines."""
        for line in self.status.read():
            status, why_bad = status_of(line)
            if why_bad:
                self._note_bad_line(why_bad)
            if status is None:
                continue
            if status.error and not self.error:
                self.error, self.is_misconfigured = status.error, status.is_misconfigured
            self.detail = status.detail or self.detail
            self._last_words = status.last_words or self._last_words
            self.is_drained = self.is_drained or status.drained
            self.num_cut = self.num_cut or status.num_cut
            if status.num_running is not None:
                self.num_running = status.num_running
            self.numbers = status.numbers or self.numbers
            self.wants_statistics |= status.wants_statistics
            if status.beat:
                self.last_beat_at = time.monotonic()
                self._cpu_start = None
                self._num_oom_kills = num_oom_kills_lately(self.last_beat_at)
                self.processes = status.processes
                if not self.is_active:
                    self.available_at = self.available_at or self.last_beat_at
            elif status.loading:
                self.last_beat_at = None
            self._has_beats = self._has_beats or status.beat or status.loading
            if status.ready and not self.is_active:
                self.error = self.error or "it reported ready before it was activated"
            elif status.ready and self.state == "starting":
                self.state = "ready"
                self.available_at = time.monotonic()
                if self._has_beats:  # so that a hang in its first turn is noticed
                    self.last_beat_at = self.available_at

    def _note_bad_line(self, why: str) -> None:
        """Log the first, second, fourth, … bad line, as there may be very many."""
        self._num_bad_lines += 1
        num = self._num_bad_lines
        if num & (num - 1) == 0:
            _logger.error("%s (process %d) reported %s (%d times)", self.name, self.pid, why, num)

    def has_ended(self) -> bool:
        """True if the process has ended. It stays a zombie until `reap`, so its pid is not
        reused.
        """
        return self._process.ended() is not None

    @property
    def handles_sigterm(self) -> bool:
        """True if the child is active and its loop runs, so that it handles SIGTERM at once."""
        return self.is_active and (self.state == "ready" or self.last_beat_at is not None)

    def terminate(self) -> None:
        """Ask it to stop, by SIGTERM."""
        self._process.terminate()

    @property
    def is_cpu_measured(self) -> bool:
        """True if `measure_cpu` was called since the last heartbeat."""
        return self._cpu_start is not None

    def measure_cpu(self, now: float) -> None:
        """Start measuring the CPU time of a silent child, for `is_busy` and `hangs_at`."""
        use = usage_of(self.pid, with_children=False)
        self._cpu_start = now, 0.0 if use is None else use.cpu_s, cpu_wait_s(self.pid)
        self._run_delay.begin(self.pid)

    def hangs_at(self, timeout_s: float) -> float:
        """The time at which a silent child counts as hung: `timeout_s` after its last heartbeat,
        and as much later as its loop has lacked a CPU since `measure_cpu`.
        """
        assert self.last_beat_at is not None
        return self.last_beat_at + timeout_s + self._run_delay.lacked_s()

    def is_busy(self, now: float) -> bool:
        """True if the child has used the CPU time that was available since `measure_cpu`, and is
        not stopped.
        """
        use = usage_of(self.pid, with_children=False)
        if self._cpu_start is None or use is None or is_stopped(self.pid):
            return False
        since, cpu_s, wait_s = self._cpu_start
        elapsed_s, used_s = now - since, use.cpu_s - cpu_s
        free_s = elapsed_s - max(0.0, cpu_wait_s(self.pid) - wait_s)
        return elapsed_s > 0 and used_s >= max(
            _LEAST_CPU_SHARE * elapsed_s, _BUSY_CPU_SHARE * free_s
        )

    def kill(self, reason: str = "", *, is_own_fault: bool = False) -> None:
        """SIGKILL its process group. is_own_fault: whether it caused the reason itself."""
        if reason and not self._kill_reason:
            self._kill_reason, self._is_kill_own_fault = reason, is_own_fault
        self._process.kill()

    def reap(self) -> ChildExit:
        """Reap it after its end, kill the rest of its process group, and return how it ended."""
        code = self._process.reap()
        self.status.close()
        self._commands.close()
        self.state = "gone"
        if self._kill_reason:
            return ChildExit(self._kill_reason, is_own_fault=self._is_kill_own_fault)
        if code == -signal.SIGKILL and num_oom_kills() > self._num_oom_kills:
            return ChildExit("signal SIGKILL, the kernel's: out of memory", is_own_fault=True)
        if code < 0:
            return ChildExit(f"signal {_signal_name(-code)}", is_own_fault=-code in _FATAL)
        words = f" ({self._last_words})" if self._last_words else ""
        return ChildExit(f"exit code {code}{words}", is_own_fault=code != 0)

    def _send(self, command: ChildCommand) -> None:
        """Send a command, now or when the pipe has room. Never fails: a dead or hung child is
        noticed otherwise.
        """
        self._commands.write(msgspec.json.encode(command))


# starts it with an environment, its standard input, and descriptors to inherit
_Way = Callable[[dict[str, str], int, tuple[int, ...]], ChildProcess | None]


class _Pipes(NamedTuple):
    """Our ends of a child's pipes."""

    status: int
    control: int
    stdin: int


def _started(
    spec: ChildSpec,
    fork_server: ForkClient | None,
    listening: Mapping[str, str],
    inherited: tuple[int, ...],
) -> tuple[ChildProcess, _Pipes]:
    """The child as a fork, of this process or of the server, or as a program where there can be
    none. Raises: OSError.

    Each has pipes of its own: a server that fails late may have forked, and the fork, whose pipes
    have no other end any more, finds no config and ends.
    """
    module = spec.forks
    way: _Way | None = None
    if module is not None and not spec.preloads and module in sys.modules:
        way, fork_server = partial(_fork_here, module), None
    elif module is not None and fork_server is not None:
        way = partial(_fork, fork_server, module)
    try:
        if way is not None and (started := _with_pipes(spec, listening, inherited, way)):
            return started
    except OSError as error:
        _logger.warning("%s is not forked but started anew: %s", spec.name, error)
        if fork_server is not None and not isinstance(error, ForkRefusedError):
            fork_server.kill()  # what it says next might be an answer to this
    started = _with_pipes(spec, listening, inherited, partial(_execute, spec.argv))
    assert started is not None
    return started


def _fork_here(
    module: str, environment: dict[str, str], stdin: int, passed: tuple[int, ...]
) -> ChildProcess:
    main: Callable[[], int] = sys.modules[module].main
    descriptors = {0: stdin, 1: _STANDARD_ERROR, **{fd: fd for fd in passed}}
    defaults = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
    return fork(main, descriptors, {**defaults, **environment}, leads_group=True)


def _fork(
    server: ForkClient,
    module: str,
    environment: dict[str, str],
    stdin: int,
    passed: tuple[int, ...],
) -> ChildProcess | None:
    return server.fork(module, environment, {0: stdin, **{fd: fd for fd in passed}})


def _execute(
    command: Sequence[str], environment: dict[str, str], stdin: int, passed: tuple[int, ...]
) -> ChildProcess:
    return execute(
        command,
        {**ENVIRONMENT, **os.environ, **environment},
        stdin=stdin,
        descriptors=passed,
        leads="group",
        before=partial(die_with_parent, os.getpid()),
    )


def _with_pipes(
    spec: ChildSpec,
    listening: Mapping[str, str],
    inherited: tuple[int, ...],
    start: _Way,
) -> tuple[ChildProcess, _Pipes] | None:
    """Call `start` with new pipes; return its result and our ends of them, or None if it returns
    None.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        status_fd, status_end = pipe(ours, theirs)
        control_end, control_fd = pipe(theirs, ours)
        stdin_end, stdin_fd = pipe(theirs, ours)
        environment = {
            STATUS_FD_VARIABLE: str(status_end),
            CONTROL_FD_VARIABLE: str(control_end),
            PARENT_PID_VARIABLE: str(os.getpid()),
            VERSION_VARIABLE: _VERSION,
            NAME_VARIABLE: spec.name,
            **listening,
        }
        process = start(environment, stdin_end, (status_end, control_end, *inherited))
        if process is None:
            return None
        ours.pop_all()
        return process, _Pipes(status_fd, control_fd, stdin_fd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)
