"""What a process uses: CPU time and memory, from Linux's /proc.

Owns: reading it, in microseconds, for a supervisor that asks twice a second. Does not know: which
process it is. Of one that has ended and is not reaped yet its CPU time can still be read; of one
that is not there, or where there is no /proc, nothing is said.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
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
