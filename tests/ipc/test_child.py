"""Children, programs and forks, which start, end and are reaped the same way."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream_ipc.child import ChildProcess, execute
from slipstream_ipc.process import die_with_parent

MODULE = """
import os, sys
from slipstream_ipc.process import report, run_child, start_child
from slipstream_ipc.messages import Status

def main():
    config, _ = start_child("own", dict)
    is_program = __name__ == "__main__"
    given = [each for each in ("SLIPSTREAM_CONTROL_FD", "SECRET") if each in os.environ]
    report(Status(detail=f"{config} {is_program} {given}"))
    os.read(config["fd"], 1)
    return 3

if __name__ == "__main__":
    run_child(main)
"""
STARTER = """
import importlib, json, os, sys, threading
from slipstream_ipc.child import start_own_process

os.environ |= {"SLIPSTREAM_STATUS_FD": "77", "SLIPSTREAM_CONTROL_FD": "78", "SECRET": "kept"}
how = sys.argv[1]
if how != "not imported":
    importlib.import_module("own_module")
if how == "threads":
    threading.Thread(target=threading.Event().wait, daemon=True).start()
reading, writing = os.pipe()
heard, said = os.pipe()
config = json.dumps({"fd": reading}).encode()
fds = (reading, said)
process = start_own_process("own_module", config, "own-1", descriptors=fds, status_fd=said)
os.close(said)
line = b""
while not line.endswith(b"\\n"):
    line += os.read(heard, 4096)
name = open(f"/proc/{process.pid}/comm").read().strip()
parent = open(f"/proc/{process.pid}/stat").read().split()[3] == str(os.getpid())
os.close(writing)
own_end = os.read(heard, 1) == b""
detail = json.loads(line)["detail"].replace(str(reading), "N")
print(f"{detail} {name} {parent} {own_end} {process.wait(30.0)}")
"""


@pytest.mark.parametrize(
    ("how", "is_program"), [("imported", False), ("not imported", True), ("threads", True)]
)
def test_a_fork_starts_and_ends_as_a_program_does(
    how: str, is_program: bool, tmp_path: Path
) -> None:
    (tmp_path / "own_module.py").write_text(MODULE)
    starter = tmp_path / "starter.py"
    starter.write_text(STARTER)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    done = subprocess.run(
        [sys.executable, str(starter), how],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    expected = f"{{'fd': N}} {is_program} ['SECRET'] slip:own-1 True True 3"
    assert done.stdout.strip() == expected, done.stderr


def test_a_process_that_cannot_be_started_says_why() -> None:
    program = """
from slipstream_ipc.child import start_own_process
process = start_own_process("slipstream_ipc.not_there", b"{}", "own")
print(process.wait(30.0))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "1\n"
    assert "No module named slipstream_ipc.not_there" in done.stderr


# ---- ends --------------------------------------------------------------------------------------

READY = "import os, signal, sys; os.write(1, b'r'); "
WAITS = "signal.pause()"
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.write(1, b'd'); signal.pause()"
SAYS = "os.write(1, b'%d' % os.getpid())"
HAS_CHILD = f"os.fork() or {SAYS}; signal.pause()"  # which keeps standard output open


@contextlib.contextmanager
def child_of(code: str, **options: object) -> Iterator[tuple[ChildProcess, int]]:
    """A program that has begun to run `code`, and what reads its standard output."""
    said, saying = os.pipe2(os.O_CLOEXEC)
    command = (sys.executable, "-c", READY + code)
    child = execute(command, os.environ, stdout=saying, **options)  # type: ignore[arg-type]
    os.close(saying)
    try:
        assert os.read(said, 1) == b"r"
        yield child, said
    finally:
        child.reap()
        os.close(said)


def is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def has_ended(said: int) -> bool:
    """True once all writers of a pipe have ended."""
    return bool(select.select([said], [], [], PATIENCE_S)[0]) and os.read(said, 1) == b""


