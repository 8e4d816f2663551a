"""What a process and its descendants have used of the CPU, from Linux's /proc.

Owns: reading it. What children that ended have used stays in the sum, where they were waited for
(the kernel adds it to their parent's).
"""

from __future__ import annotations

import os
from pathlib import Path

from slipstream.settings import wrong_option

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
        raise wrong_option("pid", pid, "the id of a process that runs here (Linux only)")
    tree = [pid]
    for one in tree:
        tree += children.get(one, ())
    return sum(ticks[one] for one in tree) / os.sysconf("SC_CLK_TCK")
