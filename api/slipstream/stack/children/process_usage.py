"""CPU time, memory and state of processes, and the cgroup's out-of-memory kills.

psutil reads the state alone. It reads three files twice for a process's times and memory, which one
line of /proc/PID/stat says, scans all processes of the machine for its children, and knows neither
its threads' time in run queues nor the cgroup's count of kills. The CPU time of a process that has
ended can be read until it is reaped.
"""

from __future__ import annotations

import contextlib
import functools
import os
from math import inf
from pathlib import Path
from typing import NamedTuple

import psutil

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MOST_BYTES = 65536  # of a file that is read in one call
_LATELY_S = 0.1

_lately = (-inf, 0)  # when the out-of-memory kills were last read, and their number


class ProcessUsage(NamedTuple):
    """cpu_s: user and system time, including its children's. rss_bytes: its own memory."""

    cpu_s: float
    rss_bytes: int


def usage_of(pid: int, *, with_children: bool = True) -> ProcessUsage | None:
    """The usage of a process; None where it does not exist.

    with_children: include the CPU time of children that still run.
    """
    own = _read(pid)
    if own is None:
        return None
    ticks, rss_bytes = own
    if with_children:
        # ticks are summed, as a sum of seconds may be less than one of its own earlier readings
        ticks += sum(use[0] for child in children_of(pid) if (use := _read(child)) is not None)
    return ProcessUsage(ticks / _TICKS_PER_S, rss_bytes)


def cpu_wait_s(pid: int) -> float:
    """Seconds for which the threads of a process have been ready to run while others had the CPUs;
    0 where the kernel does not report it.
    """
    wait_ns = 0
    for path in (_PROC / str(pid) / "task").glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            wait_ns += int(path.read_text().split()[1])
    return wait_ns / 1e9


def is_stopped(pid: int) -> bool:
    """True if a signal or a debugger has stopped the process."""
    return state_of(pid) in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def state_of(pid: int) -> str:
    """The state of a process, as psutil names it; "gone" where it does not exist."""
    try:
        state: str = psutil.Process(pid).status()
    except psutil.Error:
        return "gone"
    return state


def num_oom_kills() -> int:
    """The number of out-of-memory kills in our cgroup, which has our children; 0 where unknown.

    cgroup v2 only. A container sees its cgroup as the root, or by its path.
    """
    try:
        try:
            said = _text(f"{_CGROUPS}/{_own_cgroup(_PROC)}/memory.events")
        except OSError:
            said = _text(f"{_CGROUPS}/memory.events")
        events = dict(line.split() for line in said.splitlines())
        return int(events.get("oom_kill", 0))
    except (OSError, ValueError, StopIteration):
        return 0


def num_oom_kills_lately(now: float) -> int:
    """Return `num_oom_kills`, read at most _LATELY_S before `now`: the beats of all children arrive
    together and need one reading.
    """
    global _lately
    if now >= _lately[0] + _LATELY_S:
        _lately = now, num_oom_kills()
    return _lately[1]


@functools.cache
def _own_cgroup(proc: Path) -> str:
    """The path of our cgroup, read once for each beat otherwise. Raises: OSError, StopIteration."""
    lines = _text(f"{proc}/self/cgroup").splitlines()
    return next(line[3:].strip("/") for line in lines if line.startswith("0::"))


def _read(pid: int) -> tuple[int, int] | None:
    """Ticks of CPU time and resident bytes of one process; None where it does not exist."""
    try:
        said = _text(f"{_PROC}/{pid}/stat")
    except OSError:
        return None
    fields = said[said.rindex(")") + 2 :].split()  # behind the name, which may hold anything
    # user and system time, its own and that of children that were reaped
    ticks = sum(int(field) for field in fields[11:15])
    return ticks, int(fields[21]) * _PAGE_BYTES


def children_of(pid: int) -> list[int]:
    """The children started by its main thread."""
    try:
        return [int(one) for one in _text(f"{_PROC}/{pid}/task/{pid}/children").split()]
    except (OSError, ValueError):
        return []


def _text(path: str) -> str:
    """The content of a small file. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, _MOST_BYTES).decode(errors="replace")
    finally:
        os.close(fd)