def await_end(child: ChildProcess) -> int:
    patience = Patience()
    while (code := child.ended()) is None:
        patience.wait()
    return code


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(3)", 3), ("sys.exit(0)", 0)]
    + [
        (f"os.kill(os.getpid(), {int(number)})", -number)
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGRTMIN)
    ],
)
def test_an_end_is_seen_before_it_is_reaped(end: str, code: int) -> None:
    with child_of(end) as (child, _):
        assert await_end(child) == code
        assert is_zombie(child.pid), "its pid may be another's"
        assert child.ended() == code
        assert child.reap() == code
        assert not psutil.pid_exists(child.pid)
        assert child.ended() == child.wait() == child.reap(1.0) == code


def test_who_does_not_end_in_time_is_killed() -> None:
    with child_of(DEAF) as (child, said):
        assert os.read(said, 1) == b"d"
        child.terminate()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.0)
        assert child.reap(0.001) == -signal.SIGKILL
    with child_of(WAITS) as (child, _):
        child.terminate()
        assert child.reap(PATIENCE_S) == -signal.SIGTERM
    with child_of(WAITS) as (child, _):
        child.send_signal(signal.SIGSTOP)
        assert child.reap() == -signal.SIGKILL


@pytest.mark.parametrize("leads", [None, "session"])
def test_a_kill_is_for_the_child_alone(leads: str | None) -> None:
    with child_of(HAS_CHILD, leads=leads) as (child, said):
        grandchild = int(os.read(said, 16))
        child.reap()
        assert not is_zombie(grandchild)
        os.kill(grandchild, signal.SIGKILL)
        assert has_ended(said)


@pytest.mark.parametrize("own_end", ["os._exit(4)", "signal.pause()"])
def test_nothing_is_left_of_a_group_when_its_leader_is_reaped(own_end: str) -> None:
    code = f"os.fork() and {own_end}; signal.pause()"
    with child_of(code, leads="group") as (child, said):
        assert os.getpgid(child.pid) == child.pid
        if "exit" in own_end:
            assert await_end(child) == 4
            assert not select.select([said], [], [], 0)[0], "the grandchild has ended"
        assert child.reap() == (4 if "exit" in own_end else -signal.SIGKILL)
        assert has_ended(said), "the grandchild lives on"


def test_a_descriptor_tells_of_the_end() -> None:
    with child_of(WAITS) as (child, _):
        fd = child.fileno()
        assert child.fileno() == fd
        assert not select.select([child], [], [], 0)[0]
        with select.epoll() as exits:
            exits.register(fd, select.EPOLLIN)
            child.kill()
            assert exits.poll(PATIENCE_S) == [(fd, select.EPOLLIN)]
            child.reap()
            assert exits.poll(0) == [], "it is open still"


def no_call(_: int) -> int:
    raise AttributeError("module 'os' has no attribute 'pidfd_open'")


def no_descriptor(_: int) -> int:
    raise OSError(24, "Too many open files")


@pytest.mark.parametrize("pidfd_open", [no_call, no_descriptor])
def test_without_pidfds_ends_are_awaited_all_the_same(
    monkeypatch: pytest.MonkeyPatch, pidfd_open: Callable[[int], int]
) -> None:
    monkeypatch.setattr(os, "pidfd_open", pidfd_open)
    with child_of(WAITS) as (child, _):
        with pytest.raises(OSError):
            child.fileno()
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.02)
        child.terminate()
        assert child.wait(PATIENCE_S) == -signal.SIGTERM
    with child_of("sys.stdin.read(); sys.exit(5)") as (child, _):
        assert child.wait() == 5


