"""What a fleet's supervisor does where a replica cannot be started again."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S, Patience

from slipstream.stack.fleet_supervisor import FleetSupervisor
from slipstream.stack.plan.fleet_plan import FleetPlan, plan_fleet
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor_events import StackEvent, StackFailed
from slipstream_ipc import run_delay
from slipstream_ipc.child import execute, pipe


@pytest.fixture
def plan() -> Iterator[FleetPlan]:
    """Two replicas and their fronts."""
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        given = {"model": "simulated:step_ms=1", "http_port": 0, "max_restarts": 2}
        yield plan_fleet(settings_from(given), Path(folder), 2)


def start(stack: Any, program: str) -> None:
    """In place of a supervisor, which reads its standard input."""
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        stdin, stdin_end = pipe(theirs, ours)
        stack.process = execute((sys.executable, "-c", program), os.environ, stdin=stdin)
        stack.stdin = os.fdopen(stdin_end, "wb")
        ours.pop_all()


def test_a_drain_is_no_loss(plan: FleetPlan) -> None:
    """However many there are, the replica is started again; what ends by itself is counted."""
    fleet = FleetSupervisor(plan, lambda _: None)
    fleet._is_ready = True
    drained, lost, *_ = fleet._stacks

    def ended(stack: Any, code: int, now: float) -> None:
        start(stack, f"raise SystemExit({code})")
        stack.process.wait()
        stack.ready_at, stack.due_at = now - 1.0, None
        fleet._on_exit(stack, now)

    assert drained.plan.is_replica
    assert lost.plan.is_replica
    for at in range(5):
        ended(drained, 0, 100.0 + at)
        assert drained.due_at == 100.0 + at
    for at in range(3):
        ended(lost, 1, 100.0 + at)
        assert (lost.due_at is None) == (at == 2)


def test_silence_counts_only_while_both_supervisors_could_turn(
    plan: FleetPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole machine that was stopped is no replica that hangs, nor is one that has no CPU."""
    waited_s = 0.0
    monkeypatch.setattr(run_delay, "loop_wait_s", lambda _: waited_s)
    fleet = FleetSupervisor(plan, lambda _: None)
    silent, heard, *_ = fleet._stacks
    fleet._check_beats(100.0)
    for stack in (silent, heard):
        stack.expect_beat(100.0)
        start(stack, "input()")
    assert silent.process is not None
    assert heard.process is not None
    try:
        fleet._check_beats(200.0)
        for at in range(10):
            fleet._check_beats(200.0 + at)
            assert silent.process.ended() is heard.process.ended() is None
            heard.expect_beat(200.0 + at)
        waited_s = 1.5
        for at in (10.0, 11.0):
            fleet._check_beats(200.0 + at)
            assert silent.process.ended() is None
        fleet._check_beats(211.5)
        assert silent.process.wait() == -signal.SIGKILL
        assert silent.error == "hung: no heartbeat for 10 s"
        assert heard.process.ended() is None
    finally:
        for stack in (silent, heard):
            assert stack.process is not None
            stack.process.reap()
            stack.stdin.close()


def test_one_that_hangs_before_its_first_beat_is_ended(plan: FleetPlan) -> None:
    fleet = FleetSupervisor(plan, lambda _: None)
    stack, *_ = fleet._stacks
    fleet._start(stack)
    process = stack.process
    assert process is not None
    try:
        process.send_signal(signal.SIGSTOP)
        at = stack.started_at
        while stack.error == "":
            assert at < stack.started_at + 100.0
            fleet._check_beats(at := at + 1.0)
        assert at >= stack.started_at + 60.0, "it imports, perhaps on a busy machine"
        assert process.wait() == -signal.SIGKILL
        assert stack.error == "hung: no heartbeat for 60 s"
    finally:
        process.kill()
        process.wait()


def test_one_that_is_stopped_before_it_runs_goes_on_when_its_parent_ends(
    plan: FleetPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent is the thread that has started it, as the kernel has it."""
    program = tmp_path / "stops"
    program.write_text("#!/bin/sh\nkill -STOP $$\nexit 7\n")
    program.chmod(0o700)
    fleet = FleetSupervisor(plan, lambda _: None)
    stack, *_ = fleet._stacks

    def start() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(sys, "executable", str(program))
            fleet._start(stack)
        assert stack.process is not None
        patience, process = Patience(), psutil.Process(stack.process.pid)
        while process.status() != psutil.STATUS_STOPPED:
            patience.wait()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert stack.process is not None
    try:
        assert stack.process.wait(PATIENCE_S) == 7
    finally:
        stack.process.kill()
        stack.process.wait()


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "no processes"), subprocess.SubprocessError("preexec_fn")]
)
def test_one_that_cannot_be_started_again_is_tried_again_and_then_left_out(
    plan: FleetPlan, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are not ended with it."""
    reported: list[StackEvent] = []
    fleet = FleetSupervisor(plan, reported.append)
    fleet._is_ready = True
    lost, *others = fleet._stacks
    for each in others:
        start(each, "input()")

    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(subprocess, "Popen", refuse)
    now, pauses = 100.0, []
    try:
        while lost.due_at is not None or not pauses:
            fleet._start_again(lost, now)
            if lost.due_at is not None:
                pauses.append(lost.due_at - now)
                now = lost.due_at
        assert len(pauses) == 2
        assert lost.process is lost.silent_until is None
        assert all(each.process is not None and each.process.ended() is None for each in others)
        assert not fleet._is_ending
        # the last replica: the fleet ends, with a drain
        other = next(each for each in others if each.plan.is_replica)
        assert other.process is not None
        other.process.kill()
        other.process.wait()
        other.process = None
        for _ in range(3):
            fleet._start_again(other, now)
        assert fleet._is_ending
        [failed] = [each for each in reported if isinstance(each, StackFailed)]
        assert "could not be started" in failed.error
    finally:
        for each in others:
            if each.process is not None:
                each.process.kill()
                each.process.wait()


def end(fleet: FleetSupervisor) -> None:
    for stack in fleet._stacks:
        if stack.process is not None:
            stack.process.kill()
            stack.process.wait()
            stack.process = None
        if stack.stdin is not None:
            stack.stdin.close()
        if stack.events is not None:
            stack.events.close()
    fleet._clean_up()
    fleet._selector.close()


@pytest.fixture
def imported(plan: FleetPlan) -> Iterator[FleetSupervisor]:
    """A fleet whose zygote has imported what its stacks run, none of which is started."""
    fleet = FleetSupervisor(plan, lambda _: None)
    fleet._start_zygote()
    assert fleet._zygote is not None
    try:
        while fleet._zygote.has_awaited:
            assert fleet._selector.select(PATIENCE_S)
            fleet._zygote.read()
            fleet._zygote.preload_next()
        yield fleet
    finally:
        end(fleet)


@pytest.fixture
def started(plan: FleetPlan) -> Iterator[FleetSupervisor]:
    """A fleet that has started its stacks as forks."""
    fleet = FleetSupervisor(plan, lambda _: None)
    fleet._start_zygote()
    try:
        while any(stack.process is None for stack in fleet._stacks):
            assert fleet._selector.select(PATIENCE_S)
            fleet._read_zygote()
        yield fleet
    finally:
        end(fleet)


@pytest.mark.process
def test_supervisors_and_their_children_are_forks_of_one_process(
    started: FleetSupervisor,
) -> None:
    assert started._zygote is None, "it is of no further use"
    patience = Patience()
    for stack in started._stacks:
        assert stack.process is not None
        supervisor = psutil.Process(stack.process.pid)
        assert supervisor.ppid() == os.getpid()
        assert os.getsid(supervisor.pid) == supervisor.pid
        assert not stack.plan.cpus or set(supervisor.cpu_affinity()) == stack.plan.cpus
        while not (children := supervisor.children()):
            patience.wait(stack.name)
        commands = {each.cmdline()[-1] for each in (supervisor, *children)}
        assert commands == {"slipstream_ipc.fork_server"}


@pytest.mark.process
def test_a_fork_that_gets_no_cpus_leaves_nothing(
    imported: FleetSupervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has fewer of them by now than when the fleet was planned."""
    stack = imported._stacks[0]
    stack.plan = replace(stack.plan, cpus=frozenset({0}))
    own = psutil.Process()

    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    before = own.num_fds(), {each.pid for each in own.children()}
    with pytest.raises(OSError, match="Invalid"):
        imported._forked(stack, os.environ)
    assert (own.num_fds(), {each.pid for each in own.children()}) == before


@pytest.mark.process
def test_a_stack_is_started_again_as_a_program(started: FleetSupervisor) -> None:
    """A drained replica is of the version that is installed by then: a rolling update."""
    stack, *_ = started._stacks
    assert stack.process is not None
    started._is_ready = True
    stack.process.kill()
    stack.process.wait()
    started._on_exit(stack, time.monotonic())
    started._start_again(stack, time.monotonic())
    assert stack.process is not None
    assert psutil.Process(stack.process.pid).cmdline()[-1] == "slipstream.stack.supervisor"


@pytest.mark.process
@pytest.mark.parametrize("dies", ["before", "after"])
def test_without_its_zygote_a_fleet_starts_programs(plan: FleetPlan, dies: str) -> None:
    """before: while it imports; after: once it has."""
    fleet = FleetSupervisor(plan, lambda _: None)
    fleet._start_zygote()
    assert fleet._zygote is not None
    try:
        while dies == "after" and fleet._zygote.has_awaited:
            assert fleet._selector.select(PATIENCE_S)
            fleet._zygote.read()
            fleet._zygote.preload_next()
        os.kill(fleet._zygote.pid, signal.SIGKILL)
        assert fleet._selector.select(PATIENCE_S)
        fleet._read_zygote()
        assert fleet._zygote is None
        for stack in fleet._stacks:
            assert stack.process is not None
            command = psutil.Process(stack.process.pid).cmdline()
            assert command[-1] == "slipstream.stack.supervisor"
    finally:
        end(fleet)
