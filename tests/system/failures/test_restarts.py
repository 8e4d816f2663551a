"""Whole stacks whose processes are killed, stopped and asked to end: what users notice of it."""

from __future__ import annotations

import http.client
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from urllib.parse import urlsplit

import msgspec
import psutil
import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import OverloadedError, SlipstreamError, Stack
from slipstream.client.client import Client
from slipstream.stack.plan.process_plan import plan_stack
from slipstream.stack.settings import settings_from
from slipstream.stack.supervisor_events import (
    ProcessEnded,
    ProcessRestarted,
    ProcessStarted,
    SpareReady,
    StackEvent,
    StackFailed,
    StackReady,
)

pytestmark = pytest.mark.process

CHAIN = "simulated:step_ms=5,mode=chain"
NUM_TOKENS = 200
HANG_TIMEOUT_S = 4  # of which other work on the machine may take a part
PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(8)]


def wait_for(stack: Stack, kind: type[StackEvent], name: str | None = None) -> StackEvent:
    """The next event of this kind."""
    while event := stack.next_event(PATIENCE_S):
        if isinstance(event, kind) and name in (None, getattr(event, "name", None)):
            return event
    raise AssertionError(f"no {kind.__name__}")


def texts(client: Client, disturb: Callable[[], object] = lambda: None) -> list[str]:
    """What all streams say; `disturb` runs when each of them has said something."""
    found = [""] * len(PROMPTS)
    have_begun = threading.Barrier(len(PROMPTS) + 1)

    def read(index: int) -> None:
        stream = client.stream(
            PROMPTS[index], max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
        )
        found[index] = next(stream).text
        have_begun.wait(PATIENCE_S)
        for delta in stream:
            found[index] += delta.text

    threads = [threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    have_begun.wait(PATIENCE_S)
    disturb()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
    return found


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """One for all deaths: each test finds it as the one before has left it."""
    with Stack(CHAIN, hang_timeout_s=HANG_TIMEOUT_S, max_restarts=1000) as stack:
        yield stack


@pytest.fixture(scope="module")
def plain(stack: Stack) -> list[str]:
    """What undisturbed streams say."""
    with stack.client() as client:
        return texts(client)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT, signal.SIGTERM, signal.SIGSTOP])
@pytest.mark.parametrize("name", ["worker", "core"])
def test_streams_survive_the_death_or_hang_of_a_process(stack, plain, name, number):
    stack.events()
    with stack.client() as client:
        assert texts(client, lambda: os.kill(stack.pids[name], number)) == plain
    assert wait_for(stack, ProcessEnded, name)
    assert wait_for(stack, ProcessRestarted, name)


def test_streams_with_several_tokens_a_step_survive_deaths(plain):
    """Of a device that gives several tokens to a row."""
    settings = {"hang_timeout_s": HANG_TIMEOUT_S, "max_restarts": 1000}
    model = f"{CHAIN},synthetic_acceptance_length=3"
    with Stack(model, **settings) as stack, stack.client() as client:
        for name in ("worker", "core"):
            kill = partial(os.kill, stack.pids[name], signal.SIGKILL)
            assert texts(client, kill) == plain
            assert wait_for(stack, ProcessRestarted, name)


def test_a_second_death_before_there_is_another_spare(stack, plain):
    def kill_twice() -> None:
        for _ in range(2):
            os.kill(stack.pids["worker"], signal.SIGKILL)
            wait_for(stack, ProcessRestarted, "worker")

    stack.events()
    with stack.client() as client:
        assert texts(client, kill_twice) == plain


def test_a_long_prefill_is_no_hang():
    with (
        spareless_stack("simulated:step_ms=8000", hang_timeout_s=6) as stack,
        stack.client() as client,
    ):
        pids = stack.pids
        assert len(list(client.stream("a", max_tokens=1, ignore_eos=True))) == 1
        assert not [event for event in stack.events() if isinstance(event, ProcessEnded)]
        assert stack.pids == pids


def test_a_device_that_never_ends_a_step_is_replaced_and_named():
    with (
        Stack("simulated:step_ms=100000", step_timeout_s=0.5, max_restarts=1) as stack,
        stack.client() as client,
    ):
        stack.events()
        stream = client.stream("a", max_tokens=1)  # one that nobody holds is aborted
        how = "exit code 1 (a step did not finish within 0.5 s (step_timeout_s))"
        assert wait_for(stack, ProcessEnded).how == how
        failed = wait_for(stack, StackFailed)
        assert how in failed.error
        assert "1 restarts within 300 s are allowed" in failed.error
        del stream


def test_a_front_that_dies_comes_back_at_its_port():
    def ask(connection: http.client.HTTPConnection) -> int:
        body = json.dumps({"prompt": "a", "max_tokens": 3})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        return answer.status

    with Stack("simulated:step_ms=1", http_port=0, hang_timeout_s=HANG_TIMEOUT_S) as stack:
        where = urlsplit(stack.http_address)
        for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP):
            kept_alive = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
            assert ask(kept_alive) == 200
            os.kill(stack.pids["http"], number)
            again = wait_for(stack, ProcessRestarted, "http")
            assert again.detail == f"serving on {stack.http_address}"
            kept_alive.close()
            connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
            assert ask(connection) == 200
            connection.close()


