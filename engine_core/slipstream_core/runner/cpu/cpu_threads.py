"""How many threads compute on the CPU: as many as there are cores for, at each moment.

Owns the count and, for torch's operators, its changes while it runs. The team of our own kernels
does that by itself (`native/team.c`). Knows no model and no step.

Rules:
- Results do not depend on it where our kernels compute; torch's own products may differ in their
  last bits with the number of threads, as they do between batches.
- A team of torch's (libgomp's) cuts an operator into equal parts, and all wait for the last: with
  one of its threads without a core it is slower than one thread. Where the device's thread waits
  for more than half of the time that it computes, it goes on alone, and tries again later.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from slipstream_core.runner.cpu.kernels import Kernels

_WINDOW_S = 0.1  # of computing, over which is judged
_LEAST_S = 0.02  # … at the earliest
_LEAST_ALONE_S, _MOST_ALONE_S = 0.05, 1.0

_PROC, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_cores() -> int:
    """Cores that this process may use: by its affinity mask, and by the quota of its cgroups."""
    num = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return num if quota is None else max(1, min(num, int(quota + 0.5)))


def cgroup_quota(proc: Path = _PROC, mounted: Path = _CGROUPS) -> float | None:
    """Processors' worth of time that the cgroups of this process allow it; None: no limit."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        roots = ["cpu", "cpu,cpuacct", "cpuacct,cpu"] if controllers else ["", "unified"]
        for root in (mounted / name for name in roots):
            # the path may be the host's, of which a container sees the innermost part as its root
            inner = root / path.lstrip("/")
            folders = (inner, *inner.parents)
            quotas += [_quota_of(each) for each in folders if each.is_relative_to(root)]
    return min((each for each in quotas if each is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    """Of one cgroup: version 2's cpu.max, or version 1's two files."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        if quota == "max" or int(quota) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None


class TeamSize:
    """How many threads a team should have that waits for all of them. Pure: times are given."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._computed_s = self._lost_s = 0.0  # with a team, within the window
        self._alone_s = _LEAST_ALONE_S  # for how long, the next time
        self._alone_until_s = float("-inf")

    def at(self, now_s: float) -> int:
        """The number of threads for work that begins now."""
        return self._most if now_s >= self._alone_until_s else 1

    def note(self, now_s: float, wall_s: float, computed_s: float) -> None:
        """Work by a team has ended: how long it took, and how long its caller had a core."""
        self._computed_s += computed_s
        self._lost_s += max(wall_s - computed_s, 0.0)
        if self._computed_s + self._lost_s < _LEAST_S:
            return
        if self._lost_s > self._computed_s / 2:
            self._alone_until_s = now_s + self._alone_s
            self._alone_s = min(2 * self._alone_s, _MOST_ALONE_S)
            self._computed_s = self._lost_s = 0.0
        elif self._computed_s > _WINDOW_S:
            self._lost_s *= _WINDOW_S / self._computed_s
            self._computed_s = _WINDOW_S
            self._alone_s = _LEAST_ALONE_S


class Threads:
    """The device thread's: how many torch's operators have, and our kernels. Used there alone."""

    def __init__(self, most: int, kernels: Kernels | None) -> None:
        self._most = most
        self._kernels = kernels
        self._size = TeamSize(most)
        self._began: tuple[float, float] | None = None  # wall, of this thread

    def prepare(self) -> None:
        """Called first in the thread."""
        torch.set_num_threads(self._most)
        if self._kernels is not None:
            self._kernels.set_threads(self._most)

    def begin_forward(self, *, is_list: bool) -> None:
        """`is_list`: our kernels do what is large, and what is left to torch is small."""
        num = 1 if is_list else self._now()
        torch.set_num_threads(num)
        self._began = (time.monotonic(), time.thread_time()) if num > 1 else None

    def end_forward(self) -> None:
        """Sampling is torch's."""
        if self._began is not None:
            (wall_s, own_s), now_s = self._began, time.monotonic()
            self._size.note(now_s, now_s - wall_s, time.thread_time() - own_s)
        torch.set_num_threads(self._now())

    def _now(self) -> int:
        num = self._size.at(time.monotonic())
        return num if self._kernels is None else min(num, self._kernels.present())
