"""What every child process does, in real child processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream_ipc.messages import Status
from slipstream_ipc.process import (
    BEAT_S,
    CONTROL_FD_VARIABLE,
    NEWS_S,
    PARENT_PID_VARIABLE,
    STATUS_FD_VARIABLE,
    Activate,
    Beats,
    ChildCommand,
    Drain,
    ParentCommands,
    prepare,
    report,
)

CHILD = """
import select
from msgspec import Struct
from slipstream_ipc.process import report, start_child
from slipstream_ipc.messages import Status

class Config(Struct):
    name: str

config, stop = start_child("child", Config)
report(Status(ready=True, detail=config.name))
select.select([stop], [], [])
assert stop.is_set
report(Status(detail="stopped"))
"""

# starts the child and waits for a death that nobody can prepare for
PARENT = f"""
import signal, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, close_fds=False)
child.stdin.write(b'{{"name": "x"}}')
child.stdin.close()
signal.pause()
"""


# tells what it is commanded; beats all the while
OBEDIENT = """
import time
from msgspec import Struct
from slipstream_ipc.process import *
from slipstream_ipc.messages import Status

class Config(Struct):
    pass

config, stop = start_child("child", Config)
commands, beats = ParentCommands(), Beats()
report(Status(detail="waits"))
active = wait_for_activation(commands, stop, beats)
report(Status(ready=True, detail=repr(active)))
while not stop.is_set:
    for command in commands.read():
        report(Status(detail=repr(command)))
    select.select([commands.fileno(), stop.fileno()], [], [])
"""

FAILS = CHILD.replace("select.select([stop], [], [])", "raise ValueError('no\\nmore')")
# libraries that talk, and threads that wait, when the interpreter ends
ENDS = """
import atexit, sys, threading
from slipstream_ipc.process import run_child

def main():
    atexit.register(print, "torn down")
    threading.Thread(target=threading.Event().wait).start()
    sys.stdout.write("worked")
    {end}

run_child(main)
"""

# it would not end by itself: a thread that waits for ever is in the way
FAILS_WITH_A_THREAD = FAILS.replace(
    "raise", "import threading; threading.Thread(target=threading.Event().wait).start(); raise"
)


class Statuses:
    """The descriptor that children report to, and what they said."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.control_read_fd, self.control_write_fd = os.pipe()
        self.environment = {**os.environ, STATUS_FD_VARIABLE: str(self.write_fd)}

    def next(self) -> Status | None:
        """The next line; None where whoever could write one is gone."""
        line = b""
        while not line.endswith(b"\n"):
            assert select.select([self.read_fd], [], [], PATIENCE_S)[0], "nothing happened"
            more = os.read(self.read_fd, 1)
            if not more:
                return None
            line += more
        return msgspec.json.decode(line, type=Status)

    def command(self, *commands: ChildCommand) -> None:
        """To the child; before or after it has started."""
        for command in commands:
            os.write(self.control_write_fd, msgspec.json.encode(command) + b"\n")

    def start(self, script: str, config: bytes = b"", **more: str) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self.write_fd, self.control_read_fd),
            env={**self.environment, **more},
        )
        os.close(self.write_fd)
        os.close(self.control_read_fd)
        assert child.stdin is not None
        child.stdin.write(config)
        child.stdin.close()
        return child


@pytest.fixture
def statuses() -> Iterator[Statuses]:
    statuses = Statuses()
    yield statuses
    os.close(statuses.read_fd)
    if statuses.control_write_fd >= 0:
        os.close(statuses.control_write_fd)


@pytest.fixture
def obedient(statuses: Statuses) -> Iterator[subprocess.Popen[bytes]]:
    """A child that waits to be activated."""
    control = {CONTROL_FD_VARIABLE: str(statuses.control_read_fd)}
    child = statuses.start(OBEDIENT, b"{}", **control)
    assert statuses.next() == Status(detail="waits")
    yield child
    child.kill()
    child.wait(PATIENCE_S)


def test_config_status_and_stop(statuses: Statuses) -> None:
    child = statuses.start(CHILD, b'{"name": "someone"}')
    assert statuses.next() == Status(ready=True, detail="someone")
    child.send_signal(signal.SIGINT)  # the parent's business
    child.send_signal(signal.SIGTERM)
    assert statuses.next() == Status(detail="stopped")
    assert child.wait(PATIENCE_S) == 0


