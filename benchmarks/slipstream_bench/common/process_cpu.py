"""CPU time of a process, or of a process and its descendants.

The sum of a tree includes ended children that have been waited for, in ticks of mostly 10 ms. The
time of a single process is the scheduler's count for its living threads, in nanoseconds.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from slipstream.errors import BadRequestError, wrong_option

_PROC = Path("/proc")


def tree_cpu_s(pid: int) -> float:
    """User and system time of the process tree so far, in seconds.

    Raises: BadRequestError if there is no such process.
    """
    try:
        root = psutil.Process(pid)
        used_s = sum(root.cpu_times()[:4])  # user and system, with those of waited-for children
        for child in root.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended
                used_s += sum(child.cpu_times()[:4])
    except psutil.Error:
        raise _no_process(pid) from None
    return float(used_s)


def process_cpu_s(pid: int) -> float:
    """User and system time of the living threads of this process alone, in seconds.

    Raises: BadRequestError if there is no such process, or no /proc.
    """
    total_ns = 0
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                total_ns += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
    except OSError:
        raise _no_process(pid) from None
    return total_ns / 1e9


def _no_process(pid: int) -> BadRequestError:
    return wrong_option("pid", pid, "the id of a process that runs here (Linux only)")
