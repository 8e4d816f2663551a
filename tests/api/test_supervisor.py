"""The supervisor against children of every kind, all started for real."""

from __future__ import annotations

import json
import os
import select
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from slipstream.events import Event, ProcessReady, StackFailed, StackReady, SupervisorConfig
from slipstream.processes import ChildSpec

PATIENCE_S = 20.0  # other work shares this machine
STOPPED_WITHIN_S = 5.0

# What a child may be. Each takes a folder on its standard input, where it binds a socket.
PREFACE = """
import json, os, signal, socket, subprocess, sys, time
config = json.loads(sys.stdin.read())
status = int(os.environ["SLIPSTREAM_STATUS_FD"])
def say(**fields): os.write(status, json.dumps(fields).encode() + b"\\n")
listener = socket.socket(socket.AF_UNIX)
listener.bind(config["folder"] + "/" + config["name"] + ".sock")
def forever():
    while True: signal.pause()
"""
GOOD = 'say(ready=True, detail="at your service"); forever()'
SLOW = "forever()"
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say(ready=True, detail="no"); forever()'
FAULTY = 'say(error="model: got 7, allowed: a folder"); sys.exit(1)'
DIES_LATER = """
say(ready=True); os.read(os.open(config["folder"] + "/../cue", os.O_RDONLY), 1); os._exit(3)
"""
DIES_EARLY = "os.kill(os.getpid(), signal.SIGSEGV)"
CHATTY = 'print("on standard output"); sys.stdout.flush(); say(ready=True); forever()'
PARENT = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
say(ready=True, detail=str(child.pid)); forever()
"""


class Running:
    """A supervisor with its events."""

    def __init__(self, tmp_path: Path, **children: str) -> None:
        self.folder = tmp_path / "run"
        specs = tuple(
            ChildSpec(
                name,
                (sys.executable, "-c", PREFACE + code),
                msgspec.Raw(json.dumps({"folder": str(self.folder), "name": name}).encode()),
            )
            for name, code in children.items()
        )
        config = SupervisorConfig(specs, "ipc:///nowhere", str(self.folder), os.getpid())
        self.errors = tmp_path / "stderr"
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slipstream.supervisor"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()
        self.deadline = time.monotonic() + PATIENCE_S
        self.lines = []
        self.rest = b""

    def event(self) -> Event | None:
        """The next event, None at the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.rest:
                assert selector.select(self.deadline - time.monotonic()), self.log()
                chunk = os.read(self.process.stdout.fileno(), 4096)
                if not chunk:
                    return None
                self.rest += chunk
        line, self.rest = self.rest.split(b"\n", 1)
        return msgspec.json.decode(line, type=Event)

    def pids_when_ready(self) -> dict[str, int]:
        """Wait until the stack is ready."""
        pids = {}
        while not isinstance(event := self.event(), StackReady):
            assert isinstance(event, ProcessReady), (event, self.log())
            pids[event.name] = event.pid
        return pids

    def end(self) -> int:
        """Wait for the supervisor's end; nothing may be left of it."""
        code = self.process.wait(self.deadline - time.monotonic())
        assert not self.folder.exists()
        return code

    def log(self) -> str:
        return self.errors.read_text()


@pytest.fixture
def start(tmp_path):
    """Starts supervisors, and cleans up after tests that fail."""
    started = []

    def one(**children):
        started.append(Running(tmp_path, **children))
        return started[-1]

    yield one
    for running in started:
        running.process.kill()
        running.process.wait()
        running.process.stdin.close()
        running.process.stdout.close()


def wait_for_end_of(*pids: int) -> None:
    """Until they have ended, whoever may have to reap them."""
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ended, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        os.close(pidfd)
        assert ended, f"process {pid} lives on"


def test_reports_each_process_and_then_the_stack(start):
    running = start(core=GOOD, worker=GOOD)
    first, second, third = running.event(), running.event(), running.event()
    assert {first.name, second.name} == {"core", "worker"}
    assert first.detail == "at your service"
    assert first.seconds > 0
    assert psutil.Process(first.pid).ppid() == running.process.pid
    assert third == StackReady("ipc:///nowhere")
    assert sorted(path.name for path in running.folder.glob("*.sock")) == [
        "core.sock",
        "worker.sock",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_it_with_code_0_and_nothing_left(start, number):
    running = start(core=GOOD, worker=GOOD)
    pids = running.pids_when_ready()
    begin = time.monotonic()
    running.process.send_signal(number)
    assert running.end() == 0
    assert time.monotonic() - begin < STOPPED_WITHIN_S
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert running.event() is None  # no failure was told


def test_a_signal_before_it_is_ready_ends_it_too(start):
    running = start(core=GOOD, worker=SLOW)
    assert isinstance(running.event(), ProcessReady)
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0


def test_the_end_of_standard_input_ends_it(start):
    running = start(core=GOOD, worker=GOOD)
    running.pids_when_ready()
    running.process.stdin.close()
    assert running.end() == 0
    assert "parent asked" in running.log()


def test_a_child_that_ignores_the_request_is_killed(start):
    running = start(core=GOOD, worker=STUBBORN)
    pids = running.pids_when_ready()
    begin = time.monotonic()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert time.monotonic() - begin < STOPPED_WITHIN_S
    assert f"killing worker (process {pids['worker']})" in running.log()


def test_a_second_signal_kills_at_once(start):
    running = start(core=GOOD, worker=STUBBORN)
    pids = running.pids_when_ready()
    core = psutil.Process(pids["core"])
    running.process.send_signal(signal.SIGINT)
    core.wait(PATIENCE_S)  # so the first signal has been acted upon
    begin = time.monotonic()
    running.process.send_signal(signal.SIGINT)
    assert running.end() == 0
    assert time.monotonic() - begin < 2
    assert "second signal" in running.log()


def test_a_child_that_reports_an_error_ends_the_stack_with_it(start):
    running = start(core=FAULTY, worker=SLOW)
    assert running.event() == StackFailed("core: model: got 7, allowed: a folder")
    assert running.end() == 1
    assert "Traceback" not in running.log()


def test_a_child_that_dies_before_it_is_ready_ends_the_stack(start):
    running = start(core=DIES_EARLY, worker=SLOW)
    error = running.event().error
    assert error.startswith("core (process ")
    assert error.endswith("ended before it was ready: signal SIGSEGV")
    assert running.end() == 1


def test_a_child_that_cannot_be_started_ends_the_stack(tmp_path):
    config = SupervisorConfig(
        (ChildSpec("core", ("/nonexistent/python",), msgspec.Raw(b"{}")),),
        "ipc:///nowhere",
        str(tmp_path / "run"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "slipstream.supervisor"],
        input=msgspec.json.encode(config) + b"\n",
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert b"core: cannot be started" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_child_that_dies_later_ends_the_stack_and_is_named(start, tmp_path):
    os.mkfifo(tmp_path / "cue")
    running = start(core=GOOD, worker=DIES_LATER)
    pids = running.pids_when_ready()
    (tmp_path / "cue").write_text("now")
    ended = f"worker (process {pids['worker']}) ended unexpectedly: exit code 3"
    assert running.event() == StackFailed(ended)
    assert running.end() == 1
    assert ended in running.log()


def test_a_killed_child_is_named_with_its_signal(start):
    running = start(core=GOOD, worker=GOOD)
    os.kill(running.pids_when_ready()["core"], signal.SIGKILL)
    assert running.event().error.endswith("ended unexpectedly: signal SIGKILL")
    assert running.end() == 1


def test_kill_9_of_the_supervisor_leaves_nobody(start):
    """The children here do nothing for it themselves, as one that still imports would not."""
    running = start(core=GOOD, worker=STUBBORN)
    pids = running.pids_when_ready()
    running.process.kill()
    wait_for_end_of(*pids.values())


def test_what_a_child_started_goes_with_it(start):
    running = start(core=PARENT, worker=GOOD)
    event = running.event()
    while event.name != "core":
        event = running.event()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    wait_for_end_of(int(event.detail))


def test_children_write_to_our_standard_error_only(start):
    running = start(core=CHATTY)
    running.pids_when_ready()
    assert "on standard output" in running.log()


def test_a_second_stack_in_the_same_folder_is_refused(start):
    running = start(core=GOOD)
    running.pids_when_ready()
    second = start(core=GOOD)
    error = second.event().error
    assert str(running.folder) in error
    assert f"process {running.process.pid}" in error
    assert second.process.wait(PATIENCE_S) == 1
    assert running.process.poll() is None
    assert (running.folder / "core.sock").exists()


def test_what_a_killed_stack_left_is_cleared_away(start):
    first = start(core=GOOD)
    pids = first.pids_when_ready()
    first.process.kill()
    wait_for_end_of(*pids.values())
    assert (first.folder / "core.sock").exists()
    second = start(core=GOOD)
    second.pids_when_ready()  # its child binds the same socket
    second.process.terminate()
    assert second.process.wait(PATIENCE_S) == 0
    assert list(second.folder.iterdir()) == []  # the folder was there before it


def test_the_death_of_whoever_started_it_ends_it(tmp_path):
    """A fork that holds the other end of the supervisor's standard input does not keep it."""
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANING, sys.executable, str(tmp_path / "orphan"), PREFACE + GOOD],
        stdout=subprocess.PIPE,
    )
    with parent:
        supervisor, holder = (int(word) for word in parent.stdout.readline().split())
        parent.kill()
    try:
        wait_for_end_of(supervisor)
    finally:
        os.kill(holder, signal.SIGKILL)
    assert not (tmp_path / "orphan").exists()


ORPHANING = """
import json, os, signal, subprocess, sys
python, folder, code = sys.argv[1:]
child = {"name": "core", "argv": [python, "-c", code], "config": {"folder": folder, "name": "core"}}
config = {"children": [child], "address": "", "runtime_dir": folder, "parent_pid": os.getpid()}
supervisor = subprocess.Popen(
    [python, "-m", "slipstream.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
supervisor.stdin.write(json.dumps(config).encode() + b"\\n")
supervisor.stdin.flush()
while b"StackReady" not in supervisor.stdout.readline(): pass
holder = os.fork()
if holder:
    print(supervisor.pid, holder, flush=True)
signal.pause()
"""
