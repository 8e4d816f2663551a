"""What every child process does, in real child processes."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from slipstream_ipc.child import STATUS_FD_VARIABLE, report
from slipstream_ipc.messages import Status

PATIENCE_S = 20

CHILD = """
import select
from msgspec import Struct
from slipstream_ipc.child import report, start_child
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


class Statuses:
    """The descriptor that children report to, and what they said."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
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

    def start(self, script: str, config: bytes = b"") -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=(self.write_fd,),
            env=self.environment,
        )
        os.close(self.write_fd)
        assert child.stdin is not None
        child.stdin.write(config)
        child.stdin.close()
        return child


@pytest.fixture
def statuses() -> Iterator[Statuses]:
    statuses = Statuses()
    yield statuses
    os.close(statuses.read_fd)


def test_config_status_and_stop(statuses: Statuses) -> None:
    child = statuses.start(CHILD, b'{"name": "someone"}')
    assert statuses.next() == Status(ready=True, detail="someone")
    child.send_signal(signal.SIGINT)  # the parent's business
    child.send_signal(signal.SIGTERM)
    assert statuses.next() == Status(detail="stopped")
    assert child.wait(PATIENCE_S) == 0


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
