"""Statistics of a stack's processes by role, summed over successive processes of a role.

- The counters of a role never decrease: those of a process that ends are added to its role, as
  last reported (with each heartbeat, so the last half second of a killed process may be missing).
- So are those of a process that a child runs itself. Its restarts are the changes of its process
  id; its CPU time is part of its parent's, too.
- A spare counts once it serves, and then with the CPU time that it has used before.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import msgspec

from slipstream.stack.children.process import Child
from slipstream.stack.children.process_usage import ProcessUsage, usage_of
from slipstream.stack.children.roles import Role
from slipstream_ipc.messages import OwnProcess
from slipstream_ipc.telemetry.statistics import (
    CoreNumbers,
    Numbers,
    ProcessStatistics,
    Statistics,
    added,
    without_gauges,
)

STATISTICS_S = 0.5  # between two reports
REST_S = 1.0  # the same, while no request is running or waiting
LOAD_CHANGE_S = 0.1  # the same, when the number of running or waiting requests has changed
SUPERVISOR = "supervisor"
_NONE = ProcessUsage(0.0, 0)


@dataclass(slots=True)
class _FormerTotals:
    """The totals of the former processes of a role."""

    numbers: Numbers | None = None
    cpu_s: float = 0.0


@dataclass(slots=True)
class _OwnTotals:
    """A process that a child runs itself, and the totals of those before it."""

    pid: int = 0  # of the last one that there was
    num_restarts: int = 0
    former_cpu_s: float = 0.0
    usage: ProcessUsage = _NONE

    def update(self, pid: int) -> None:
        """Read the usage of process `pid`; 0 if there is none."""
        if pid and pid != self.pid:
            self.num_restarts += self.pid != 0
            self.former_cpu_s += self.usage.cpu_s
            self.pid, self.usage = pid, _NONE
        self.usage = _monotonic(usage_of(pid) if pid else None, self.usage)


class RoleStatistics:
    """The statistics of the processes in these roles."""

    def __init__(self, roles: Mapping[str, Role]) -> None:
        self._roles = roles
        self._former = {name: _FormerTotals() for name in roles}
        self._own: defaultdict[str, _OwnTotals] = defaultdict(_OwnTotals)
        # last readings by process id, of active processes
        self._usages: dict[int, ProcessUsage] = {}
        self._due_at = self._load_due_at = 0.0
        self._reported_loads: list[tuple[int, int]] = []

    def due(self, now: float) -> bytes:
        """The encoded statistics if a report is due at `now`; else b""."""
        loads = self._loads()
        if now < (self._due_at if loads == self._reported_loads else self._load_due_at):
            return b""
        is_at_rest = not any(map(any, loads))
        self._due_at = now + (REST_S if is_at_rest else STATISTICS_S)
        self._load_due_at = now + LOAD_CHANGE_S
        self._reported_loads = loads
        return self.encoded(now)

    def encoded(self, now: float) -> bytes:
        """The statistics at `now`, as children are sent them."""
        return msgspec.json.encode(self.statistics(now))

    def _loads(self) -> list[tuple[int, int]]:
        """The number of running and of waiting requests of each core."""
        children = [role.active for role in self._roles.values()]
        numbers = [child.numbers for child in children if child is not None]
        gauges = [each.gauges for each in numbers if isinstance(each, CoreNumbers)]
        return [(each.num_running, each.num_waiting) for each in gauges]

    def numbers(self) -> Iterator[Numbers]:
        """Counts whose sums are those of the stack: of the active processes, with their gauges, and
        of the former ones.
        """
        for former in self._former.values():
            if former.numbers is not None:
                yield former.numbers
        for role in self._roles.values():
            if role.active is not None and role.active.numbers is not None:
                yield role.active.numbers

    def statistics(self, now: float) -> Statistics:
        """The statistics of all roles and of the supervisor, at `now`."""
        processes = {
            name: self._of_own(name, own)
            for role in self._roles.values()
            for name, own in role.own_processes.items()
        }
        processes |= {name: self._of(name, role, now) for name, role in self._roles.items()}
        own, times = usage_of(os.getpid(), with_children=False), os.times()
        processes[SUPERVISOR] = ProcessStatistics(
            state="ready",
            pid=os.getpid(),
            cpu_s=times.user + times.system,
            rss_bytes=0 if own is None else own.rss_bytes,
        )
        return Statistics(now, processes)

    def note_exit(self, child: Child) -> None:
        """Add a child's counters to its role. Called when it has ended, before it is reaped."""
        if child is not self._roles[child.name].active:
            return
        former = self._former[child.name]
        if child.numbers is not None:
            former.numbers = added(former.numbers, without_gauges(child.numbers))
        former.cpu_s += self._usage_of_child(child).cpu_s
        del self._usages[child.pid]

    def _of(self, name: str, role: Role, now: float) -> ProcessStatistics:
        former, child = self._former[name], role.active
        numbers, pid, usage = former.numbers, 0, _NONE
        if child is not None:
            if child.numbers is not None:
                numbers = added(numbers, child.numbers)
            pid, usage = child.pid, self._usage_of_child(child)
        return ProcessStatistics(
            state=role.condition(now),
            pid=pid,
            num_restarts=role.num_restarts,
            cpu_s=former.cpu_s + usage.cpu_s,
            rss_bytes=usage.rss_bytes,
            numbers=numbers,
        )

    def _of_own(self, name: str, own: OwnProcess) -> ProcessStatistics:
        totals = self._own[name]
        totals.update(own.pid)
        return ProcessStatistics(
            state=own.state,
            pid=own.pid,
            num_restarts=totals.num_restarts,
            cpu_s=totals.former_cpu_s + totals.usage.cpu_s,
            rss_bytes=totals.usage.rss_bytes,
        )

    def _usage_of_child(self, child: Child) -> ProcessUsage:
        last = self._usages.get(child.pid, _NONE)
        self._usages[child.pid] = usage = _monotonic(usage_of(child.pid), last)
        return usage


def _monotonic(usage: ProcessUsage | None, last: ProcessUsage) -> ProcessUsage:
    """A usage; CPU time that falls or cannot be read keeps its last value."""
    now = usage or _NONE
    return ProcessUsage(max(now.cpu_s, last.cpu_s), now.rss_bytes)
