"""What a child's end is put down to: its own doing, or what was done to it."""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S

from slipstream.stack.children import process_usage
from slipstream.stack.children.process import Child, ChildExit, ChildSpec
from slipstream.stack.children.process_usage import num_oom_kills

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
