"""No stream goes on that nobody reads: whoever read it, and however it lost its reader.

What is live has a reader that listens, a client that may come back within the grace time, or a time
at which it is given up.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from tests.helpers.mini_stack import MiniStack

from slipstream.demo_model import MODEL_PATH
from slipstream_worker.streams.retention import MIN_UNREAD_S
from slipstream_worker.streams.stream import Stage, WorkerStream

PROMPTS = [f"Annex {n}: what goes on though nobody listens." for n in range(3)]
GRACE_S = 12.0
# 400 tokens outlast a test, also on a busy machine; those in any order need some tokens soon
SLOW = f"simulated:step_ms=100,prefill_us=0,mode=chain,tokenizer={MODEL_PATH}"
LESS_SLOW = SLOW.replace("100", "20")


def silence(stack: Any, client: Any) -> None:
    """The client's process is gone, without a word."""
    stack.clients.remove(client)
    client.hop.close()


def is_given_up(stack: Any) -> Callable[[], bool]:
    """Whether nothing runs, though no stream has come to its end by itself."""
    return lambda: stack.core.scheduler.num_running == 0 and stack.holds_nothing()


@pytest.fixture
def stack(make_stack: Callable[..., Any]) -> Any:
    return make_stack(model=SLOW, grace_s=GRACE_S, client_timeout_s=2.0)


@pytest.fixture
def streams(stack: Any) -> Any:
    client = stack.client()
    streams = [client.submit(prompt, max_tokens=400, ignore_eos=True) for prompt in PROMPTS]
    stack.until(lambda: all(it.text for it in streams))
    return streams


def num_tokens(stack: Any) -> int:
    return max(stack.worker.columns.num_tokens(s) for s in stack.worker.streams.all())


def test_client_and_worker_die(stack: Any, streams: Any) -> None:
    silence(stack, stack.clients[0])
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: len(stack.worker.streams) == len(PROMPTS))
    stack.let_pass(GRACE_S / 2)
    assert stack.worker.num_running == len(PROMPTS)  # it may come back still
    assert num_tokens(stack) < 400
    stack.let_pass(GRACE_S)
    stack.until(is_given_up(stack))


def test_a_client_that_comes_back_to_a_new_worker_loses_nothing(stack: Any, streams: Any) -> None:
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: all(it.accepted > 1 for it in streams))
    stack.let_pass(3 * GRACE_S)
    assert stack.worker.num_running + sum(it.is_over for it in streams) == len(PROMPTS)
    assert all(it.end is None or it.end.reason == "length" for it in streams)


def test_a_client_that_attaches_anew_and_never_asks(stack: Any, streams: Any) -> None:
    [client] = stack.clients
    client.streams.clear()
    client.hop.attach(stack.now())
    stack.let_pass(GRACE_S + MIN_UNREAD_S)
    stack.until(is_given_up(stack))
    assert stack.worker.readers.num_clients == 1


@pytest.mark.parametrize("is_new_worker", [False, True])
def test_a_reader_that_is_told_it_diverged(stack: Any, streams: Any, is_new_worker: bool) -> None:
    [client] = stack.clients
    for it in streams:
        it.token_ids[0] += 1
    if is_new_worker:
        stack.kill_worker()
        stack.start_worker()
    else:
        client.hop.attach(stack.now())
    stack.until(lambda: all(it.is_over for it in streams))
    assert {it.fault.code for it in streams} == {"diverged"}
    stack.let_pass(GRACE_S + MIN_UNREAD_S)
    stack.until(is_given_up(stack))
    assert stack.worker.readers.num_clients == 1


def test_a_resubmission_that_diverges(stack: Any, streams: Any) -> None:
    for it in streams:
        it.text += "?"  # a position that never was
    stack.kill_core()
    stack.kill_worker()
    stack.start_core()
    stack.start_worker()
    stack.until(lambda: all(it.is_over for it in streams))
    assert all(it.is_unknown for it in streams)
    assert {it.fault.code for it in streams} == {"diverged"}
    stack.let_pass(GRACE_S + MIN_UNREAD_S)
    stack.until(is_given_up(stack))
    assert stack.worker.readers.num_clients == 1


def test_somebody_else_may_come_to_read_within_the_grace_time(stack: Any, streams: Any) -> None:
    it = streams[0]
    silence(stack, stack.clients[0])
    stack.kill_worker()
    stack.start_worker()
    stack.until(lambda: len(stack.worker.streams) == len(PROMPTS))
    stack.let_pass(GRACE_S / 2)
    other = stack.client()
    stack.until(lambda: other.hop.is_attached)
    taken = other.take_over(it, len(it.text), len(it.token_ids))
    stack.until(lambda: taken.accepted > 0)
    stack.let_pass(GRACE_S)
    stack.until(lambda: len(stack.worker.streams) == 1)
    assert not taken.is_over


