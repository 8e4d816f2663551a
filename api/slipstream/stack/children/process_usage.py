"""What a process uses: CPU time and memory; and whether it was denied it. Read by psutil.

Of a process that has ended and is not reaped yet its CPU time can still be read; of one that is not
there nothing is said. Two files are read here, as psutil has nothing for them: the children of one
process (psutil looks at every process of the machine for that, twice a second) and its cgroup's
count of kills.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


class ProcessUsage(NamedTuple):
    """cpu_s: user and system time, its children's among it; rss_bytes: its own memory."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int, *, with_children: bool = True) -> ProcessUsage | None:
    """What a process has used so far; with those that it started itself and that still run."""
    own = _read(pid)
    if own is None or not with_children:
        return own
    cpu_s = own.cpu_s
    for child in _children(pid):
        use = _read(child)
        cpu_s += 0.0 if use is None else use.cpu_s
    return ProcessUsage(cpu_s, own.rss_bytes)


def is_stopped(pid: int) -> bool:
    """Whether a signal, or a debugger, has stopped it."""
    return state_of(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def state_of(pid: int) -> str:
    """What it does, in psutil's words; "gone" where it is not there."""
    try:
        state: str = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    return state


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


def _read(pid: int) -> ProcessUsage | None:
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times = process.cpu_times()
            rss_bytes = process.memory_info().rss
    except psutil.Error:
        return None
    # the children's: of those that were waited for
    return ProcessUsage(
        sum((times.user, times.system, times.children_user, times.children_system)), rss_bytes
    )


def _children(pid: int) -> list[int]:
    """Those that its main thread started."""
    try:
        return [int(one) for one in (_PROC / f"{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []
