"""The time that a process lacks a CPU, which a parent does not count as its child's silence."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc")


class RunDelay:
    """The run delay of a process's loop since a moment."""

    def __init__(self) -> None:
        self._pid: int | None = None
        self._start_s = 0.0

    def begin(self, pid: int) -> None:
        """Count from now on, for this process."""
        self._pid, self._start_s = pid, loop_wait_s(pid)

    def lacked_s(self) -> float:
        """Seconds that the loop has lacked a CPU since `begin`; 0 before it, and where the process
        is gone or the kernel does not tell.
        """
        return 0.0 if self._pid is None else max(0.0, loop_wait_s(self._pid) - self._start_s)


def loop_wait_s(pid: int) -> float:
    """Seconds for which the first thread of a process, which runs its loop, has been ready to run
    while others had the CPUs; 0 where the kernel does not report it or the process is gone.
    """
    try:
        return int((_PROC / str(pid) / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0
