"""One child process of a stack: how it is started, what it is told, what it says, how it ends.

Owns: the parent's half of the contract in `slipstream_ipc.process`. Does not know: what the
processes do, which others there are, or what follows from an end.

Rules:
- A child is started from the main thread (the parent-death signal is bound to the thread that
  forks) and has that signal before its first line of Python runs: no child outlives its parent,
  however early the parent dies.
- A child leads a process group of its own, so a terminal's Ctrl-C reaches the supervisor alone,
  and whatever a child started itself is gone when the child is reaped.
- A child's standard output is our standard error: our own standard output stays ours.
- A parent never waits for a child to read. What a child must hear is kept until there is room for
  it; statistics are offered only to who has read everything before, and the next ones say more.
- What a child says that cannot be read is a line in the log, which names the child, and no more.
- Where a child's end comes from is known, not guessed: a fatal signal or an exit code of its own is
  from within; so is a hang in which it used processor time without being stopped, and a SIGKILL
  since whose last beat the kernel has counted a process of ours killed for want of memory.
  Everything else is from outside, and charged to no request.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Literal

import msgspec

from slipstream.stack.children.child_status import status_of
from slipstream.stack.children.line_pipe import LineReader, LineWriter
from slipstream.stack.children.listeners import LISTENERS_VARIABLE, Listeners
from slipstream.stack.children.process_usage import is_stopped, num_oom_kills, usage_of
from slipstream_ipc.messages import State
from slipstream_ipc.process import (
    CONTROL_FD_VARIABLE,
    PARENT_PID_VARIABLE,
    STATUS_FD_VARIABLE,
    Activate,
    Command,
    Condition,
    Drain,
)
from slipstream_ipc.telemetry.statistics import Numbers

_PR_SET_PDEATHSIG = 1
_STANDARD_ERROR = 2
# what a process gets for its own doing; anything else somebody sends
_FATAL = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
_IS_BUSY = 0.1  # of a processor; one that spins gets as much on a machine ten times overloaded
_libc = ctypes.CDLL(None)
_logger = logging.getLogger(__name__)


class ChildSpec(msgspec.Struct, frozen=True):
    """What to start: `argv`, fed with `config` (JSON) on its standard input.

    has_spare: another one waits beside it, to take its place. drains: it holds what users wait for,
    and says when nothing of that is left. hears_condition: it tells others how the stack is.
    place: of a child that takes connections from sockets that are the supervisor's, among those who
    do.
    """

    name: str
    argv: tuple[str, ...]
    config: msgspec.Raw
    has_spare: bool = False
    drains: bool = False
    hears_condition: bool = False
    place: int | None = None

    @property
    def listens(self) -> bool:
        """Whether it takes connections."""
        return self.place is not None


class ChildExit(msgspec.Struct, frozen=True):
    """How a child ended. within: of what it did itself, not of what somebody did to it."""

    how: str
    within: bool


class Child:
    """A child process, from its start to its last breath.

    starting -> ready -> gone, or straight to gone.
    """

    def __init__(self, spec: ChildSpec, listeners: Listeners | None = None) -> None:
        """listeners: for a child that listens."""
        listening: dict[str, str] = {}
        inherited: tuple[int, ...] = ()
        if listeners is not None and spec.place is not None:
            listening[LISTENERS_VARIABLE] = listeners.handed_down(spec.place)
            inherited = listeners.fds
        self.name = spec.name
        self.state: Literal["starting", "ready", "gone"] = "starting"
        self.is_active = False  # it was told to serve; else it is a spare
        self.is_drained = not spec.drains
        self.detail = ""
        self.error = ""  # why it cannot do what it was told, for the user
        self.started_at = time.monotonic()
        self.settled_at: float | None = None  # since when it serves; or waits, where it is a spare
        self.heard_at: float | None = None  # its last beat; None while none is expected
        self.numbers: Numbers | None = None  # the last that it told
        self.processes: dict[str, State] = {}  # how those are that it keeps itself, as it told
        self._condition: Condition | None = None  # that it was told
        self._has_beats = False  # or will have, when it is ready
        self._num_bad_lines = 0
        self._last_words = ""
        self._killed_for = ""
        self._was_within = False  # of what it was killed for
        self._silence: tuple[float, float] | None = None  # since when it is watched, its CPU time
        self._num_oom_kills = num_oom_kills()  # at its last beat
        with contextlib.ExitStack() as on_error:
            status_fd, status_end = _pipe(on_error)
            control_end, control_fd = _pipe(on_error)
            self._process = subprocess.Popen(
                spec.argv,
                stdin=subprocess.PIPE,
                stdout=_STANDARD_ERROR,
                pass_fds=(status_end, control_end, *inherited),
                env={
                    **os.environ,
                    STATUS_FD_VARIABLE: str(status_end),
                    CONTROL_FD_VARIABLE: str(control_end),
                    PARENT_PID_VARIABLE: str(os.getpid()),
                    **listening,
                },
                process_group=0,
                preexec_fn=_dying_with(os.getpid()),  # safe: the supervisor has one thread
            )
            on_error.pop_all()
        os.close(status_end)
        os.close(control_end)
        self.status = LineReader(status_fd)
        self._commands = LineWriter(control_fd)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(bytes(spec.config))  # a child that is gone already is noticed by its exit

    @property
    def pid(self) -> int:
        """Its process id, and its group's."""
        return self._process.pid

    def activate(self, activation: Activate) -> None:
        """Tell it to serve."""
        self.is_active = True
        self.settled_at = None
        self._tell(activation)

    def drain(self, within_s: float) -> None:
        """Tell it to take in nothing new, and to end what runs then."""
        self._tell(Drain(within_s))

    def tell(self, condition: Condition) -> None:
        """Tell it how everybody is, where that is news."""
        if condition != self._condition:
            self._condition = condition
            self._tell(condition)

    def offer(self, line: bytes) -> None:
        """Tell it what it need not hear: an encoded command, where it has read all before."""
        self._commands.offer(line)

    def read_status(self) -> None:
        """Take in what it said."""
        for line in self.status.read():
            status, why_bad = status_of(line)
            if why_bad:
                self._note_bad_line(why_bad)
            if status is None:
                continue
            self.error = self.error or status.error
            self.detail = status.detail or self.detail
            self._last_words = status.last_words or self._last_words
            self.is_drained = self.is_drained or status.drained
            self.numbers = status.numbers or self.numbers
            if status.beat:
                self.heard_at = time.monotonic()
                self._silence = None
                self._num_oom_kills = num_oom_kills()
                self.processes = status.processes
                if not self.is_active:
                    self.settled_at = self.settled_at or self.heard_at
            elif status.loading:
                self.heard_at = None
            self._has_beats = self._has_beats or status.beat or status.loading
            if status.ready and not self.is_active:
                self.error = self.error or "it serves before it was told to"
            elif status.ready and self.state == "starting":
                self.state = "ready"
                self.settled_at = time.monotonic()
                if self._has_beats:  # it may hang in its very first turn
                    self.heard_at = self.settled_at

    def _note_bad_line(self, why: str) -> None:
        """In the log: the first, the second, the fourth, …, as there may be very many."""
        self._num_bad_lines += 1
        num = self._num_bad_lines
        if num & (num - 1) == 0:
            _logger.error("%s (process %d) reported %s (%d times)", self.name, self.pid, why, num)

    def has_ended(self) -> bool:
        """Whether it has ended; it stays a zombie until `reap`, so its number stays its own."""
        if self.state == "gone":
            return True
        flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, flags) is not None

    @property
    def listens(self) -> bool:
        """Whether it serves, or its loop turns at least: then SIGTERM reaches it at once."""
        return self.is_active and (self.state == "ready" or self.heard_at is not None)

    def terminate(self) -> None:
        """Ask it to stop."""
        if self.state != "gone":
            self._process.send_signal(signal.SIGTERM)

    @property
    def is_watched(self) -> bool:
        """Whether `watch` was called since its last beat."""
        return self._silence is not None

    def watch(self, now: float) -> None:
        """It is silent: what it does from now on tells whether that is its own doing."""
        use = usage_of(self.pid, with_children=False)
        self._silence = now, 0.0 if use is None else use.cpu_s

    def is_busy(self, now: float) -> bool:
        """Whether it has used the processor since it is watched, and is not stopped."""
        use = usage_of(self.pid, with_children=False)
        if self._silence is None or use is None or is_stopped(self.pid):
            return False
        since, cpu_s = self._silence
        return now > since and use.cpu_s - cpu_s >= _IS_BUSY * (now - since)

    def kill(self, reason: str = "", *, within: bool = False) -> None:
        """End it and all it started, now. within: the reason is its own doing."""
        if reason and not self._killed_for:
            self._killed_for, self._was_within = reason, within
        if self.state != "gone":
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def reap(self) -> ChildExit:
        """After its end: take its group with it, let go of it, say how it ended."""
        self.kill()
        code = self._process.wait()
        self.status.close()
        self._commands.close()
        self.state = "gone"
        if self._killed_for:
            return ChildExit(self._killed_for, within=self._was_within)
        if code == -signal.SIGKILL and num_oom_kills() > self._num_oom_kills:
            return ChildExit("signal SIGKILL, the kernel's: out of memory", within=True)
        if code < 0:
            return ChildExit(f"signal {_signal_name(-code)}", within=-code in _FATAL)
        words = f" ({self._last_words})" if self._last_words else ""
        return ChildExit(f"exit code {code}{words}", within=code != 0)

    def _tell(self, command: Command) -> None:
        """Now, or when there is room; where it cannot hear that, its end, or its hang, is seen."""
        self._commands.write(msgspec.json.encode(command))


def _pipe(on_error: contextlib.ExitStack) -> tuple[int, int]:
    """Reading and writing end of a new pipe."""
    ends = os.pipe2(os.O_CLOEXEC)
    for fd in ends:
        on_error.callback(os.close, fd)
    return ends


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _dying_with(parent: int) -> Callable[[], None]:
    def in_the_child() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(1)

    return in_the_child
