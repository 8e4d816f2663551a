"""A child process on the side of its parent: how it is started, noticed to have ended, and reaped.

A child is a program, or a fork of this process that goes on as one, which takes milliseconds and
shares the memory of what is imported; both start and end the same way. The child's side is
`slipstream_ipc.process`.

- A child that has ended keeps its pid until it is reaped. So a signal never reaches another
  process, and a replacement that is started after `reap` has no living predecessor.
- It dies with the thread that started it where it sets that itself (`die_with_parent`).
- A pidfd is a convenience: where the kernel has none, or no descriptor is left, a child's end is
  seen by whoever asks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from slipstream_ipc.forked_process import RESET_SIGNALS, become, check_single_threaded
from slipstream_ipc.other_python import STARTED_BY
from slipstream_ipc.process import (
    CONTROL_FD_VARIABLE,
    NAME_VARIABLE,
    PARENT_PID_VARIABLE,
    STATUS_FD_VARIABLE,
    VERSION_VARIABLE,
    die_with_parent,
    installed_version,
)

_STANDARD_ERROR = 2
_LOOK_EVERY_S = 0.01  # for the end of a child without a pidfd


class ChildProcess:
    """A child of this process, from its start until it is reaped. For any thread."""

    def __init__(self, pid: int, *, leads_group: bool = False) -> None:
        """leads_group: `kill` is for its process group, whose other members it kills even when the
        child itself has ended.
        """
        self.pid = pid
        self._kill = os.killpg if leads_group else os.kill
        self._code: int | None = None  # once it is reaped
        self._pidfd: int | None = None
        self._lock = threading.Lock()  # guards the reaping, after which the pid may be another's

    def fileno(self) -> int:
        """A pidfd: readable from its end on, and open until it is reaped, which it is not yet.
        Raises: OSError where there can be none.
        """
        with self._lock:
            assert self._code is None
            if self._pidfd is None:
                self._pidfd = _open_pidfd(self.pid)
            return self._pidfd

    def ended(self) -> int | None:
        """The exit code of a child that has ended, -N where signal N ended it; None while it runs.
        Reaps nothing. 0 where something else in this process has reaped it, as in `subprocess`.
        """
        with self._lock:
            return self._ended()

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for its end, and reap it; its exit code. Raises: subprocess.TimeoutExpired."""
        self._await_end(timeout_s)
        with self._lock:
            return self._reap()

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        self._send(number, os.kill)

    def terminate(self) -> None:
        """Ask it to end, by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL it, or its process group."""
        self._send(signal.SIGKILL, self._kill)

    def reap(self, within_s: float = 0.0) -> int:
        """Kill what has not ended `within_s`, and reap it; its exit code. Idempotent."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._await_end(within_s)
        finally:  # after a KeyboardInterrupt, too
            self.kill()
            code = self.wait()
        return code

    def _ended(self) -> int | None:
        if self._code is not None:
            return self._code
        try:
            end = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return self._note_reaped(0)
        if end is None:
            return None
        return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status

    def _reap(self) -> int:
        """Reap the process, which has ended; return its exit code."""
        code = self._ended()
        assert code is not None
        if self._code is None:
            with contextlib.suppress(ChildProcessError):  # something else was faster
                os.waitpid(self.pid, 0)
        return self._note_reaped(code)

    def _note_reaped(self, code: int) -> int:
        self._code = code
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        return code

    def _send(self, number: int, send: Callable[[int, int], None]) -> None:
        with self._lock, contextlib.suppress(ProcessLookupError):
            self._ended()  # it may be reaped without us
            if self._code is None:
                send(self.pid, number)

    def _await_end(self, timeout_s: float | None) -> None:
        """Reaps nothing. Raises: subprocess.TimeoutExpired."""
        until = None if timeout_s is None else time.monotonic() + timeout_s
        with contextlib.ExitStack() as cleanup:
            ends = select.poll()  # unlike select, it takes descriptors above 1023
            looks_s: float | None = None
            with self._lock:
                if self._ended() is not None:
                    return
                try:  # one of its own, as another thread may reap the child
                    pidfd = _open_pidfd(self.pid)
                    cleanup.callback(os.close, pidfd)
                    ends.register(pidfd, select.POLLIN)
                except OSError:
                    looks_s = _LOOK_EVERY_S
            while self.ended() is None:
                left_s = looks_s if until is None else until - time.monotonic()
                if until is not None and left_s is not None and left_s <= 0:
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
                ends.poll(None if left_s is None else min(left_s, looks_s or left_s) * 1e3)


def _open_pidfd(pid: int) -> int:
    """Raises: OSError, also where this Python was built without the call."""
    try:
        return os.pidfd_open(pid)
    except AttributeError as error:
        raise OSError(str(error)) from None


def pipe(reader: contextlib.ExitStack, writer: contextlib.ExitStack) -> tuple[int, int]:
    """The reading and the writing end of a new pipe, each closed by its stack."""
    ends = os.pipe2(os.O_CLOEXEC)
    for fd, stack in zip(ends, (reader, writer), strict=True):
        stack.callback(os.close, fd)
    return ends


def module_command(module: str) -> list[str]:
    """The command that runs a module of ours as a program, as this process was started."""
    started_by = os.environ.get(STARTED_BY)
    return [*(json.loads(started_by) if started_by else (sys.executable, "-P", "-m")), module]


def execute(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int = _STANDARD_ERROR,
    descriptors: Sequence[int] = (),
    leads: Literal["group", "session"] | None = None,
    before: Callable[[], object] | None = None,
) -> ChildProcess:
    """A new program. environment: all that it has. descriptors: ours, which it gets under the same
    numbers. leads: a process group or a session of its own. before: called in the child before it
    is executed, and only given where this process has one thread. Raises: OSError.
    """
    try:
        program = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stdout,
            env=environment,
            pass_fds=descriptors,
            process_group=0 if leads == "group" else None,
            start_new_session=leads == "session",
            preexec_fn=before,
        )
    except subprocess.SubprocessError as error:  # `before` has failed
        raise OSError(str(error)) from None
    program.returncode = 0  # so that it reaps nothing: that is for `ChildProcess`
    return ChildProcess(program.pid, leads_group=leads == "group")


def fork(
    main: Callable[[], int],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    unset: Sequence[str] = (),
    leads_group: bool = False,
) -> ChildProcess:
    """A fork of this process that runs `main`, see `become`, and dies with this thread. Raises:
    OSError, of it CannotForkError.
    """
    check_single_threaded()
    parent = os.getpid()

    def run() -> int:
        if leads_group:
            os.setpgid(0, 0)
        die_with_parent(parent)
        return main()

    # none reaches the child while it has our handlers, which would tell us of it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RESET_SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            become(run, descriptors, environment, unset=unset)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    if leads_group:
        with contextlib.suppress(OSError):  # as it does itself: nothing may come before that
            os.setpgid(pid, pid)
    return ChildProcess(pid, leads_group=leads_group)


def start_own_process(
    module: str,
    config: bytes,
    name: str,
    *,
    descriptors: Sequence[int] = (),
    status_fd: int | None = None,
    may_fork: bool = True,
) -> ChildProcess:
    """A process that a child of the supervisor runs itself, which dies with that child: the `main`
    of `module`, which `top` shows as `name`. It is a fork where its module is imported already and
    this process has no threads, else a program.

    Called on the main thread, as the process dies with the thread that started it. config: what it
    reads from its standard input. descriptors: ours, which it gets under the same numbers.
    status_fd: of them, where it writes its status lines, such as that another version than this
    process's is installed by now. Raises: OSError.
    """
    environment = {PARENT_PID_VARIABLE: str(os.getpid()), NAME_VARIABLE: name}
    if status_fd is not None:
        environment |= {STATUS_FD_VARIABLE: str(status_fd), VERSION_VARIABLE: installed_version()}
    unset = [each for each in (STATUS_FD_VARIABLE, CONTROL_FD_VARIABLE) if each not in environment]
    stdin = os.memfd_create("slipstream-config")
    try:
        os.write(stdin, config)
        os.lseek(stdin, 0, os.SEEK_SET)
        if may_fork and module in sys.modules:
            with contextlib.suppress(OSError):  # it has threads, as it does whenever it serves
                given = {0: stdin, **{each: each for each in descriptors}}
                return fork(sys.modules[module].main, given, environment, unset=unset)
        inherited = {key: value for key, value in os.environ.items() if key not in unset}
        return execute(
            module_command(module),
            {**inherited, **environment},
            stdin=stdin,
            descriptors=descriptors,
        )
    finally:
        os.close(stdin)
