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

from slipstream import Stack

ALL = {"core", "worker", "http", "prompts"}


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


def pid_of(stack: Stack, name: str) -> int:
    """The worker keeps the tokenizer process; the others are the stack's."""
    if name != "prompts":
        return stack.pids[name]
    (child,) = _children(stack)
    assert "slipstream_worker.tokenizer.process" in child.cmdline()
    return child.pid


def _children(stack: Stack) -> list[psutil.Process]:
    """The worker's."""
    return psutil.Process(stack.pids["worker"]).children()


def wait_for(stack: Stack, status: int, **processes: str) -> None:
    """Until it says so; asking is what takes the time."""
    patience = Patience()
    while True:
        found, body = get(stack, "/health")
        told = body.get("processes", {})  # none: a front that has just begun has not heard yet
        if found == status and processes.items() <= told.items():
            assert body["status"] == ("ok" if status == 200 else "unhealthy")
            assert set(told) == ALL
            return
        patience.check((found, body))


def test_all_is_well(stack):
    wait_for(stack, 200, **dict.fromkeys(ALL, "ready"))


@pytest.mark.parametrize("name", ["core", "worker", "prompts"])
def test_a_process_that_hangs_is_not_healthy(stack, name):
    wait_for(stack, 200, **{name: "ready"})
    pid = pid_of(stack, name)
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_for(stack, 503, **{name: "silent"})
        assert get(stack, "/ready")[0] == 503
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_for(stack, 200, **{name: "ready"})
    assert get(stack, "/ready")[0] == 200


@pytest.mark.parametrize("name", ["core", "worker", "http"])
def test_a_process_that_was_replaced_is_healthy(stack, name):
    before = stack.pids[name]
    os.kill(before, signal.SIGKILL)
    patience = Patience()
    while stack.pids.get(name) in (before, None):
        patience.check(stack.pids)
        stack.next_event(1.0)
    while True:
        patience.check(stack.pids)
        try:
            wait_for(stack, 200, **dict.fromkeys(ALL, "ready"))
        except OSError:  # the front is on its way
            continue
        return


def test_a_prompt_process_that_was_killed_is_told_and_replaced(stack):
    wait_for(stack, 200, **dict.fromkeys(ALL, "ready"))
    before = pid_of(stack, "prompts")
    os.kill(before, signal.SIGKILL)
    patience = Patience()
    while before in (pids := [child.pid for child in _children(stack)]) or not pids:
        patience.check(pids)
    os.kill(pids[0], signal.SIGSTOP)  # it stays as long as we look in that it loads
    try:
        wait_for(stack, 503, prompts="restarting", worker="ready")
        assert get(stack, "/ready")[0] == 503
    finally:
        os.kill(pids[0], signal.SIGCONT)
    wait_for(stack, 200, prompts="ready")
    assert get(stack, "/ready")[0] == 200


def test_version(stack):
    with urllib.request.urlopen(f"{stack.http_address}/version", timeout=PATIENCE_S) as answer:
        assert json.load(answer) == {"version": version("slipstream")}
