"""What a process, or it and its descendants, have used of the CPU, from Linux's /proc.

Owns: reading it. Of a tree, what children that ended have used stays in the sum, where they were
waited for (the kernel adds it to their parent's); it counts in ticks of mostly 10 ms. Of one
process alone it is what the scheduler has counted for its living threads, in nanoseconds.
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.errors import BadRequestError, wrong_option

_PROC = Path("/proc")


def tree_cpu_s(pid: int) -> float:
    """User and system time of the process tree so far, in seconds.

    Raises: BadRequestError where there is no such process, or no /proc.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # the second field, the name in brackets, may hold anything; the rest are numbers
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        children.setdefault(int(fields[1]), []).append(int(folder.name))
        ticks[int(folder.name)] = sum(map(int, fields[11:15]))  # utime stime cutime cstime
    if pid not in ticks:
        raise _no_process(pid)
    tree = [pid]
    for one in tree:
        tree += children.get(one, ())
    return sum(ticks[one] for one in tree) / os.sysconf("SC_CLK_TCK")


def process_cpu_s(pid: int) -> float:
    """User and system time of this process alone, of its threads that live, in seconds.

    Raises: BadRequestError where there is no such process, or no /proc.
    """
    total_ns = 0
    try:
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                total_ns += int((task / "schedstat").read_text().split()[0])
            except (FileNotFoundError, ProcessLookupError):  # the thread ended meanwhile
                continue
    except OSError:
        raise _no_process(pid) from None
    return total_ns / 1e9


def _no_process(pid: int) -> BadRequestError:
    return wrong_option("pid", pid, "the id of a process that runs here (Linux only)")
