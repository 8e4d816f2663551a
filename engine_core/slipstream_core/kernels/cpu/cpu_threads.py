"""The number and placement of the threads that compute on the CPU, adapted to the cores that are
available at each moment.

This module counts the cores and adjusts the threads of torch's operators. The team of our own
kernels adjusts itself (`cpu/team.c`).

- Results do not depend on the number of threads where our kernels compute. torch's own products may
  differ in their last bits, as they do between batches.
- A torch team (libgomp) cuts an operator into equal parts and waits for the last one: if one of its
  threads has no core, it is slower than a single thread. When the device's thread waits for more
  than half of the time that it computes, it continues alone and tries a team again later.
- Ranks of one model keep to shares of the cores. They wake each other some dozen times in a step,
  and beside other processes the kernel would often run both on one core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from slipstream_core.kernels.cpu.kernels import Kernels

_WINDOW_S = 0.1  # computing time over which a team is judged
_MIN_JUDGED_S = 0.02  # least time before it is judged
_MIN_ALONE_S, _MAX_ALONE_S = 0.05, 1.0

_TOPOLOGY = "/sys/devices/system/cpu/cpu{}/topology/{}"
_PROC, _CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def num_cores() -> int:
    """The number of cores this process may use, by its affinity mask and cgroup quota."""
    num = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return num if quota is None else max(1, min(num, int(quota + 0.5)))


def cgroup_quota(proc: Path = _PROC, mounted: Path = _CGROUPS) -> float | None:
    """The CPU quota of this process's cgroups, in cores; None if there is no limit."""
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
            # in a container the path may be the host's, and only its innermost part is visible
            inner = root / path.lstrip("/")
            folders = (inner, *inner.parents)
            quotas += [_quota_of(each) for each in folders if each.is_relative_to(root)]
    return min((each for each in quotas if each is not None), default=None)


def _quota_of(folder: Path) -> float | None:
    """One cgroup's quota in cores, from version 2's cpu.max or version 1's two files."""
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


def place_of(core: int) -> tuple[int, int]:
    """The package and the physical core of a logical one; itself where the kernel does not say."""
    try:
        package, physical = (
            int(Path(_TOPOLOGY.format(core, name)).read_text())
            for name in ("physical_package_id", "core_id")
        )
    except (OSError, ValueError):
        return 0, core
    return package, physical


def cores_of_rank(
    cores: Iterable[int],
    index: int,
    size: int,
    place: Callable[[int], tuple[int, int]] = place_of,
) -> set[int]:
    """The share of one of `size` ranks on this machine: neighbours, as many for each as for any
    other, or one more.

    Physical cores are shared out, with all of their threads, or threads where there are more ranks
    than cores. Empty if there are fewer threads than ranks.
    """
    threads: dict[tuple[int, int], list[int]] = {}
    for core in sorted(cores):
        threads.setdefault(place(core), []).append(core)
    units = [threads[each] for each in sorted(threads)]
    if len(units) < size:
        units = [[core] for unit in units for core in unit]
    if len(units) < size:
        return set()
    first, end = (at * len(units) // size for at in (index, index + 1))
    return {core for unit in units[first:end] for core in unit}


class TeamSize:
    """Chooses the size of a team that waits for all its threads. Pure: times are passed in."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._computed_s = self._lost_s = 0.0  # of a team, within the window
        self._alone_s = _MIN_ALONE_S  # length of the next period alone
        self._alone_until_s = float("-inf")

    def at(self, now_s: float) -> int:
        """The number of threads for work that begins at `now_s`."""
        return self._most if now_s >= self._alone_until_s else 1

    def note(self, now_s: float, wall_s: float, computed_s: float) -> None:
        """Record a team's work: its wall time and the CPU time of the calling thread."""
        self._computed_s += computed_s
        self._lost_s += max(wall_s - computed_s, 0.0)
        if self._computed_s + self._lost_s < _MIN_JUDGED_S:
            return
        if self._lost_s > self._computed_s / 2:
            self._alone_until_s = now_s + self._alone_s
            self._alone_s = min(2 * self._alone_s, _MAX_ALONE_S)
            self._computed_s = self._lost_s = 0.0
        elif self._computed_s > _WINDOW_S:
            self._lost_s *= _WINDOW_S / self._computed_s
            self._computed_s = _WINDOW_S
            self._alone_s = _MIN_ALONE_S


class Threads:
    """Sets the thread counts of torch's operators and our kernels, on the device's thread only."""

    def __init__(
        self, most: int, kernels: Kernels | None, rank: tuple[int, int] | None = None
    ) -> None:
        """rank: index and number among the ranks that compute on this machine's cores."""
        self._most = most
        self._rank = rank
        self._kernels = kernels
        self._size = TeamSize(most)
        self._began: tuple[float, float] | None = None  # wall time, CPU time of this thread

    def prepare(self) -> None:
        """Set the initial thread counts, and the cores; called first in the device's thread.

        The teams' threads, which this one starts, stay on its cores. A share that is smaller than
        the number of threads is no limit.
        """
        if self._rank is not None:
            own = cores_of_rank(os.sched_getaffinity(0), *self._rank)
            if len(own) >= self._most:
                with contextlib.suppress(OSError):  # then it computes wherever the kernel likes
                    os.sched_setaffinity(0, own)
        torch.set_num_threads(self._most)
        if self._kernels is not None:
            self._kernels.set_threads(self._most)

    def begin_forward(self, *, is_list: bool) -> None:
        """Set torch's threads for a forward: with `is_list` our kernels do the large operators, so
        torch gets a single one.
        """
        num = 1 if is_list else self._now()
        torch.set_num_threads(num)
        self._began = (time.monotonic(), time.thread_time()) if num > 1 else None

    def end_forward(self) -> None:
        """Record the forward's times and set torch's threads for sampling."""
        if self._began is not None:
            (wall_s, own_s), now_s = self._began, time.monotonic()
            self._size.note(now_s, now_s - wall_s, time.thread_time() - own_s)
        torch.set_num_threads(self._now())

    def _now(self) -> int:
        num = self._size.at(time.monotonic())
        return num if self._kernels is None else min(num, self._kernels.present())
