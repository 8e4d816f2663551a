"""/health tells of every process of the stack: of real ones, stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from importlib.metadata import version
from typing import Any

import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.http.admin.health import StackHealth
from slipstream_ipc.process import SILENT_S

ALL = {"core", "worker", "http", "tokenizer", "supervisor"}


@pytest.fixture(scope="module")
def stack():
    # the hang timeout is for us to end: a process that is stopped stays so
    with Stack("simulated:step_ms=1", http_port=0, hang_timeout_s=600.0) as running:
        yield running


def get(stack: Stack, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{stack.http_address}{path}", timeout=PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def children(stack: Stack, parent: str, name: str) -> list[int]:
    """The processes of this name, spares included, that a process of the stack has started."""
    found = psutil.Process(stack.pids[parent]).children()
    return [child.pid for child in found if is_named(child, name)]


def is_named(process: psutil.Process, name: str) -> bool:
    """Whether it runs under this name; no zombie does."""
    try:
        own: str = process.name()
        return own.partition(":")[2] == name and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def pid_of(stack: Stack, name: str) -> int:
    """The worker keeps the tokenizer process; the others are the stack's."""
    if name != "tokenizer":
        return stack.pids[name]
    (pid,) = children(stack, "worker", "tokenizer")
    return pid


def wait_for(stack: Stack, code: int, status: str, **processes: str) -> None:
    """Until it says so; asking is what takes the time."""
    patience = Patience()
    while True:
        found, body = get(stack, "/health")
        told = body.get("processes", {})  # none: a front that has just begun has not heard yet
        if (found, body["status"]) == (code, status) and processes.items() <= told.items():
            assert set(told) == ALL
            return
        patience.wait((found, body))


def wait_until_well(stack: Stack) -> None:
    wait_for(stack, 200, "ok", **dict.fromkeys(ALL, "ready"))
    patience = Patience()
    while (found := get(stack, "/ready"))[0] != 200:
        patience.wait(found)  # the front attaches to a new worker


def test_all_is_well(stack):
    wait_until_well(stack)


def test_processes_are_found_by_name_and_by_id(stack):
    """In `top` and `ps -e`, where all are Python; the ids are in /live, which asks for no key."""
    wait_until_well(stack)
    patience = Patience()
    while True:
        processes = get(stack, "/live")[1]["processes"]
        if set(processes) == ALL and all(each["pid"] for each in processes.values()):
            break
        patience.wait(processes)
    for name, each in processes.items():
        assert psutil.Process(each["pid"]).name() == f"slip:{name}"
    while len(cores := children(stack, "supervisor", "core")) < 2:
        patience.wait(cores)
    while {psutil.Process(pid).name() for pid in cores} != {"slip:core", "spare:core"}:
        patience.wait(cores)


@pytest.mark.parametrize("name", ["core", "worker", "tokenizer"])
def test_a_process_that_hangs_is_told_and_is_no_reason_for_a_restart(stack, name):
    wait_until_well(stack)
    pid = pid_of(stack, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(stack, 200, "recovering", **{name: "silent"})
        assert get(stack, "/ready")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until_well(stack)


def test_a_core_that_is_being_replaced_is_no_reason_for_a_restart(stack):
    """However long its successor loads: a liveness probe would end every stream."""
    wait_until_well(stack)
    patience, before = Patience(), stack.pids["core"]
    while len(cores := children(stack, "supervisor", "core")) < 2:
        patience.wait(cores)
    (spare,) = set(cores) - {before}
    os.kill(spare, signal.SIGSTOP)  # it loads as long as we look
    try:
        os.kill(before, signal.SIGKILL)
        wait_for(stack, 200, "recovering", core="restarting", worker="ready")
        assert get(stack, "/ready")[0] == 503
    finally:
        os.kill(spare, signal.SIGCONT)
    wait_until_well(stack)


@pytest.mark.parametrize("name", ["core", "worker", "http"])
def test_a_process_that_was_replaced_is_healthy(stack, name):
    before = stack.pids[name]
    os.kill(before, signal.SIGKILL)
    patience = Patience()
    while stack.pids.get(name) in (before, None):
        patience.check(stack.pids)
        stack.next_event(1.0)
    while True:
        patience.wait(stack.pids)
        try:
            wait_until_well(stack)
        except OSError:  # the front is on its way
            continue
        return


@pytest.mark.process
def test_a_tokenizer_process_that_was_killed_is_told_and_replaced(stack):
    wait_until_well(stack)
    before = pid_of(stack, "tokenizer")
    os.kill(before, signal.SIGKILL)
    patience = Patience()
    while before in (pids := children(stack, "worker", "tokenizer")) or (not pids):
        patience.check(pids)
    os.kill(pids[0], signal.SIGSTOP)  # it stays as long as we look in that it loads
    try:
        wait_for(stack, 200, "recovering", tokenizer="restarting", worker="ready")
        assert get(stack, "/ready")[0] == 503
    finally:
        os.kill(pids[0], signal.SIGCONT)
    wait_until_well(stack)


@pytest.mark.process
def test_only_a_supervisor_that_hangs_is_a_reason_for_a_restart():
    """Nothing else of the stack could mend that."""
    with spareless_stack("simulated:step_ms=1", http_port=0, hang_timeout_s=6.0) as stack:
        os.kill(stack.pids["supervisor"], signal.SIGSTOP)
        try:
            wait_for(stack, 503, "unhealthy", supervisor="silent", core="ready")
            assert get(stack, "/ready")[0] == 200  # requests are served all the same
        finally:
            os.kill(stack.pids["supervisor"], signal.SIGCONT)
        wait_until_well(stack)


READY = dict.fromkeys(("core", "worker", "http", "tokenizer"), "ready")


@pytest.mark.parametrize(
    ("states", "status", "serves"),
    [
        ({}, "ok", True),  # a front without a supervisor
        (READY, "ok", True),
        (READY | {"core": "starting"}, "starting", True),
        (READY | {"core": "restarting"}, "recovering", False),
        (READY | {"core": "starting", "tokenizer": "silent"}, "recovering", False),
        (READY | {"http": "restarting"}, "recovering", True),
    ],
)
def test_the_status_says_what_the_processes_are_at(states, status, serves):
    health = StackHealth(hang_timeout_s=10.0)
    health.processes = states
    assert health.status(1e9, is_draining=False) == status
    assert health.status(1e9, is_draining=True) == "draining"
    assert health.serves == serves
    assert health.states(1e9) == states


def test_a_supervisor_is_silent_before_it_counts_as_hung():
    health = StackHealth(hang_timeout_s=10.0)
    health.processes = READY
    health.note_report(100.0)
    found = [
        (health.status(now, is_draining=True), health.states(now)["supervisor"])
        for now in (100.0, 100.0 + SILENT_S, 110.0)
    ]
    assert found == [("draining", "ready"), ("draining", "silent"), ("unhealthy", "silent")]
    health.note_report(111.0)
    assert health.status(111.0, is_draining=False) == "ok"


def test_version(stack):
    with urllib.request.urlopen(f"{stack.http_address}/version", timeout=PATIENCE_S) as answer:
        assert json.load(answer) == {"version": version("slipstream")}
