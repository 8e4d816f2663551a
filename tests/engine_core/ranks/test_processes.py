"""The processes of ranks, seen from their core."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.processes import Ranks, StoppedProcesses
from slipstream_core.ranks.watch import RankEnd


@pytest.fixture
def pids() -> Iterator[tuple[int, int]]:
    processes = [
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)
    ]
    yield processes[0].pid, processes[1].pid
    for each in processes:
        each.kill()
        each.communicate()


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    patience, process = Patience(), psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        patience.wait()


def go_on(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
    patience, process = Patience(), psutil.Process(pid)
    while process.status() == psutil.STATUS_STOPPED:
        patience.wait()


def found(stopped: StoppedProcesses, begin: float) -> list[tuple[float, list[int]]]:
    """Which are stopped for too long, and when, with ten beats in five seconds."""
    moments = [begin + 0.5 * turn for turn in range(10)]
    return [(now, pids) for now in moments if (pids := stopped.overdue(now))]


def test_one_that_stays_stopped_is_found_while_this_process_runs(pids: tuple[int, int]) -> None:
    one, other = pids
    stopped = StoppedProcesses(pids, timeout_s=3.0)
    assert found(stopped, 100.0) == []
    stop(other)
    assert found(stopped, 105.0) == [(at, [other]) for at in (108.0, 108.5, 109.0, 109.5)]
    late = [(at, [other]) for at in (203.0, 203.5, 204.0, 204.5)]
    assert found(stopped, 200.0) == late, "this process was stopped, too"
    stop(one)
    assert stopped.current() == [one, other]
    assert found(stopped, 205.0)[5:7] == [(207.5, [other]), (208.0, [one, other])]
    go_on(other)
    go_on(one)
    assert stopped.current() == []
    assert found(stopped, 210.0) == []


def test_each_is_stopped_for_a_time_of_its_own(pids: tuple[int, int]) -> None:
    """Where one goes on as another one stops, neither is stopped for long."""
    stopped = StoppedProcesses(pids, timeout_s=6.0)
    for turn in range(6):
        stop(pids[turn % 2])
        assert found(stopped, 100.0 + 5 * turn) == []
        go_on(pids[turn % 2])


def test_a_stopped_rank_is_killed_whatever_the_core_does() -> None:
    """It may load, or wait as a spare."""
    config = CoreConfig(model="m", address="unused", tensor_parallel_size=3, hang_timeout_s=0.1)
    ends: queue.Queue[RankEnd] = queue.Queue()
    ranks = Ranks(config, ends.put)
    try:
        one, other = (each.process.pid for each in ranks._started)
        os.kill(one, signal.SIGSTOP)
        end = ends.get(timeout=PATIENCE_S)
        assert (end.rank, end.pid, end.code) == (1, one, -signal.SIGKILL)
        assert psutil.Process(other).is_running()
    finally:
        ranks.close()


def test_a_step_that_does_not_end_has_all_killed_that_are_stopped() -> None:
    config = CoreConfig(model="m", address="unused", tensor_parallel_size=3, hang_timeout_s=1e6)
    ends: queue.Queue[RankEnd] = queue.Queue()
    ranks = Ranks(config, ends.put)
    try:
        assert not ranks.kill_stopped()
        for each in ranks._started:
            stop(each.process.pid)
        assert ranks.kill_stopped()
        assert ends.get(timeout=PATIENCE_S).code == -signal.SIGKILL
        patience = Patience()
        while ranks.kill_stopped():
            patience.wait()
    finally:
        ranks.close()
