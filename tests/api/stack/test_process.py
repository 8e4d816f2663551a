"""What a child's end is put down to: its own doing, or what was done to it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.stack.children import process, process_usage
from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.process_usage import (
    ProcessUsage,
    cpu_wait_s,
    num_oom_kills,
    usage_of,
)
from slipstream_ipc import run_delay
from slipstream_ipc.run_delay import loop_wait_s

BEATS = """
import os, signal
os.write(int(os.environ["SLIPSTREAM_STATUS_FD"]), b'{"beat": true}\\n')
while True: signal.pause()
"""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory.events of a cgroup that is made of files."""
    own = tmp_path / "cgroup" / "a" / "b"
    own.mkdir(parents=True)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text("4:memory:/else\n0::/a/b\n")
    monkeypatch.setattr(process_usage, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(process_usage, "_PROC", tmp_path / "proc")
    return own / "memory.events"


def say(events: Path, num_kills: int) -> None:
    events.write_text(f"low 0\nhigh 3\nmax 5\noom 7\noom_kill {num_kills}\noom_group_kill 0\n")


def test_the_kernels_count_is_read_where_there_is_one(events: Path) -> None:
    assert num_oom_kills() == 0
    say(events, 4)
    assert num_oom_kills() == 4
    events.rename(events.parents[2] / "memory.events")  # a container may see its own as the root
    assert num_oom_kills() == 4
    (events.parents[2] / "memory.events").write_text("what is this")
    assert num_oom_kills() == 0


@pytest.mark.parametrize("is_counted", [False, True])
def test_a_kill_is_from_within_where_the_kernel_counts_one(events: Path, is_counted: bool) -> None:
    say(events, 2)
    child = Child(ChildSpec("core", (sys.executable, "-c", BEATS), msgspec.Raw(b"{}")))
    try:
        assert select.select([child.status], [], [], PATIENCE_S)[0]
        say(events, 3)  # of another's, before its last beat
        child.read_status()
        assert child.last_beat_at is not None
        if is_counted:
            say(events, 4)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    finally:
        exit_ = child.reap()
    how = "signal SIGKILL, the kernel's: out of memory" if is_counted else "signal SIGKILL"
    assert exit_ == ChildExit(how, is_own_fault=is_counted)


@pytest.mark.parametrize(
    ("cpu_s", "wait_s", "is_busy"),
    [
        (5.0, 0.0, True),
        (0.6, 0.0, True),  # where the kernel tells no waiting: a tenth of a CPU
        (0.4, 0.0, False),
        (0.2, 4.7, True),  # it spins among 24 others
        (0.2, 0.3, False),  # it wakes up now and then
        (0.05, 4.95, False),  # it was never let run: its loop may be sound
        (0.0, 0.0, False),
    ],
)
def test_a_silent_child_is_busy_if_it_used_the_cpu_time_that_it_could_have(
    monkeypatch: pytest.MonkeyPatch, cpu_s: float, wait_s: float, is_busy: bool
) -> None:
    child = Child(ChildSpec("core", (sys.executable, "-c", BEATS), msgspec.Raw(b"{}")))
    try:
        used, waited = ProcessUsage(2.0, 2**20), 7.0
        monkeypatch.setattr(process, "usage_of", lambda *_, **__: used)
        monkeypatch.setattr(process, "cpu_wait_s", lambda _: waited)
        child.measure_cpu(100.0)
        used, waited = ProcessUsage(2.0 + cpu_s, 2**20), 7.0 + wait_s
        assert child.is_busy(105.0) is is_busy
        os.kill(child.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert not child.is_busy(105.0)
    finally:
        child.reap()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell")
def test_what_waits_for_a_cpu_that_another_has_is_counted() -> None:
    own, spin = min(os.sched_getaffinity(0)), "while True: pass"
    pin = f"import os; os.sched_setaffinity(0, [{own}])"
    spinners = [
        subprocess.Popen([sys.executable, "-c", f"{pin}\n{spin}"], stdin=subprocess.DEVNULL)
        for _ in range(2)
    ]
    try:
        patience = Patience()
        while cpu_wait_s(spinners[0].pid) < 0.2:
            patience.wait("it never waits")
    finally:
        for spinner in spinners:
            spinner.kill()
            spinner.wait(PATIENCE_S)
    assert cpu_wait_s(spinners[0].pid) == 0.0


def test_a_child_that_lacks_a_cpu_has_as_much_longer_for_its_beat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine with a load of 12 a healthy worker was killed for 3 s of silence."""
    child = Child(ChildSpec("core", (sys.executable, "-c", BEATS), msgspec.Raw(b"{}")))
    try:
        waited = 7.0
        monkeypatch.setattr(run_delay, "loop_wait_s", lambda _: waited)
        child.last_beat_at = 100.0
        assert child.hangs_at(3.0) == 103.0
        child.measure_cpu(101.5)
        assert child.hangs_at(3.0) == 103.0
        waited = 9.5
        assert child.hangs_at(3.0) == 105.5
        waited = 6.0  # of another thread, perhaps: never less than the timeout
        assert child.hangs_at(3.0) == 103.0
    finally:
        child.kill()
        child.reap()


def test_what_a_process_lacks_of_cpu_is_counted_and_what_it_is_stopped_is_not() -> None:
    """It shares a CPU with another that spins, and goes behind it."""
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nwhile True: pass"
    spins = (sys.executable, "-c", code)
    starved, other = [subprocess.Popen(spins) for _ in range(2)]
    try:
        before, patience = loop_wait_s(starved.pid), Patience()
        while loop_wait_s(starved.pid) < before + 0.3:
            patience.wait()
        starved.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, starved.pid, os.WSTOPPED | os.WNOWAIT)
        at_stop, others = loop_wait_s(starved.pid), usage_of(other.pid)
        assert others is not None
        while True:  # the other one has the CPU meanwhile
            later = usage_of(other.pid)
            assert later is not None
            if later.cpu_s > others.cpu_s + 0.2:
                break
            patience.wait()
        assert loop_wait_s(starved.pid) == at_stop
    finally:
        for each in (starved, other):
            each.kill()
            each.wait()
    assert loop_wait_s(starved.pid) == 0.0