def test_no_signal_is_sent_to_a_pid_that_may_be_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[object] = []
    with child_of(WAITS) as (child, _), child_of(WAITS, leads="group") as (leader, _):
        child.reap()
        leader.reap()
        monkeypatch.setattr(os, "kill", lambda *each: sent.append(each))
        monkeypatch.setattr(os, "killpg", lambda *each: sent.append(each))
        for each in (child, leader):
            each.terminate()
            each.kill()
            each.send_signal(signal.SIGSTOP)
            each.reap()
    assert sent == []


def test_a_child_that_something_else_has_reaped_has_ended() -> None:
    """As where SIGCHLD is ignored, or `os.wait` is called: `subprocess` takes it for code 0."""
    with child_of(WAITS) as (child, _), child_of(WAITS) as (reaped, _):
        for each in (child, reaped):
            os.kill(each.pid, signal.SIGKILL)
            os.waitpid(each.pid, 0)
        assert reaped.reap() == 0
        assert child.ended() == child.wait(1.0) == child.reap() == 0


PAUSES = "import os, signal; os.write(1, b'%d' % os.getpid()); signal.pause()"
EXECUTES = f"""
before = partial(die_with_parent, os.getpid())
execute((sys.executable, "-c", {PAUSES!r}), os.environ, stdout=1, leads="session", before=before)
"""
FORKS = f"""
def main():
    exec({PAUSES!r})
    return 0
fork(main, {{}}, {{}}, leads_group=True)
"""


@pytest.mark.parametrize("starts", [EXECUTES, FORKS])
def test_a_child_dies_with_the_process_that_started_it(starts: str) -> None:
    """`before` is called in the child, before its first line of Python."""
    said, saying = os.pipe2(os.O_CLOEXEC)
    starter = f"""
import os, signal, sys
from functools import partial
from slipstream_ipc.child import execute, fork
from slipstream_ipc.process import die_with_parent
{starts}
signal.pause()
"""
    parent = execute((sys.executable, "-c", starter), os.environ, stdout=saying)
    os.close(saying)
    assert int(os.read(said, 16)) != parent.pid
    parent.reap()
    assert has_ended(said)
    os.close(said)


def test_a_parent_that_is_dead_already_has_no_children() -> None:
    """`os.getppid` in the child is not the pid that it was given."""
    with pytest.raises(OSError):
        execute((sys.executable, "-c", ""), os.environ, before=partial(die_with_parent, 1))


class Oracle:
    """The states of a child as its parent is to see them."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.is_reaped = False

    def end(self, code: int) -> None:
        self.code = code if self.code is None else self.code


CALLS = ("ended", "reap", "kill", "terminate", "wait", "exit", "late wait")


@given(calls=st.lists(st.sampled_from(CALLS), max_size=8))
def test_calls_in_any_order_see_one_end(calls: list[str]) -> None:
    stdin, stdin_end = os.pipe2(os.O_CLOEXEC)
    pid = os.posix_spawn(
        "/bin/sh",
        ("sh", "-c", "read line; exit 7"),
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, stdin, 0)],
    )
    os.close(stdin)
    child, oracle = ChildProcess(pid), Oracle()
    with os.fdopen(stdin_end, "wb") as line:
        for call in calls:
            match call:
                case "exit":
                    oracle.end(7)
                    line.close()
                    await_end(child)
                case "kill" | "terminate":
                    oracle.end(-signal.SIGKILL if call == "kill" else -signal.SIGTERM)
                    getattr(child, call)()
                    await_end(child)
                case "late wait":
                    if oracle.code is None:
                        with pytest.raises(subprocess.TimeoutExpired):
                            child.wait(0.0)
                case "reap":
                    oracle.end(-signal.SIGKILL)
                    assert child.reap() == oracle.code
                    oracle.is_reaped = True
                case "wait":
                    oracle.is_reaped = oracle.is_reaped or oracle.code is not None
                    assert oracle.code is None or child.wait() == oracle.code
                case _:
                    assert child.ended() == oracle.code
            assert psutil.pid_exists(pid) is not oracle.is_reaped
    child.reap()