@pytest.mark.parametrize(
    ("end", "code"), [("return 0", 0), ("return 3", 3), ("sys.exit(2)", 2), ("sys.exit()", 0)]
)
def test_a_child_ends_with_its_work_and_its_code(end: str, code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDS.format(end=end)],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "worked", "")


@pytest.mark.parametrize("config", [b"", b"{", b"{}", b'{"name": 3}', b"\xff"])
def test_a_wrong_config_is_reported(statuses: Statuses, config: bytes) -> None:
    child = statuses.start(CHILD, config)
    status = statuses.next()
    assert status is not None
    assert status.error.startswith("configuration of child: ")
    assert child.wait(PATIENCE_S) == 2


def test_a_child_dies_with_its_parent(statuses: Statuses) -> None:
    parent = statuses.start(PARENT)
    assert statuses.next() == Status(ready=True, detail="x")
    parent.kill()
    parent.wait(PATIENCE_S)
    assert statuses.next() is None


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STATUS_FD_VARIABLE, raising=False)
    report(Status(ready=True))
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(STATUS_FD_VARIABLE, str(write_fd))
    report(Status(error="a line\nis one line"))
    assert msgspec.json.decode(os.read(read_fd, 1000)).get("error") == "a line\nis one line"
    os.close(read_fd)
    report(Status(ready=True))  # whoever listened has gone: no reason to fall over
    os.close(write_fd)


def test_a_spare_beats_until_it_is_activated_and_is_told_what_it_must_know(
    statuses: Statuses, obedient: subprocess.Popen[bytes]
) -> None:
    for _ in range(3):
        assert statuses.next() == Status(beat=True)
    activation = Activate(7, died_within=True)
    statuses.command(activation)
    while (status := statuses.next()) == Status(beat=True):
        pass
    assert status == Status(ready=True, detail=repr(activation))
    statuses.command(Drain(2.5), Drain(0.0))
    assert statuses.next() == Status(detail=repr(Drain(2.5)))
    assert statuses.next() == Status(detail=repr(Drain(0.0)))
    obedient.terminate()
    assert obedient.wait(PATIENCE_S) == 0


def test_a_child_that_nobody_can_command_any_more_ends(
    statuses: Statuses, obedient: subprocess.Popen[bytes]
) -> None:
    os.close(statuses.control_write_fd)
    statuses.control_write_fd = -1
    assert obedient.wait(PATIENCE_S) == 1


def test_a_child_without_commands_is_active_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTROL_FD_VARIABLE, raising=False)
    commands = ParentCommands()
    assert commands.read() == [Activate()]
    assert commands.read() == []
    assert not select.select([commands.fileno()], [], [], 0)[0]


def test_a_command_may_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(CONTROL_FD_VARIABLE, str(read_fd))
    commands = ParentCommands()
    line = msgspec.json.encode(Drain(1.0)) + b"\n"
    os.write(write_fd, line + line[:5])
    assert commands.read() == [Drain(1.0)]
    assert commands.read() == []
    os.write(write_fd, line[5:])
    assert commands.read() == [Drain(1.0)]
    os.close(write_fd)
    os.close(read_fd)


def test_a_spare_prepares_gently_and_who_is_to_serve_at_full_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def fails() -> None:
        raise ImportError("no such luck")

    seen: list[int] = []
    own = niceness()
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(CONTROL_FD_VARIABLE, str(read_fd))
    commands = ParentCommands()
    prepare(lambda: seen.append(niceness()), commands)
    assert niceness() == own
    with pytest.raises(ImportError):
        prepare(fails, commands)
    os.write(write_fd, msgspec.json.encode(Activate()) + b"\n")
    prepare(lambda: seen.append(niceness()), commands)
    assert seen == [min(19, own + 10), own]
    assert commands.read() == [Activate()]  # and it is still there
    os.close(write_fd)
    os.close(read_fd)


def may_lower_niceness() -> bool:
    """Tried in a thread, which has a niceness of its own."""
    allowed: list[bool] = []

    def attempt() -> None:
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + 1)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own)
        except OSError:
            return
        allowed.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(PATIENCE_S)
    return bool(allowed)


