"""Ends the core when one of its ranks ends: a thread that waits for that, and kills ranks that a
signal has stopped for too long, also while the core loads or waits as a spare.

The core ends the same way. By the same signal, so a rank that was killed from outside is charged to
no request, as a core would not be; else with an exit code, as by an exception of its own.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from slipstream_ipc.child import ChildProcess
from slipstream_ipc.messages import Status
from slipstream_ipc.process import BEAT_S, report

logger = logging.getLogger(__name__)

_MAX_STATUS_BYTES = 1 << 16
_SIG_DFL = 0
_ARRIVES_S = 10.0  # within which a signal sent to this process has ended it


class RankEnd(NamedTuple):
    """The end of a rank. status: its last report."""

    rank: int  # its index
    pid: int  # on its machine
    code: int  # -N: by signal N
    status: Status


class RankProcess(NamedTuple):
    """A rank's process. status_fd: where it writes its `Status` lines."""

    rank: int  # its index
    process: ChildProcess
    status_fd: int


class RankWatch:
    """Waits for the end of the first of these processes, in a thread."""

    def __init__(
        self,
        processes: Sequence[RankProcess],
        on_end: Callable[[RankEnd], None],
        kill_hung: Callable[[float], None],
    ) -> None:
        """on_end: called in the thread, once. kill_hung: called there with the time (monotonic),
        every BEAT_S.
        """
        self._on_end = on_end
        self._kill_hung = kill_hung
        self._stop_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._watched = {each.process.fileno(): each for each in processes}
        self._thread = threading.Thread(target=self._wait, name="ranks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching, before the ranks are ended on purpose and reaped. Idempotent."""
        if self._stop_fd >= 0:
            os.eventfd_write(self._stop_fd, 1)
            self._thread.join()
            os.close(self._stop_fd)
            self._stop_fd = -1

    def _wait(self) -> None:
        ended = select.poll()
        ended.register(self._stop_fd, select.POLLIN)
        for fd in self._watched:
            ended.register(fd, select.POLLIN)
        while not (found := [fd for fd, _ in ended.poll(BEAT_S * 1e3)]):
            self._kill_hung(time.monotonic())
        if self._stop_fd in found:
            return
        ended_one = self._watched[found[0]]
        code = ended_one.process.ended()
        assert code is not None
        status = _last_status(ended_one.status_fd)
        self._on_end(RankEnd(ended_one.rank, ended_one.process.pid, code, status))


def _last_status(fd: int) -> Status:
    """The last status that an ended rank reported."""
    os.set_blocking(fd, False)
    try:
        lines = os.read(fd, _MAX_STATUS_BYTES).splitlines()
        return msgspec.json.decode(lines[-1], type=Status)
    except (OSError, IndexError, msgspec.DecodeError):
        return Status()


def end_as_well(end: RankEnd) -> None:
    """End this process as a rank of it has ended, after last words."""
    if end.status.error:
        report(Status(error=end.status.error, is_misconfigured=end.status.is_misconfigured))
        os._exit(1)
    how = f"exit code {end.code}" if end.code >= 0 else f"signal {-end.code}"
    words = f"rank {end.rank} (process {end.pid}) ended: {end.status.last_words or how}"
    logger.error("%s; the core ends with it", words)
    report(Status(last_words=words))
    if end.code < 0:
        if -end.code != signal.SIGKILL:
            _undo_handler(-end.code)
        os.kill(os.getpid(), -end.code)
        threading.Event().wait(_ARRIVES_S)  # in whatever thread
    os._exit(1)


def _undo_handler(number: int) -> None:
    """Restore a signal's default action from any thread, which `signal.signal` cannot."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(number, _SIG_DFL)