# ---- every way there, in any order -------------------------------------------------------------


def has_a_deadline(worker: Any, stream: WorkerStream) -> bool:
    """The invariant, from what the worker keeps."""
    if stream.stage is Stage.ENDED or stream.expires_at < inf:
        return True
    reader = stream.reader
    if reader is None or not reader.is_listening:
        return False
    session = worker.readers.port(reader.client).session
    vanished = [session for _, session in worker.readers._disconnected]
    return session.is_open or session in vanished or session in worker._front._lost


WHO = st.integers(0, 2)
WHICH = st.integers(0, 7)


class Unread(RuleBasedStateMachine):
    """Clients come, go and err, core and worker die."""

    make: Callable[[], Any]

    def __init__(self) -> None:
        super().__init__()
        self.stack = type(self).make()
        self.num_core_deaths = 0

    def teardown(self) -> None:
        """All clients are gone: the grace time later so is everything, and it was given up."""
        stack = self.stack
        try:
            for client in list(stack.clients):
                silence(stack, client)
            stack.until(lambda: stack.worker.card is not None and stack.worker._from_core.is_synced)
            stack.let_pass(GRACE_S + MIN_UNREAD_S)
            stack.until(stack.holds_nothing)
        finally:
            stack.close()
            shutil.rmtree(stack.directory)

    # what is drawn does not hang on how far the stack has come: that is another thing each time

    def client(self, who: int) -> Any:
        clients = self.stack.clients or [self.stack.client()]
        return clients[who % len(clients)]

    def stream(self, which: int) -> tuple[Any, Any]:
        read = [(client, it) for client in self.stack.clients for it in client.streams.values()]
        return read[which % len(read)] if read else (None, None)

    @rule(who=WHO, prompt=st.sampled_from(PROMPTS))
    def submit(self, who: int, prompt: str) -> None:
        self.client(who).submit(prompt, max_tokens=400, ignore_eos=True)

    @rule()
    def newcomer(self) -> None:
        if len(self.stack.clients) < 3:
            self.stack.client()

    @rule(who=WHO)
    def client_dies(self, who: int) -> None:
        silence(self.stack, self.client(who))

    @rule(who=WHO, forgets=st.booleans())
    def link_fails(self, who: int, forgets: bool) -> None:
        client = self.client(who)
        if forgets:
            for handle in list(client.streams):
                if handle % 2 and client.streams[handle].submit not in client._waiting:
                    client.streams[handle].is_superseded = True  # it asks for it no more
        client.hop.attach(self.stack.now())

    @rule(which=WHICH, has_other_tokens=st.booleans())
    def copy_goes_wrong(self, which: int, has_other_tokens: bool) -> None:
        """What the client has of a stream is not what the stream has."""
        client, it = self.stream(which)
        if it is not None and it.accepted and it.token_ids and not it.is_over:
            if has_other_tokens:
                it.token_ids[0] ^= 1
            else:
                it.text += "?"
            client.hop.attach(self.stack.now())

    @rule(who=WHO, which=WHICH)
    def takeover(self, who: int, which: int) -> None:
        _, it = self.stream(which)
        if it is not None and not it.is_over:
            self.client(who).take_over(it)

    @rule(which=WHICH)
    def abort(self, which: int) -> None:
        client, it = self.stream(which)
        if it is not None and not it.is_over:
            client.abort(it)

    @rule()
    def worker_dies(self) -> None:
        self.stack.kill_worker()
        self.stack.start_worker()

    @rule()
    def core_dies(self) -> None:
        self.stack.kill_core()
        self.stack.start_core()

    @rule(num=st.sampled_from([1, 5, 30]))
    def turns(self, num: int) -> None:
        for _ in range(num):
            self.stack.step()

    @rule()
    def time_passes(self) -> None:
        self.stack.let_pass(GRACE_S / 4)

    @invariant()
    def every_live_stream_has_a_reader_or_a_deadline(self) -> None:
        worker = self.stack.worker
        for stream in worker.streams.all():
            assert has_a_deadline(worker, stream)


@pytest.fixture
def machine(tokenizer: Any, detokenizers: Any) -> type[Unread]:
    def make() -> MiniStack:
        directory = Path(tempfile.mkdtemp(prefix="mini-"))
        options = {"grace_s": GRACE_S, "client_timeout_s": 2.0}
        return MiniStack(directory, LESS_SLOW, tokenizer, detokenizers, **options)

    return type("Machine", (Unread,), {"make": staticmethod(make)})


def test_in_any_order(machine: type[Unread]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=25))


@pytest.mark.long
def test_in_any_order_at_length(machine: type[Unread]) -> None:
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=40))