@pytest.mark.skipif(not may_lower_niceness(), reason="this user cannot")
def test_a_spare_that_is_to_serve_meanwhile_goes_on_at_full_speed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    seen: list[int] = []
    own = niceness()
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(CONTROL_FD_VARIABLE, str(read_fd))
    commands = ParentCommands()

    def work() -> None:
        seen.append(niceness())
        os.write(write_fd, msgspec.json.encode(Activate()) + b"\n")
        patience = Patience()
        while niceness() != own:
            patience.wait("it goes on at low priority")

    prepare(work, commands)
    assert seen == [min(19, own + 10)]
    assert niceness() == own
    assert commands.read() == [Activate()]
    os.close(write_fd)
    os.close(read_fd)


def test_what_is_said_with_the_activation_is_heard_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(CONTROL_FD_VARIABLE, str(read_fd))
    commands = ParentCommands()
    assert commands.read_activation() is None
    told = [Activate(3), Drain(1.0), Drain(2.0)]
    os.write(write_fd, b"".join(msgspec.json.encode(each) + b"\n" for each in told))
    assert commands.read_activation() == told[0]
    assert commands.any_waiting
    assert commands.read() == told[1:]
    assert not commands.any_waiting
    os.close(write_fd)
    os.close(read_fd)


def test_what_is_no_command_ends_no_child(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(CONTROL_FD_VARIABLE, str(read_fd))
    commands = ParentCommands()
    bad = (b"", b"x", b"\xff", b"{}", b'{"type":"Drain","within_s":null}', b"[" * 10_000)
    os.write(write_fd, b"\n".join(bad) + b"\n" + msgspec.json.encode(Drain(1.0)) + b"\n")
    assert commands.read() == [Drain(1.0)]
    assert len(caplog.records) == len(bad)
    os.close(write_fd)
    os.close(read_fd)


@pytest.mark.parametrize("script", [FAILS, FAILS_WITH_A_THREAD])
def test_last_words_and_a_quick_end(statuses: Statuses, script: str) -> None:
    child = statuses.start(script, b'{"name": "x"}')
    assert statuses.next() == Status(ready=True, detail="x")
    assert statuses.next() == Status(last_words="ValueError: no more")
    assert child.wait(PATIENCE_S) == 1


def test_a_child_whose_parent_died_before_it_could_ask_ends(statuses: Statuses) -> None:
    """As its environment names a parent that is not its own any more."""
    child = statuses.start(CHILD, b'{"name": "x"}', **{PARENT_PID_VARIABLE: "1000000000"})
    assert child.wait(PATIENCE_S) == 1
    assert statuses.next() is None


def test_a_beat_with_news_comes_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    monkeypatch.setenv(STATUS_FD_VARIABLE, str(write_fd))
    beats = Beats()
    turns = [(0.0, 1), (NEWS_S / 2, 32), (NEWS_S, 32), (2 * NEWS_S, 32), (2.1 * NEWS_S, 31)]
    assert [beats.beat(now, news=news) for now, news in turns] == [True, False, True, False, True]
    assert beats.beat(2.1 * NEWS_S + BEAT_S / 2, news=31)
    os.close(write_fd)
    os.close(read_fd)


def test_beats_are_at_most_half_a_beat_apart_and_never_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    monkeypatch.setenv(STATUS_FD_VARIABLE, str(write_fd))
    beats = Beats()
    assert [beats.beat(now) for now in (0.0, BEAT_S / 4, BEAT_S / 2, BEAT_S)] == [
        True,
        False,
        True,
        True,
    ]
    assert os.read(read_fd, 1000).count(b"beat") == 3
    for number in range(20000):  # far more than a pipe holds
        beats.beat(10.0 + number)
    lines = os.read(read_fd, 2**20).splitlines()
    assert [msgspec.json.decode(line, type=Status) for line in set(lines)] == [Status(beat=True)]
    assert len(lines) < 20000
    os.close(read_fd)
    os.close(write_fd)


def test_a_status_that_matters_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    monkeypatch.setenv(STATUS_FD_VARIABLE, str(write_fd))
    said = "x" * 300_000
    writer = threading.Thread(target=report, args=(Status(error=said),))
    writer.start()
    data = b""
    while not data.endswith(b"\n"):
        data += os.read(read_fd, 65536)
    writer.join(PATIENCE_S)
    assert msgspec.json.decode(data, type=Status) == Status(error=said)
    os.close(read_fd)
    os.close(write_fd)
