"""A child process that goes on from a copy of this one instead of importing everything again.

- Only a process with a single thread is forked: another thread may hold a lock, which no thread of
  the copy would ever release. The teams of OpenMP and BLAS are threads, so a process that has run a
  parallel region is not forked either.
- The copy keeps the descriptors it is given and the standard streams, as an executed program would.
- A copy's imports are older than the files: see `slipstream_ipc.process` on versions.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import logging
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

_NUM_STREAMS = 3
_RESET = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)  # that we may handle


class CannotForkError(OSError):
    """This process has threads."""


class ForkedProcess:
    """A child that was forked, with what callers use of `subprocess.Popen`, from any thread."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._lock = threading.Lock()  # guards the reaping, after which the pid may be another's

    def poll(self) -> int | None:
        """The exit code once it has ended, which reaps it; -N where signal N ended it."""
        with self._lock:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, and reap it. Raises: subprocess.TimeoutExpired."""
        if self.poll() is None:
            self._await_end(timeout)
        code = self.poll()
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _await_end(self, timeout_s: float | None) -> None:
        with self._lock:
            if self.returncode is not None:
                return
            pidfd = os.pidfd_open(self.pid)
        try:
            ended = select.poll()  # unlike select, it takes descriptors above 1023
            ended.register(pidfd, select.POLLIN)
            if not ended.poll(None if timeout_s is None else timeout_s * 1e3):
                raise subprocess.TimeoutExpired("a forked process", timeout_s or 0.0)
        finally:
            os.close(pidfd)


def check_single_threaded() -> None:
    """Raises: CannotForkError where this process has other threads, of whatever library."""
    # asked of the kernel: teams of OpenMP and BLAS are threads, too (decision 013)
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads > 1:
        raise CannotForkError(f"it has {num_threads} threads")


def fork(
    main: Callable[[], int],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    unset: Sequence[str] = (),
) -> ForkedProcess:
    """A child that runs `main`: see `become`. Raises: OSError, of it CannotForkError."""
    check_single_threaded()
    # none reaches the child while it has our handlers, which would tell us of it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _RESET)
    try:
        pid = os.fork()
        if pid == 0:
            become(main, descriptors, environment, unset=unset)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return ForkedProcess(pid)


def become(
    main: Callable[[], int],
    descriptors: Mapping[int, int],
    environment: Mapping[str, str],
    *,
    unset: Sequence[str] = (),
) -> NoReturn:
    """Go on in a fork as a program that was just started, and exit with the code of `main`.

    descriptors: those to keep besides the standard streams, by the number that each one gets.
    environment, unset: variables to set, and to remove.
    """
    code = 1
    try:
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _RESET)
        sys.excepthook = sys.__excepthook__
        _keep(descriptors)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the one before may have been read
        os.environ.update(environment)
        for name in unset:
            os.environ.pop(name, None)
        logging.root.handlers.clear()
        gc.enable()
        code = main()
    except SystemExit as ending:
        code = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # none may reach what called the fork
        sys.excepthook(*sys.exc_info())
    finally:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or the reader is gone
                stream.flush()
        os._exit(code)


def _keep(descriptors: Mapping[int, int]) -> None:
    first = max((_NUM_STREAMS - 1, *descriptors, *descriptors.values())) + 1
    moved = {
        number: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, first) for number, fd in descriptors.items()
    }
    kept = {*range(_NUM_STREAMS), *moved.values()}
    for name in os.listdir("/proc/self/fd"):  # the listing's own is closed by now
        if int(name) not in kept:
            with contextlib.suppress(OSError):
                os.close(int(name))
    for number, fd in moved.items():
        os.dup2(fd, number, inheritable=number < _NUM_STREAMS)
        os.close(fd)
