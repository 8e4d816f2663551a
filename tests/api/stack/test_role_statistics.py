"""What places of a stack have counted, over the lives of their processes."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.processes import started

from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.process_usage import usage_of
from slipstream.stack.children.role_statistics import (
    LOAD_CHANGE_S,
    REST_S,
    STATISTICS_S,
    RoleStatistics,
)
from slipstream.stack.children.roles import Role
from slipstream_ipc.messages import OwnProcess
from slipstream_ipc.process import Condition
from slipstream_ipc.telemetry.statistics import (
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    Histogram,
    ProcessStatistics,
    Statistics,
    WorkerCounters,
    WorkerNumbers,
)


def core(num_steps: int, num_running: int = 0) -> CoreNumbers:
    return CoreNumbers(CoreGauges(num_running=num_running), CoreCounters(num_steps=num_steps))


class Played:
    """In the place of a `Child`: it is there, and has told some numbers."""

    def __init__(self, numbers: CoreNumbers | None, pid: int = 2**22 + 1) -> None:
        self.name, self.pid, self.numbers = "core", pid, numbers
        self.processes: dict[str, OwnProcess] = {}
        self.state, self.last_beat_at, self.available_at, self.detail = "ready", None, 0.0, ""

    def activate(self, _activation: Any) -> None:
        """It serves."""


@pytest.fixture
def role() -> Role:
    return Role(ChildSpec("core", ("nothing",), msgspec.Raw(b"{}")), 10, 300.0)


def of_core(statistics: RoleStatistics) -> ProcessStatistics:
    return statistics.statistics(1.0).processes["core"]


def test_counters_of_a_place_add_up(role: Role) -> None:
    statistics = RoleStatistics({"core": role})
    first: Any = Played(core(5, num_running=3), os.getpid())
    role.activate(first)
    found = of_core(statistics)
    assert (found.numbers, found.num_restarts, found.pid) == (core(5, 3), 0, os.getpid())
    assert found.cpu_s > 0
    assert found.rss_bytes > 0

    statistics.note_exit(first)
    role.active = None
    gone = of_core(statistics)
    assert gone.numbers == core(5), "what it had running runs no more"
    assert (gone.pid, gone.rss_bytes) == (0, 0)
    assert gone.cpu_s >= found.cpu_s

    second: Any = Played(None)
    role.activate(second)
    silent = of_core(statistics)
    assert (silent.numbers, silent.num_restarts) == (core(5), 1)
    second.numbers = core(2, num_running=1)
    assert of_core(statistics).numbers == core(7, 1)
    second.numbers = core(4, num_running=1)
    assert of_core(statistics).numbers == core(9, 1)
    assert of_core(statistics).cpu_s >= gone.cpu_s


def test_a_process_of_a_child_is_a_place_of_its_own(role: Role) -> None:
    """It has a state, counts of restarts and CPU time that never fall, over all its parents."""
    statistics = RoleStatistics({"core": role})

    def own() -> ProcessStatistics:
        return statistics.statistics(1.0).processes["tokenizer"]

    def run(child: Any, own_state: str, pid: int) -> ProcessStatistics:
        child.processes = {"tokenizer": OwnProcess(own_state, pid)}
        return own()

    first: Any = Played(None)
    role.activate(first)
    assert "tokenizer" not in statistics.statistics(1.0).processes
    begun = run(first, "ready", os.getpid())
    assert (begun.state, begun.pid, begun.num_restarts) == ("ready", os.getpid(), 0)
    assert begun.cpu_s > 0
    assert begun.rss_bytes > 0
    dead = run(first, "restarting", 0)
    assert (dead.state, dead.pid, dead.num_restarts, dead.rss_bytes) == ("restarting", 0, 0, 0)
    assert run(first, "ready", os.getppid()).num_restarts == 1
    again = run(first, "ready", os.getpid())
    assert again.num_restarts == 2
    assert again.cpu_s >= begun.cpu_s * 2

    statistics.note_exit(first)
    role.note_exit(first, ChildExit("signal SIGKILL", is_own_fault=False), 2.0)
    orphaned = own()
    assert (orphaned.state, orphaned.pid, orphaned.num_restarts) == ("restarting", 0, 2)
    second: Any = Played(None)
    role.activate(second)
    assert own().state == "restarting", "the new parent has not told yet"
    assert run(second, "ready", os.getppid()).num_restarts == 3
    assert own().cpu_s >= again.cpu_s


def test_what_is_told_can_be_read_whatever_a_place_has_told(role: Role) -> None:
    """Sums that no count can be, and a process that tells another kind's numbers."""
    statistics = RoleStatistics({"core": role})
    most = CoreCounters(
        num_steps=2**63 - 1, device_busy_s=1e12, step_s=Histogram((2**63 - 1,) * 28, 1e12)
    )
    busiest = CoreNumbers(counters=most)
    tally = WorkerCounters(finished={f"{n}": 2**63 - 1 for n in range(1024)})
    worker = WorkerNumbers(counters=tally)
    other = WorkerNumbers(counters=WorkerCounters(finished={f"{n}": 1 for n in range(9, 2000)}))
    for numbers in (busiest, busiest, core(5), worker, other, core(3), busiest):
        child: Any = Played(numbers)
        role.activate(child)
        line = statistics.due(role.num_restarts * 1000.0)
        told = msgspec.json.decode(line, type=Statistics).processes["core"].numbers
        assert type(told) is type(numbers)
        statistics.note_exit(child)
        role.active = None


