"""Whole stacks, started from Python with the real processes."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S
from tests.helpers.processes import started
from tests.helpers.stacks import spareless_stack

from slipstream import Client, EngineError, SamplingParams, SlipstreamError, Stack
from slipstream.demo_model import MODEL_PATH
from slipstream.stack import supervisor_process
from slipstream.stack.supervisor import GIVE_UP_S, STOP_S
from slipstream.stack.supervisor_events import ProcessRestarted, SpareReady, StackFailed
from slipstream.stack.supervisor_process import StackError

SIMULATED = "simulated:step_ms=1"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


FAKE = """
import os, signal, sys
sys.stdin.read()
os.read(int(os.environ["SLIPSTREAM_CONTROL_FD"]), 1)
os.write(int(os.environ["SLIPSTREAM_STATUS_FD"]), b'{"ready": true}\\n')
signal.pause()
"""


@pytest.fixture
def fakes(tmp_path, monkeypatch):
    """Stacks to come find processes that are there at once and do nothing."""
    for package in ("slipstream_core", "slipstream_worker"):
        folder = tmp_path / "fakes" / package
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
        (folder / "main.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "fakes"))


def test_its_patience_outlasts_its_supervisors() -> None:
    assert supervisor_process._END_S > STOP_S + GIVE_UP_S


def test_a_given_folder_is_left_as_it_was_however_the_stack_ends(tmp_path, fakes):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    (folder / "of the user").touch()
    for end in (Stack.stop, lambda it: os.kill(it.pids["supervisor"], signal.SIGKILL)):
        stack = spareless_stack(SIMULATED, runtime_dir=folder)
        (folder / "core-in-flight").touch()
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(folder / "core.sock"))
        assert {path.name for path in folder.iterdir()} >= {"supervisor.lock", "core.sock"}
        end(stack)
        stack.stop()
        assert [path.name for path in folder.iterdir()] == ["of the user"]


@pytest.fixture
def watched():
    """Watches processes: all it was given must have ended at the test's end."""
    pidfds = []

    def watch(*pids):
        pidfds.extend(os.pidfd_open(pid) for pid in pids)

    yield watch
    for pidfd in pidfds:
        ended, _, _ = select.select([pidfd], [], [], PATIENCE_S)
        os.close(pidfd)
        assert ended, "a process lives on"


def descendants(stack: Stack) -> list[int]:
    """The stack's processes and whatever they started."""
    supervisor = psutil.Process(stack.pids["supervisor"])
    return [supervisor.pid, *(child.pid for child in supervisor.children(recursive=True))]


def folder_of(stack: Stack) -> Path:
    return Path(stack.address.removeprefix("ipc://")).parent


@pytest.mark.process
def test_the_demo_model_streams_and_goes_on_deterministically(watched):
    with Stack() as stack:
        watched(*stack.pids.values())
        with stack.client() as client:
            assert client.model.path == str(MODEL_PATH)
            whole = client.generate("The list type", GREEDY)
            text = "".join(delta.text for delta in client.stream("The list type", GREEDY))
            many = client.generate_many(["The list type"] * 3, GREEDY)
    assert text == whole.text
    assert {completion.text for completion in many} == {text}


def test_a_simulated_stack_streams_and_stops_while_it_does(watched):
    stack = Stack(SIMULATED, max_num_seqs=8)
    assert set(stack.pids) == {"supervisor", "core", "worker"}
    watched(*descendants(stack))
    folder = folder_of(stack)
    assert folder.stat().st_mode & 0o777 == 0o700
    with stack.client() as client:
        assert client.model.name.startswith("simulated:")
        assert client.model.path.endswith(str(MODEL_PATH))
        deltas = list(client.stream("Once upon a time", GREEDY))
        again = client.generate("Once upon a time", GREEDY)
        assert sum(delta.num_tokens for delta in deltas) == 24
        assert deltas[-1].finish_reason == "length"
        assert "".join(delta.text for delta in deltas) == again.text != ""

        running = client.stream("never ends", max_tokens=3000)
        next(running)
        stack.stop()
    assert not folder.exists()
    assert not stack.is_running
    stack.stop()


@pytest.mark.process
def test_clients_see_the_format_of_answers_on_the_models_card(watched):
    """Of a worker's successor as well."""
    with spareless_stack(SIMULATED, tool_format="hermes") as stack:
        watched(*descendants(stack))
        with Client(stack.address, timeout_s=PATIENCE_S) as client:
            assert client.model.answer_format == "none+hermes"
            os.kill(stack.pids["worker"], signal.SIGKILL)
            assert client.generate("Once upon a time", GREEDY).finish_reason == "length"
            assert client.model.answer_format == "none+hermes"
    with spareless_stack(SIMULATED) as stack, stack.client() as client:
        assert client.model.answer_format == ""


def test_an_exception_inside_the_block_ends_the_stack(watched, fakes):
    def fail():
        with Stack(SIMULATED) as stack:
            watched(*stack.pids.values())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_process_that_dies_is_replaced_and_named_by_its_new_number(watched, fakes, capfd):
    with Stack(SIMULATED) as stack:
        pids = stack.pids
        os.kill(pids["core"], signal.SIGKILL)
        while not isinstance(event := stack.next_event(PATIENCE_S), ProcessRestarted):
            assert event is not None
        assert (event.name, event.how) == ("core", "signal SIGKILL")
        assert stack.pids == {**pids, "core": event.pid} != pids
        watched(*descendants(stack))
        assert stack.is_running
    dead = f"core (process {pids['core']}) ended: signal SIGKILL; another one replaces it"
    assert capfd.readouterr().err.count(dead) == 1


def test_events_tell_what_happened_once(fakes):
    with Stack(SIMULATED, max_restarts=0) as stack:
        kinds = [type(event) for event in stack.events()]
        assert kinds == []  # what led to its being ready has been read by the constructor
        os.kill(stack.pids["worker"], signal.SIGKILL)
        failed = stack.next_event(PATIENCE_S)
        while isinstance(failed, SpareReady):
            failed = stack.next_event(PATIENCE_S)
        assert isinstance(failed, StackFailed)
        assert stack.next_event(PATIENCE_S) is None  # nothing can come any more
        assert stack.events() == []
    assert stack.events() == []
    assert stack.next_event(0) is None


def test_a_process_that_dies_too_often_takes_the_stack_along(watched, fakes, capfd):
    with Stack(SIMULATED, max_restarts=0) as stack:
        pids = stack.pids
        watched(*pids.values())
        supervisor = os.pidfd_open(pids["supervisor"])
        os.kill(pids["core"], signal.SIGKILL)
        assert select.select([supervisor], [], [], PATIENCE_S)[0]
        os.close(supervisor)
        assert not stack.is_running
    assert (
        f"core (process {pids['core']}) ended: signal SIGKILL; 0 restarts within 300 s are allowed"
        in capfd.readouterr().err
    )
    assert not folder_of(stack).exists()


def test_what_a_process_reports_is_what_is_raised():
    with pytest.raises(StackError, match=r"core: option 'vocab_size' is 5, but ") as caught:
        Stack("simulated:vocab_size=5")
    assert isinstance(caught.value, SlipstreamError)
    assert not isinstance(caught.value, EngineError)


def test_a_stack_that_is_not_ready_in_time_is_ended(fakes):
    with pytest.raises(StackError, match=r"not ready after start_timeout_s=0\.001"):
        Stack(SIMULATED, start_timeout_s=0.001)


def test_one_folder_holds_one_stack(tmp_path, fakes):
    with Stack(SIMULATED, runtime_dir=tmp_path / "run") as stack:
        assert stack.address == f"ipc://{tmp_path}/run/client.sock"
        with pytest.raises(StackError, match=f"process {stack.pids['supervisor']}"):
            Stack(SIMULATED, runtime_dir=tmp_path / "run")
        assert stack.is_running
    assert not (tmp_path / "run").exists()


def test_a_folder_that_others_may_enter_is_refused(tmp_path, fakes):
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(StackError, match="0700"):
        Stack(SIMULATED, runtime_dir=tmp_path / "open")


def test_its_end_is_told(fakes):
    ended = threading.Event()
    with Stack(SIMULATED, max_restarts=0) as stack:
        stack.when_ended(ended.set)
        os.kill(stack.pids["worker"], signal.SIGKILL)
        assert ended.wait(PATIENCE_S)


def test_kill_9_of_the_process_that_owns_a_stack_ends_the_stack(watched, fakes):
    program = (
        "import signal, slipstream\n"
        f"stack = slipstream.Stack({SIMULATED!r})\n"
        "print(stack.address, *stack.pids.values(), flush=True)\n"
        "signal.pause()"
    )
    with started([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        address, *pids = owner.stdout.readline().decode().split()
        watched(*map(int, pids))
        supervisor = os.pidfd_open(int(pids[0]))
        owner.kill()
    assert select.select([supervisor], [], [], PATIENCE_S)[0]
    os.close(supervisor)
    assert not Path(address.removeprefix("ipc://")).parent.exists()


@pytest.mark.process
def test_kill_9_of_the_supervisor_leaves_nobody(watched):
    with Stack(SIMULATED) as stack:
        watched(*descendants(stack))
        os.kill(stack.pids["supervisor"], signal.SIGKILL)
    assert not folder_of(stack).exists()


def test_a_stack_that_is_forgotten_or_left_to_the_exit_ends(watched, fakes):
    program = (
        "import sys, slipstream\n"
        f"stack = slipstream.Stack({SIMULATED!r})\n"
        "print(*stack.pids.values(), flush=True)\n"
        "sys.stdin.read()"
    )
    with started(
        [sys.executable, "-W", "error", "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as owner:
        watched(*map(int, owner.stdout.readline().split()))
        owner.stdin.close()
        assert owner.stderr.read() == b""
        assert owner.wait(PATIENCE_S) == 0


def test_a_fork_of_the_owner_does_not_end_the_stack(fakes):
    with Stack(SIMULATED) as stack:
        child = os.fork()
        if not child:
            stack.stop()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert stack.is_running


def test_clients_hear_of_a_shutdown_at_once() -> None:
    with spareless_stack("simulated:step_ms=20") as stack, stack.client() as client:
        stream = client.stream("a", max_tokens=1000)
        next(stream)
        stack.stop()
        with pytest.raises(SlipstreamError, match="shutting down"):
            list(stream)