# ---- draining ----------------------------------------------------------------------------------


def test_a_signal_lets_what_runs_finish_and_refuses_what_is_new():
    with (
        spareless_stack("simulated:step_ms=5,mode=chain", drain_s=60) as stack,
        stack.client() as client,
    ):
        params = {"max_tokens": 1000, "temperature": 0, "ignore_eos": True}  # outlast the refusal
        whole = client.generate("a", **params).text
        stream = client.stream("a", **params)
        text = next(stream).text
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        assert "shutting down" in str(refusal(client))
        assert text + "".join(delta.text for delta in stream) == whole
        assert ended(stack) == 0


def test_what_has_not_ended_when_the_time_is_over_ends_with_what_it_has():
    with (
        spareless_stack("simulated:step_ms=5", drain_s=0.5) as stack,
        stack.client() as client,
    ):
        stream = client.stream("a", max_tokens=2000, temperature=0, ignore_eos=True)
        next(stream)
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        with pytest.raises(SlipstreamError, match="shutting down"):
            list(stream)
        assert ended(stack) == 0


@pytest.mark.parametrize("http_port", [None, 0])
def test_an_idle_stack_does_not_wait(http_port):
    with spareless_stack("simulated:step_ms=5", drain_s=1e6, http_port=http_port) as stack:
        with stack.client() as client:
            client.generate("a", max_tokens=3)
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        assert ended(stack) == 0


def test_a_front_lets_its_answers_finish():
    with spareless_stack("simulated:step_ms=5", drain_s=60, http_port=0) as stack:
        where = urlsplit(stack.http_address)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=PATIENCE_S)
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        begin = answer.read(10)
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        whole = begin + answer.read()
        assert whole.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in whole
        assert ended(stack) == 0


def test_a_second_signal_does_not_wait():
    with (
        spareless_stack("simulated:step_ms=5", drain_s=1e6) as stack,
        stack.client() as client,
    ):
        stream = client.stream("a", max_tokens=3000, temperature=0, ignore_eos=True)
        next(stream)
        os.kill(stack.pids["supervisor"], signal.SIGINT)
        assert "shutting down" in str(refusal(client))
        os.kill(stack.pids["supervisor"], signal.SIGTERM)  # the same within a second counts once
        with pytest.raises(SlipstreamError, match="shutting down"):
            list(stream)
        assert ended(stack) == 0


def refusal(client: Client) -> OverloadedError:
    """Ask until the worker, which has been told by then, refuses."""
    patience = Patience()
    while True:
        patience.check("it refuses nothing")
        try:
            client.generate("b", max_tokens=1)
        except OverloadedError as error:
            return error


def ended(stack: Stack) -> int:
    """The supervisor's exit code."""
    return stack._supervisor.wait(PATIENCE_S)


# ---- nobody is left ----------------------------------------------------------------------------

MARK = "SLIPSTREAM_TEST_MARK"


def marked(mark: str) -> list[psutil.Process]:
    """Every process that has the mark in its environment, whosever child it is by now."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def assert_all_end(mark: str) -> None:
    """Wait until nobody has the mark."""
    while left := marked(mark):
        for process in left:
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            has_ended = select.select([pidfd], [], [], PATIENCE_S)[0]
            os.close(pidfd)
            assert has_ended, f"{process.cmdline()} lives on"


@pytest.mark.parametrize("victims", [["supervisor"], ["worker", "supervisor"]])
@pytest.mark.parametrize("moment", [ProcessStarted, StackReady, SpareReady])
def test_no_process_is_left_whenever_the_supervisor_is_killed(tmp_path, moment, victims):
    """Tokenizer processes too: their worker may die before they ask to die with it."""
    mark = secrets.token_hex(8)
    plan = plan_stack(settings_from({"model": "simulated:"}), tmp_path / "run", os.getpid())
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "slipstream.stack.supervisor"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
    )
    pids = {"supervisor": supervisor.pid}
    with supervisor:
        supervisor.stdin.write(msgspec.json.encode(plan) + b"\n")
        supervisor.stdin.flush()
        for line in supervisor.stdout:
            event = msgspec.json.decode(line, type=StackEvent)
            if isinstance(event, ProcessStarted):
                pids[event.name] = event.pid
            if isinstance(event, moment) and "worker" in pids:
                break
        # a tokenizer process is there, and has most likely not come to its first line yet
        worker = psutil.Process(pids["worker"])
        patience = Patience()
        while not worker.children():
            patience.check("it starts no tokenizer process")
            assert worker.is_running()
        for name in victims:
            os.kill(pids[name], signal.SIGKILL)
    assert_all_end(mark)