def test_a_spare_that_dies_changes_nothing(role: Role) -> None:
    statistics = RoleStatistics({"core": role})
    active: Any = Played(core(5))
    role.activate(active)
    spare: Any = Played(core(99))
    role.spare = spare
    statistics.note_exit(spare)
    assert of_core(statistics).numbers == core(5)


def test_statistics_are_due_now_and_then(role: Role) -> None:
    statistics = RoleStatistics({"core": role})
    line = statistics.due(100.0)
    told = msgspec.json.decode(line, type=Statistics)
    assert told.at_s == 100.0
    assert set(told.processes) == {"core", "supervisor"}
    assert told.processes["supervisor"].pid == os.getpid()
    assert statistics.due(100.0 + STATISTICS_S / 2) == b""
    assert statistics.due(100.0 + REST_S / 2) == b"", "nothing runs"
    assert statistics.due(100.0 + REST_S)


def test_statistics_are_due_more_often_while_requests_run(role: Role) -> None:
    statistics = RoleStatistics({"core": role})
    active: Any = Played(core(5))
    role.activate(active)
    assert statistics.due(100.0)
    active.numbers = core(6, num_running=1)
    assert statistics.due(100.0 + LOAD_CHANGE_S), "that is news"
    assert statistics.due(100.0 + STATISTICS_S) == b""
    assert statistics.due(100.0 + LOAD_CHANGE_S + STATISTICS_S)
    active.numbers = core(7)
    assert statistics.due(101.0), "and so is that"


def test_cpu_use_includes_children_and_outlives_the_process() -> None:
    busy = "print(sum(range(20_000_000)), flush=True)\ninput()"
    parent = (
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {busy!r}])\n"
        "child.wait()"
    )
    with started(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the child has worked
        both, alone = usage_of(process.pid), usage_of(process.pid, with_children=False)
        assert both is not None
        assert alone is not None
        assert both.cpu_s > alone.cpu_s
        assert alone.rss_bytes > 2**20
        assert process.stdin is not None
        process.stdin.close()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        dead = usage_of(process.pid)
        assert dead is not None
        assert dead.cpu_s >= both.cpu_s
        assert process.wait(PATIENCE_S) == 0
        assert usage_of(process.pid) is None


def test_who_does_not_read_is_offered_one_line_and_told_the_rest_later() -> None:
    """What a wedged child must hear waits for it; statistics it misses."""
    argv = (sys.executable, "-c", "import time; time.sleep(600)")
    child = Child(ChildSpec("deaf", argv, msgspec.Raw(b"{}")))
    large = b"x" * 100_000  # more than a pipe takes
    child.offer(large)
    for n in range(50):
        child.offer(b"y" * 1000)
        child.send_condition(Condition({"core": f"{n}"}))
    untold = child._commands._unsent
    assert len(untold) < 100_000 + 50 * 100
    assert b"yy" not in untold
    assert untold.count(b"Condition") == 50
    child.kill()
    child.reap()


def test_statistics_are_due_sooner_where_another_number_of_requests_runs(role: Role) -> None:
    """Else a burst's first instant, with one of them in the first step, is told for long."""
    statistics = RoleStatistics({"core": role})
    played: Any = Played(core(1, num_running=1))
    role.activate(played)
    assert statistics.due(100.0)
    played.numbers = core(2, num_running=1)
    assert not statistics.due(100.0 + LOAD_CHANGE_S)
    played.numbers = core(3, num_running=32)
    assert not statistics.due(100.0 + LOAD_CHANGE_S / 2)
    line = statistics.due(100.0 + LOAD_CHANGE_S)
    found = msgspec.json.decode(line, type=Statistics).processes["core"].numbers
    assert isinstance(found, CoreNumbers)
    assert found.gauges.num_running == 32
    assert not statistics.due(100.0 + 2 * LOAD_CHANGE_S)
    assert statistics.due(100.0 + LOAD_CHANGE_S + STATISTICS_S)
