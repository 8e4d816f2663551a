"""What a process uses: CPU time and memory, from Linux's /proc; and whether it was denied it.

Owns: reading it, in microseconds, for a supervisor that asks twice a second. Does not know: which
process it is. Of one that has ended and is not reaped yet its CPU time can still be read; of one
that is not there, or where there is no /proc, nothing is said.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Use(NamedTuple):
    """cpu_s: user and system time, its children's among it; rss_bytes: its own memory."""

    cpu_s: float
    rss_bytes: int


def use_of(pid: int, *, with_children: bool = True) -> Use | None:
    """What a process has used so far; with those that it started itself and that still run."""
    own = _read(pid)
    if own is None or not with_children:
        return own
    cpu_s = own.cpu_s
    for child in _children(pid):
        use = _read(child)
        cpu_s += 0.0 if use is None else use.cpu_s
    return Use(cpu_s, own.rss_bytes)


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped it."""
    return state_of(pid) in ("T", "t")


def state_of(pid: int) -> str:
    """The letter that ps shows for it; "?" where it is not there."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, UnicodeDecodeError):
        return "?"


def num_oom_kills() -> int:
    """Processes of our cgroup that the kernel has killed for want of memory; 0 where it tells none.

    Our children are in it. Version 2 alone: a container sees its own as the root, or by its path.
    """
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
        own = next(line[3:].lstrip("/") for line in lines if line.startswith("0::"))
        path = _CGROUPS / own / "memory.events"
        path = path if path.is_file() else _CGROUPS / "memory.events"
        events = dict(line.split() for line in path.read_text().splitlines())
        return int(events.get("oom_kill", 0))
    except (OSError, ValueError, StopIteration):
        return 0


def _read(pid: int) -> Use | None:
    try:
        # the second field, the name in brackets, may hold anything; the rest are numbers
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except (OSError, UnicodeDecodeError):
        return None
    # utime, stime, and those of children that were waited for; resident pages
    return Use(sum(map(int, fields[11:15])) * _TICK_S, int(fields[21]) * _PAGE_BYTES)


def _children(pid: int) -> list[int]:
    """Those that its main thread started."""
    try:
        return [int(one) for one in (_PROC / f"{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []
