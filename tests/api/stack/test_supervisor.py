"""The supervisor against children of every kind, all started for real."""

from __future__ import annotations

import contextlib
import json
import os
import select
import selectors
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.stack.children.process import ChildSpec
from slipstream.stack.supervisor import Supervisor
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessReady,
    ProcessRestarted,
    ProcessStarted,
    RequestsRunning,
    SpareReady,
    StackDraining,
    StackEvent,
    StackFailed,
    StackReady,
    SupervisorConfig,
)

# What a child may be. Each takes a folder on its standard input, where it binds a socket.
PREFACE = """
import json, os, signal, socket, subprocess, sys, time
config = json.loads(sys.stdin.read())
status = int(os.environ["SLIPSTREAM_STATUS_FD"])
def say(**fields): os.write(status, json.dumps(fields).encode() + b"\\n")
listener = socket.socket(socket.AF_UNIX)
address = config["folder"] + "/" + config["name"] + ".sock"
if os.path.exists(address): os.unlink(address)
listener.bind(address)
def forever():
    while True: signal.pause()
"""
GOOD = 'say(ready=True, detail="at your service"); forever()'
SLOW = "forever()"
STUBBORN = 'signal.signal(signal.SIGTERM, signal.SIG_IGN); say(ready=True, detail="no"); forever()'
FAULTY = 'say(error="model: got 7, allowed: a folder"); sys.exit(1)'
MISCONFIGURED = FAULTY.replace(");", ", is_misconfigured=True);")
DIES_AFTERWARDS = "say(ready=True); os._exit(3)"
DIES_EARLY = "os.kill(os.getpid(), signal.SIGSEGV)"
CHATTY = 'print("on standard output"); sys.stdout.flush(); say(ready=True); forever()'
PARENT = """
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
say(ready=True, detail=str(child.pid)); forever()
"""

# What a child may be that keeps the whole contract: it binds its socket when it is activated, says
# its incarnation and how the one before it died, beats, and does what its cue (a FIFO, one
# letter to a deed) says. `DOES` are the deeds.
DOES = """
def die(): os._exit(3)
def fail(): raise ZeroDivisionError("what cannot be")
def crash(): signal.signal(signal.SIGSEGV, signal.SIG_DFL); os.kill(os.getpid(), signal.SIGSEGV)
def stop_beating(): forever()
def spin():
    while True: pass
def say_drained(): report(Status(drained=True))
def say_running(): report(Status(num_running=2))
def say_cut(): report(Status(drained=True, num_cut=1))
def babble():
    fd = int(os.environ["SLIPSTREAM_STATUS_FD"])
    for line in GARBAGE: os.write(fd, line + b"\\n")
    report(Status(beat=True, detail="babbled"))
GARBAGE = (b"", b"\\xff", b"[]", b'{"beat": true, "numbers": {"type": "core", "counters": '
    b'{"device_idle_s": NaN}}}', b'{"beat": true, "numbers": {"type": "core", "counters": '
    b'{"device_idle_s": null}}}', b'{"ready": 7}', b'{"error": 7}', b"[" * 2000)
deeds = {
    "d": die, "f": fail, "c": crash, "h": stop_beating, "s": spin, "e": say_drained, "b": babble,
    "r": say_running, "u": say_cut
}
"""
WHOLE = (
    """
import os, select, signal, socket, sys, time
from msgspec import Struct
from slipstream_ipc.process import *
from slipstream_ipc.messages import Status
class Config(Struct):
    folder: str
    name: str
def forever():
    while True: signal.pause()
config, stop = start_child("child", Config)
commands, beats = ParentCommands(), Beats()
cue = os.open(config.folder + "/../" + config.name + ".cue", os.O_RDWR | os.O_NONBLOCK)
"""
    + DOES
    + """
active = wait_for_activation(commands, stop, beats)
if active is None: sys.exit()
# LOADS
listener = socket.socket(socket.AF_UNIX)
address = config.folder + "/" + config.name + ".sock"
if os.path.exists(address): os.unlink(address)
listener.bind(address)
open(f"{config.folder}/own-{os.getpid()}.sock", "w").close()
beats.beat(time.monotonic())
told = f"{active.incarnation} {active.died_within}"
report(Status(ready=True, detail=told))
while not stop.is_set:
    ready, _, _ = select.select([stop.fileno(), commands.fileno(), cue], [], [], BEAT_S)
    beats.beat(time.monotonic())
    if commands.fileno() in ready:
        for command in commands.read(): print(f"{config.name} was told {command}", file=sys.stderr)
    if cue in ready:
        deeds[os.read(cue, 1).decode()]()
"""
)


# A whole child that says it loads, says so to the test too, and goes on when it is told.
LOADS = WHOLE.replace(
    "# LOADS",
    "report(Status(beat=True)); report(Status(loading=True))\n"
    "open(config.folder + '/../loading', 'w').close()\n"
    "select.select([cue], [], []); os.read(cue, 1)",
)
SETTINGS = ("hang_timeout_s", "max_restarts", "restart_window_s", "drain_s")


class Running:
    """A supervisor with its events."""

    def __init__(self, tmp_path: Path, **given: object) -> None:
        """`given`: code by name of child, and settings."""
        self.folder = tmp_path / "run"
        settings = {name: given.pop(name) for name in SETTINGS if name in given}
        spares, drains = given.pop("spares", ()), given.pop("drains", ())
        program = given.pop("program", "")  # that is the supervisor
        specs = tuple(
            ChildSpec(
                name,
                (sys.executable, "-c", code if "start_child" in code else PREFACE + code),
                msgspec.Raw(json.dumps({"folder": str(self.folder), "name": name}).encode()),
                has_spare=name in spares,
                drains=name in drains,
            )
            for name, code in given.items()
        )
        self.cues = {}
        for name, code in given.items():
            if "start_child" in code:
                path = tmp_path / f"{name}.cue"
                if not path.exists():
                    os.mkfifo(path)
                self.cues[name] = os.open(path, os.O_RDWR)
        config = SupervisorConfig(
            specs, "ipc:///nowhere", str(self.folder), os.getpid(), **settings
        )
        self.errors = tmp_path / "stderr"
        with self.errors.open("wb") as stderr:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    *(("-c", program) if program else ("-m", "slipstream.stack.supervisor")),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()
        self.deadline = time.monotonic() + PATIENCE_S
        self.lines = []
        self.rest = b""

    def event(self) -> StackEvent | None:
        """The next event that is more than a start, None at the end."""
        while isinstance(event := self.any_event(), ProcessStarted):
            pass
        return event

    def expect(self, kind):
        """The next event of this kind; nothing but what leads to it comes before."""
        event = self.event()
        while isinstance(event, StackReady | SpareReady | ProcessEnded) and type(event) is not kind:
            event = self.event()
        assert isinstance(event, kind), (event, self.log())
        return event

    def cue(self, name: str, deed: str) -> None:
        """Have a whole child do something."""
        os.write(self.cues[name], deed.encode())

    def any_event(self) -> StackEvent | None:
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
        return msgspec.json.decode(line, type=StackEvent)

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
        running.process.wait(PATIENCE_S)
        running.process.stdin.close()
        running.process.stdout.close()
        for cue in running.cues.values():
            os.close(cue)


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


# A supervisor that has a terminal, and one that has none, whatever the tests have.
ON_A_TERMINAL = """
import fcntl, os, pty, sys, termios
from slipstream.stack import supervisor
os.setsid()
_, end = pty.openpty()
fcntl.ioctl(end, termios.TIOCSCTTY, 0)
sys.exit(supervisor.main())
"""
WITHOUT_A_TERMINAL = """
import os, sys
from slipstream.stack import supervisor
os.setsid()
sys.exit(supervisor.main())
"""


@pytest.mark.parametrize(
    ("number", "program"),
    [(signal.SIGTERM, ""), (signal.SIGINT, ""), (signal.SIGHUP, ON_A_TERMINAL)],
)
def test_a_signal_ends_it_with_code_0_and_nothing_left(start, number, program):
    running = start(core=GOOD, worker=GOOD, program=program)
    pids = running.pids_when_ready()
    running.process.send_signal(number)
    assert running.end() == 0
    assert not any(psutil.pid_exists(pid) for pid in pids.values())
    assert running.event() is None  # no failure was told


def test_a_hang_up_without_a_terminal_ends_nothing(start):
    """Tools that rotate logs send it to daemons."""
    running = start(core=GOOD, program=WITHOUT_A_TERMINAL)
    pids = running.pids_when_ready()
    running.process.send_signal(signal.SIGHUP)
    os.kill(pids["core"], signal.SIGKILL)  # what is handled after it
    assert running.expect(ProcessRestarted).name == "core"
    assert "SIGHUP" in running.log()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0


def test_a_hang_up_has_the_fronts_read_their_keys_anew(tmp_path):
    specs = [
        ChildSpec("core", (), msgspec.Raw(b"{}")),
        *[
            ChildSpec(f"http-{number}", (), msgspec.Raw(b"{}"), front_index=number)
            for number in range(2)
        ],
    ]
    supervisor = Supervisor(SupervisorConfig(tuple(specs), "ipc://a", str(tmp_path)), print)
    told = []
    supervisor._children = [
        SimpleNamespace(name=name, reload=partial(told.append, name))
        for name in ("core", "http-0", "http-1", "http-1")  # and a spare of it
    ]
    supervisor._has_terminal = False
    supervisor._on_signals(SimpleNamespace(drain=lambda: [signal.SIGHUP]))
    assert told == ["http-0", "http-1", "http-1"]
    assert supervisor._phase == "starting"


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
    assert "the parent requested it" in running.log()


@pytest.mark.process
def test_a_child_that_ignores_the_request_is_killed(start):
    running = start(core=GOOD, worker=STUBBORN)
    pids = running.pids_when_ready()
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert f"killing worker (process {pids['worker']})" in running.log()


def test_a_second_signal_kills_at_once(start):
    running = start(core=GOOD, worker=STUBBORN)
    pids = running.pids_when_ready()
    core = psutil.Process(pids["core"])
    running.process.send_signal(signal.SIGINT)
    core.wait(PATIENCE_S)  # so the first signal has been acted upon
    running.process.send_signal(signal.SIGTERM)
    assert running.end() == 0
    assert f"killing worker (process {pids['worker']}): another signal" in running.log()


# A supervisor on a machine where a process takes a while to end of SIGKILL, as large ones do.
SLOW_TO_KILL = """
import contextlib, os, sys, threading
from slipstream.stack import supervisor
def later(pid, number, kill=os.killpg):
    def now():
        with contextlib.suppress(ProcessLookupError): kill(pid, number)
    threading.Timer(2.0, now).start()
os.killpg = later
sys.exit(supervisor.main())
"""


def test_a_child_that_takes_long_to_die_is_waited_for(start):
    running = start(core=GOOD, worker=STUBBORN, program=SLOW_TO_KILL)
    core = psutil.Process(running.pids_when_ready()["core"])
    running.process.send_signal(signal.SIGTERM)
    core.wait(PATIENCE_S)
    for number in (signal.SIGINT, signal.SIGTERM):
        running.process.send_signal(number)
    assert running.end() == 0
    assert "it is abandoned" not in running.log()


@pytest.mark.parametrize(("child", "code"), [(FAULTY, 1), (MISCONFIGURED, 2)])
def test_a_child_that_reports_an_error_ends_the_stack_with_it(start, child, code):
    running = start(core=child, worker=SLOW)
    assert running.event() == StackFailed("core: model: got 7, allowed: a folder")
    assert running.end() == code
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
        [sys.executable, "-m", "slipstream.stack.supervisor"],
        input=msgspec.json.encode(config) + b"\n",
        capture_output=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 1
    assert b"core: cannot be started" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_killed_child_is_replaced_and_the_stack_goes_on(start):
    running = start(core=WHOLE, worker=WHOLE)
    pids = running.pids_when_ready()
    os.kill(pids["worker"], signal.SIGKILL)
    assert running.event() == ProcessEnded("worker", pids["worker"], "signal SIGKILL")
    started = running.any_event()
    assert isinstance(started, ProcessStarted)
    again = running.event()
    assert isinstance(again, ProcessRestarted)
    assert (again.name, again.pid, again.how) == ("worker", started.pid, "signal SIGKILL")
    assert again.pid != pids["worker"]
    assert again.seconds > 0
    assert psutil.pid_exists(pids["core"])
    log = running.log()
    assert f"worker (process {pids['worker']}) ended: signal SIGKILL; another one replaces" in log
    assert f"worker is process {again.pid} now" in log
    running.process.terminate()
    assert running.end() == 0


@pytest.mark.parametrize(
    ("deed", "how", "within"),
    [
        ("d", "exit code 3", True),
        ("f", "exit code 1 (ZeroDivisionError: what cannot be)", True),
        ("c", "signal SIGSEGV", True),
        (signal.SIGKILL, "signal SIGKILL", False),
        (signal.SIGTERM, "exit code 0", False),
    ],
)
@pytest.mark.parametrize("spares", [(), ("core",)])
def test_a_successor_is_told_its_incarnation_and_how_the_last_one_died(
    start, deed, how, within, spares
):
    running = start(core=WHOLE, spares=spares)
    first = running.expect(ProcessReady)
    assert first.detail == "1 False"
    if isinstance(deed, str):
        running.cue("core", deed)
    else:
        os.kill(first.pid, deed)
    assert running.expect(ProcessEnded).how == how
    again = running.expect(ProcessRestarted)
    assert again.detail == f"2 {within}"


def test_what_a_child_dies_of_is_logged_in_full(start):
    running = start(core=WHOLE)
    running.pids_when_ready()
    running.cue("core", "f")
    running.expect(ProcessRestarted)
    assert "Traceback" in running.log()


def test_what_a_child_says_that_cannot_be_ends_nobody_and_is_logged(start):
    running = start(core=WHOLE, worker=WHOLE, spares=("worker",))
    pids = running.pids_when_ready()
    running.expect(SpareReady)
    running.cue("core", "b")
    running.cue("core", "d")
    assert running.expect(ProcessEnded).how == "exit code 3"  # that, and not what it had said
    assert running.expect(ProcessRestarted).name == "core"
    assert psutil.pid_exists(pids["worker"])
    said = [line for line in running.log().splitlines() if " reported " in line]
    assert all(f" core (process {pids['core']}) reported " in line for line in said)
    assert [line.rpartition("(")[2] for line in said] == [
        "1 times)",
        "2 times)",
        "4 times)",
        "8 times)",
    ]


@pytest.mark.parametrize(
    ("deed", "within"),
    [("stopped from outside", False), ("its loop waits", False), ("its loop spins", True)],
)
def test_a_hung_child_is_killed_and_reaped_before_another_starts(start, deed, within):
    running = start(core=WHOLE, worker=GOOD, hang_timeout_s=1.0)  # GOOD never hangs: it beats not
    pids = running.pids_when_ready()
    if deed == "its loop waits":
        running.cue("core", "h")
    elif deed == "its loop spins":
        running.cue("core", "s")
    else:
        os.kill(pids["core"], signal.SIGSTOP)
    ended = running.expect(ProcessEnded)
    assert (ended.name, ended.how) == ("core", "hung: no heartbeat for 1 s")
    assert not psutil.pid_exists(pids["core"])  # not even a zombie
    assert running.expect(ProcessRestarted).detail == f"2 {within}"
    assert psutil.pid_exists(pids["worker"])


def test_children_whose_beats_wake_nobody_are_noticed_when_they_hang(start):
    """None of them has news, so the supervisor has nothing but its timers."""
    running = start(core=WHOLE, worker=WHOLE, spares=("worker",), hang_timeout_s=4.0)
    pids = running.pids_when_ready()
    spare = running.expect(SpareReady).pid
    os.kill(spare, signal.SIGSTOP)
    other = running.expect(SpareReady).pid
    assert not psutil.pid_exists(spare)
    running.cue("worker", "h")
    ended = running.expect(ProcessEnded)
    assert (ended.name, ended.how) == ("worker", "hung: no heartbeat for 4 s")
    assert running.expect(ProcessRestarted).pid == other
    assert psutil.pid_exists(pids["core"])


def test_a_child_that_hangs_behind_its_loading_before_its_first_beat_is_killed(start):
    code = "say(loading=True); say(ready=True); forever()"
    running = start(core=code, hang_timeout_s=1.0)
    running.pids_when_ready()
    assert running.expect(ProcessEnded).how == "hung: no heartbeat for 1 s"


def test_a_child_that_is_stopped_again_and_again_did_nothing_itself(start):
    running = start(core=WHOLE, hang_timeout_s=1.0)
    pid = running.pids_when_ready()["core"]
    for incarnation in (2, 3, 4):
        os.kill(pid, signal.SIGSTOP)
        assert running.expect(ProcessEnded).how.startswith("hung")
        again = running.expect(ProcessRestarted)
        assert again.detail == f"{incarnation} False"
        pid = again.pid


def test_silence_while_a_child_loads_is_no_hang(start, tmp_path):
    """Neither before its first beat, nor after it has said that it loads."""
    os.mkfifo(tmp_path / "loading")
    running = start(core=LOADS, worker=WHOLE, http=SLOW, hang_timeout_s=1.0)
    assert running.expect(ProcessReady).name == "worker"
    (tmp_path / "loading").read_text()  # until it says so
    for _ in range(2):  # by then they have been silent for longer than the timeout
        running.cue("worker", "h")
        assert running.expect(ProcessEnded).name == "worker"
        assert running.expect(ProcessRestarted).name == "worker"
    running.cue("core", ".")
    assert running.expect(ProcessReady).detail == "1 False"
    assert "hung" not in "".join(line for line in running.log().splitlines() if "core" in line)


def test_a_stopped_supervisor_takes_nobody_for_hung(start):
    running = start(core=WHOLE, worker=WHOLE, hang_timeout_s=3.0)
    pids = running.pids_when_ready()
    running.process.send_signal(signal.SIGSTOP)
    threading.Event().wait(3.5)  # time itself is what is tested: the children beat on unread
    running.process.send_signal(signal.SIGCONT)
    os.kill(pids["worker"], signal.SIGKILL)
    assert running.expect(ProcessEnded).name == "worker"
    assert running.expect(ProcessRestarted).name == "worker"
    assert psutil.pid_exists(pids["core"])


def test_a_spare_takes_over_and_another_follows(start):
    running = start(core=WHOLE, worker=WHOLE, spares=("worker",))
    pids = running.pids_when_ready()
    spare = running.expect(SpareReady)
    assert (spare.name, spare.seconds > 0) == ("worker", True)
    assert "started " not in running.log()
    assert "spare" not in running.log()
    for _ in range(2):
        os.kill(pids["worker"], signal.SIGKILL)
        again = running.expect(ProcessRestarted)
        assert again.pid == spare.pid
        pids["worker"], spare = again.pid, running.expect(SpareReady)
    assert again.detail == "3 False"
    running.process.terminate()
    assert running.end() == 0
    wait_for_end_of(spare.pid)


def test_a_spare_that_is_not_there_yet_takes_over_all_the_same(start):
    """Two deaths in a row: the second one's successor may still be on its way."""
    running = start(core=WHOLE, spares=("core",))
    pid = running.pids_when_ready()["core"]
    for _ in range(3):
        os.kill(pid, signal.SIGKILL)
        pid = running.expect(ProcessRestarted).pid
    assert len(psutil.Process(running.process.pid).children()) <= 2


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP])
def test_a_spare_that_dies_is_replaced_and_nobody_minds(start, deed):
    running = start(core=WHOLE, spares=("core",), hang_timeout_s=1.0)
    pid = running.pids_when_ready()["core"]
    spare = running.expect(SpareReady).pid
    os.kill(spare, deed)
    other = running.expect(SpareReady).pid
    assert other != spare
    assert not psutil.pid_exists(spare)
    os.kill(pid, signal.SIGKILL)
    assert running.expect(ProcessRestarted).pid == other


def test_a_child_that_dies_too_often_ends_the_stack_with_code_1(start):
    running = start(core=WHOLE, worker=WHOLE, max_restarts=2)
    pid = running.pids_when_ready()["core"]
    for _ in range(2):
        os.kill(pid, signal.SIGKILL)
        pid = running.expect(ProcessRestarted).pid
    os.kill(pid, signal.SIGKILL)
    error = running.expect(StackFailed).error
    assert error == (
        f"core (process {pid}) ended: signal SIGKILL; 2 restarts within 300 s are allowed "
        "(max_restarts, restart_window_s)"
    )
    assert running.end() == 1
    assert error in running.log()


def test_a_child_that_dies_as_soon_as_it_is_ready_is_not_started_for_ever(start):
    running = start(core=DIES_AFTERWARDS, max_restarts=3)
    while not isinstance(event := running.event(), StackFailed):
        assert isinstance(event, ProcessReady | StackReady | ProcessEnded | ProcessRestarted)
    assert "core (process" in event.error
    assert "exit code 3" in event.error, running.log()
    assert running.end() == 1


def test_a_successor_that_reports_an_error_ends_the_stack_with_it(start, tmp_path):
    broken = WHOLE.replace(
        "# LOADS",
        "active.incarnation == 1 or (report(Status(error='no such', is_misconfigured=True)), "
        "sys.exit(1))",
    )
    running = start(core=broken)
    os.kill(running.pids_when_ready()["core"], signal.SIGKILL)
    running.expect(ProcessEnded)
    assert running.expect(StackFailed).error == "core: no such"
    assert running.end() == 1  # the configuration has served, so another start may serve


def test_files_of_a_dead_child_are_removed(start):
    running = start(core=WHOLE, worker=WHOLE)
    pids = running.pids_when_ready()
    os.kill(pids["core"], signal.SIGKILL)
    running.expect(ProcessRestarted)
    own = {path.name for path in running.folder.glob("own-*.sock")}
    assert f"own-{pids['core']}.sock" not in own
    assert f"own-{pids['worker']}.sock" in own
    assert len(own) == 2


# ---- draining ----------------------------------------------------------------------------------


def test_a_signal_drains_first(start):
    """The worker is told, and says when nothing runs any more; the core is left alone till then."""
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=1000.0)
    running.pids_when_ready()
    running.process.terminate()
    assert running.expect(StackDraining).within_s == 1000.0
    running.cue("worker", "e")
    assert running.end() == 0
    assert "worker was told Drain(within_s=1000.0)" in running.log()


def test_what_runs_is_counted_and_what_is_cut_off_is_said(start):
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=1000.0)
    running.pids_when_ready()
    running.process.terminate()
    running.expect(StackDraining)
    running.cue("worker", "r")
    event = running.expect(RequestsRunning)
    assert (event.num, 0.0 < event.within_s <= 1000.0) == (2, True)
    running.cue("worker", "u")
    assert running.end() == 0
    assert "stopping (1 request was cut off)" in running.log()


def test_what_does_not_end_within_drain_s_is_ended(start):
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=0.1)
    running.pids_when_ready()
    running.process.terminate()
    running.expect(StackDraining)
    assert running.end() == 0
    assert "drain_s=0.1 is over" in running.log()


REPEATS_WITHIN = """
import sys
from slipstream.stack import supervisor
supervisor.REPEAT_S = {!r}
sys.exit(supervisor.main())
"""


@pytest.mark.parametrize(("second", "repeat_s"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 1e9)])
def test_a_second_signal_ends_the_drain(start, second, repeat_s):
    program = REPEATS_WITHIN.format(repeat_s)
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=1000.0, program=program)
    running.pids_when_ready()
    running.process.send_signal(signal.SIGINT)
    running.expect(StackDraining)
    running.process.send_signal(second)
    assert running.end() == 0
    assert f"stopping ({second.name})" in running.log()


def test_a_signal_that_comes_twice_at_once_counts_once(start):
    """Wrappers send it to a process and to its group, which is the same process again."""
    program = REPEATS_WITHIN.format(1e9)
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=1000.0, program=program)
    running.pids_when_ready()
    running.process.send_signal(signal.SIGTERM)
    running.expect(StackDraining)
    running.process.send_signal(signal.SIGTERM)
    running.cue("worker", "e")
    assert running.end() == 0
    assert "stopping (all requests have ended)" in running.log()


def test_whoever_dies_while_the_stack_drains_is_replaced(start):
    running = start(core=WHOLE, worker=WHOLE, drains=("worker",), drain_s=1000.0)
    pids = running.pids_when_ready()
    running.process.terminate()
    running.expect(StackDraining)
    os.kill(pids["worker"], signal.SIGKILL)
    running.expect(ProcessRestarted)
    running.cue("worker", "e")
    assert running.end() == 0


def test_no_parent_no_drain(start):
    running = start(core=WHOLE, drains=("core",), drain_s=1000.0)
    running.pids_when_ready()
    running.process.stdin.close()
    assert running.end() == 0


# ---- the end of everything ---------------------------------------------------------------------


def test_kill_9_of_the_supervisor_leaves_nobody(start):
    """The children here do nothing for it themselves, as one that still imports would not."""
    running = start(core=GOOD, worker=STUBBORN, spares=("core",))
    pids = running.pids_when_ready()
    everybody = [child.pid for child in psutil.Process(running.process.pid).children()]
    running.process.kill()
    wait_for_end_of(*everybody)
    assert {*pids.values()} <= {*everybody}


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


@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_death_of_whoever_started_it_ends_it(tmp_path, is_stopped):
    """A fork that holds the other end of the supervisor's standard input does not keep it, and
    neither does a SIGSTOP.
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHANING, sys.executable, str(tmp_path / "orphan"), PREFACE + GOOD],
        stdout=subprocess.PIPE,
    )
    with parent:
        supervisor, holder = (int(word) for word in parent.stdout.readline().split())
        if is_stopped:
            os.kill(supervisor, signal.SIGSTOP)
        parent.kill()
    try:
        wait_for_end_of(supervisor)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(supervisor, signal.SIGKILL)
        os.kill(holder, signal.SIGKILL)
    assert not (tmp_path / "orphan").exists()


ORPHANING = """
import json, os, signal, subprocess, sys
python, folder, code = sys.argv[1:]
child = {"name": "core", "argv": [python, "-c", code], "config": {"folder": folder, "name": "core"}}
config = {"children": [child], "address": "", "runtime_dir": folder, "parent_pid": os.getpid()}
supervisor = subprocess.Popen(
    [python, "-m", "slipstream.stack.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
supervisor.stdin.write(json.dumps(config).encode() + b"\\n")
supervisor.stdin.flush()
while b"StackReady" not in supervisor.stdout.readline(): pass
holder = os.fork()
if holder:
    print(supervisor.pid, holder, flush=True)
signal.pause()
"""


LEAVING_IT_UNTOLD = """
import signal, subprocess, sys
command = [sys.executable, "-m", "slipstream.stack.supervisor"]
supervisor = subprocess.Popen(command, stdin=subprocess.PIPE)
print(supervisor.pid, flush=True)
signal.pause()
"""


def test_one_that_is_stopped_before_it_has_its_configuration_ends_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", LEAVING_IT_UNTOLD], stdout=subprocess.PIPE)
    with parent:
        supervisor = psutil.Process(int(parent.stdout.readline()))
        patience = Patience()
        while not supervisor.name().startswith("slip:"):  # it imports
            patience.wait()
        supervisor.suspend()
        parent.kill()
    try:
        wait_for_end_of(supervisor.pid)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor.kill()


def test_a_supervisor_does_without_numpy() -> None:
    """It would take 6 MB, and a tenth of a second of the start."""
    program = "import sys, slipstream.cli.serving.serve; print('numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False"]
