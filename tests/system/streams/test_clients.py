"""The library's own client before a stack that dies under it, in one thread.

What it shares with the process it runs in (threads, event loops) is tested in tests/api.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stepped_client import Client, Reading, finish

from slipstream.errors import (
    ConflictError,
    ConnectionLostError,
    StreamLostError,
    SupersededError,
    UnknownStreamError,
)
from slipstream_ipc.messages import (
    PROTOCOL_VERSION,
    Frame,
    Hello,
    Reattach,
    Submit,
)
from slipstream_ipc.transport.codec import client_codec
from slipstream_ipc.transport.sockets import new_dealer

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


Kill = Callable[[Any], None]


def kill_both(stack: Any) -> None:
    stack.kill_core()
    stack.kill_worker()
    stack.start_core()
    stack.start_worker()


def kill_worker(stack: Any) -> None:
    stack.kill_worker()
    stack.start_worker()


def kill_core(stack: Any) -> None:
    stack.kill_core()
    stack.start_core()


@pytest.mark.parametrize("seed", range(6))
def test_streams_survive_any_deaths(make_stack, expected, outcome, seed: int) -> None:
    params = {"max_tokens": 120, "logprobs": 1, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    dice = random.Random(seed)
    stack = make_stack()
    client = Client(stack)
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    kills: list[Kill] = [kill_both, kill_worker, kill_core, kill_both]
    for kill in dice.sample(kills, len(kills)):
        for _ in range(dice.randrange(60)):
            stack.step()
            for each in streams:
                each.take(dice.randrange(3))
        kill(stack)
    finish(stack, streams)
    assert outcome(streams) == outcome(plain)
    assert [each.ranks for each in streams] == [each.ranks for each in plain]
    assert [each.state.end for each in streams] == [each.end for each in plain]


@pytest.mark.parametrize("seed", range(4))
def test_clients_die_and_others_go_on_with_what_was_read(
    make_stack, expected, outcome, seed: int
) -> None:
    params = {"max_tokens": 120, "logprobs": 1}
    plain = expected(PROMPTS, **params)
    dice = random.Random(seed)
    stack = make_stack()
    client = Client(stack)
    streams = [client.submit(prompt, **params) for prompt in PROMPTS]
    parts: list[list[Reading]] = [[] for _ in streams]
    # nobody else has it before the core has it
    stack.until(lambda: all(each.state.prompt_ids is not None for each in streams))
    for kill in (None, kill_worker, kill_core):
        for _ in range(dice.randrange(5, 40)):
            stack.step()
            for each in streams:
                each.take(dice.randrange(3))
        client.die()
        if kill is not None:
            kill(stack)
        client = Client(stack)
        for part, each in zip(parts, streams, strict=True):
            part.append(each)
        starts = [_start(part) for part in parts]
        streams = [
            client.resume(part[0].state.stream_id, *start)
            for part, start in zip(parts, starts, strict=True)
        ]
    finish(stack, streams)
    for part, each, whole in zip(parts, streams, plain, strict=True):
        part.append(each)
        assert "".join(one.text for one in part) == whole.text
        assert [i for one in part for i in one.token_ids] == whole.token_ids
        assert [rank for one in part for rank in one.ranks] == whole.ranks
        assert each.state.end == whole.end


def _start(part: list[Reading]) -> tuple[int, int]:
    """Behind what was read last of it, by whomever."""
    return next((each.position for each in reversed(part) if each.last is not None), (0, 0))


def test_a_reader_that_is_superseded_is_told_and_the_new_one_gets_the_rest(
    make_stack, expected
) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=150)
    stack = make_stack()
    old, new = Client(stack), Client(stack)
    before = old.submit(PROMPTS[0], max_tokens=150)
    stack.until(lambda: len(before.state.deltas) > 10)
    before.take(5)
    after = new.resume(before.state.stream_id, *before.position)
    stack.until(lambda: before.is_over)
    assert isinstance(before.state.error, SupersededError)
    old.die()
    finish(stack, [after])
    assert before.text + after.text == plain.text
    assert before.token_ids + after.token_ids == plain.token_ids


def test_asking_twice_is_asking_once(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    first, second = Client(stack), Client(stack)
    one = first.submit(PROMPTS[0], "0a" * 16, max_tokens=60)
    stack.until(lambda: len(one.state.deltas) > 5)
    two = second.submit(PROMPTS[0], "0a" * 16, max_tokens=60)
    other = second.submit(PROMPTS[1], "0a" * 16, max_tokens=60)
    finish(stack, [two])
    assert (two.text, two.token_ids) == (plain.text, plain.token_ids)
    assert isinstance(one.state.error, SupersededError)
    stack.until(lambda: other.is_over)
    assert isinstance(other.state.error, ConflictError)
    again = first.submit(PROMPTS[0], "0a" * 16, max_tokens=60)  # it has ended, and is kept
    finish(stack, [again])
    assert again.text == plain.text


def test_what_is_forgotten_or_never_was_is_unknown(make_stack) -> None:
    stack = make_stack(grace_s=1.0)
    client = Client(stack)
    it = client.submit(PROMPTS[0], "0a" * 16, max_tokens=20)
    finish(stack, [it])
    stack.until(lambda: stack.worker.readers.num_clients == 1)
    for _ in range(5):
        stack.step()
    stack.pass_time(1.1)
    stack.until(stack.holds_nothing)
    resumed = client.resume(bytes.fromhex("0a" * 16), 0, 0)
    again = client.submit(PROMPTS[0], "0a" * 16, max_tokens=20)
    nobodys = client.resume(bytes(16), 3, 1)
    stack.until(lambda: resumed.is_over and again.is_over and nobodys.is_over)
    for each in (resumed, again, nobodys):
        assert isinstance(each.state.error, UnknownStreamError)


def test_a_position_that_never_was_is_named(make_stack) -> None:
    stack = make_stack()
    client = Client(stack)
    it = client.submit(PROMPTS[0], max_tokens=20)
    finish(stack, [it])
    wrong = client.resume(it.state.stream_id, 2**31, 20)
    stack.until(lambda: wrong.is_over)
    assert isinstance(wrong.state.error, StreamLostError)


def test_what_ended_while_no_worker_was_there_is_told_by_the_next_one(make_stack, expected) -> None:
    """The core answers before the new worker's first turn, so all is replayed in that."""
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    client = Client(stack)
    it = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(it.state.deltas) > 10)
    stack.kill_worker()
    while stack.core.scheduler.num_running:
        stack.core.engine.run_once(wait=False)
    before = list(stack.core.handler._acceptor.sessions)  # its death may not have been noticed yet
    stack.start_worker()
    patience = Patience()
    while not any(
        session.link.num_unacked > 1 and all(session is not other for other in before)
        for session in stack.core.handler._acceptor.sessions
    ):
        patience.check()
        stack.core.engine.run_once(wait=False)
    assert stack.poller.poll(int(PATIENCE_S * 1e3))
    finish(stack, [it])
    assert (it.text, it.token_ids) == (plain.text, plain.token_ids)


def test_a_superseded_reader_that_attaches_anew_takes_nothing_back(make_stack, expected) -> None:
    """It was away when it was superseded, and goes on as it would after any attach."""
    [plain] = expected(PROMPTS[:1], max_tokens=150)
    stack = make_stack()
    old, new = Client(stack), Client(stack)
    before = old.submit(PROMPTS[0], max_tokens=150)
    stack.until(lambda: len(before.state.deltas) > 10)
    before.take(5)
    stack.clients.remove(old)
    after = new.resume(before.state.stream_id, *before.position)
    stack.until(lambda: len(after.state.deltas) > 5)
    old.session._dealer.attach(stack.now())
    stack.clients.append(old)
    stack.until(lambda: before.is_over)
    assert isinstance(before.state.error, SupersededError)
    finish(stack, [after])
    assert before.text + after.text == plain.text


def test_a_server_that_loads_its_model_is_there(make_stack, expected) -> None:
    """Worker and core are gone, and the new core takes longer than clients wait for a server."""
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    client = Client(stack)
    stream = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(stream.state.deltas) > 5)
    stack.kill_core()
    stack.kill_worker()
    stack.start_worker()
    dealer = client.session._dealer
    for _ in range(30):
        stack.until(lambda: dealer.is_starting)
        stack.pass_time(5.0)
        stack.step()
    assert not stream.is_over
    stack.start_core()
    finish(stack, [stream])
    assert (stream.text, stream.token_ids) == (plain.text, plain.token_ids)


@pytest.mark.long
def test_a_server_that_is_nowhere_is_given_up(make_stack) -> None:
    stack = make_stack()
    client = Client(stack, 10.0)
    stream = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(stream.state.deltas) > 5)
    stack.kill_worker()
    for _ in range(15):
        stack.step()
        stack.pass_time(5.0)
    stack.until(lambda: stream.is_over)
    assert isinstance(stream.state.error, ConnectionLostError)


def test_an_accepted_stream_waits_longer_for_a_worker_than_a_new_one(make_stack, expected) -> None:
    """A front knows that its worker is being replaced, which may take a busy machine a while."""
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    client = Client(stack, 10.0)
    begun = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(begun.state.deltas) > 5)
    stack.kill_worker()
    new = client.submit(PROMPTS[1], max_tokens=60)
    for _ in range(8):  # the worker's links are given up first: 5 s of silence and a ping's
        stack.step()
        stack.pass_time(5.0)
    assert isinstance(new.state.error, ConnectionLostError)
    assert not begun.is_over
    stack.start_worker()
    finish(stack, [begun])
    assert (begun.text, begun.token_ids) == (plain.text, plain.token_ids)
    stack.kill_worker()
    other = client.submit(PROMPTS[0], max_tokens=60)
    stack.start_worker()
    stack.until(lambda: len(other.state.deltas) > 5)
    stack.kill_worker()
    for _ in range(16):
        stack.step()
        stack.pass_time(5.0)
    stack.until(lambda: other.is_over)
    assert isinstance(other.state.error, ConnectionLostError)


def test_a_client_that_acknowledges_nothing_costs_a_bounded_number_of_answers(
    make_stack, expected, monkeypatch
) -> None:
    monkeypatch.setattr("slipstream_worker.clients.ports._MAX_QUEUED_MESSAGES", 20)
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack()
    client = Client(stack)
    stream = client.submit(PROMPTS[0], max_tokens=60)
    stack.until(lambda: len(stream.state.deltas) > 5)
    socket = new_dealer(stack.context, stack.client_address, b"deaf")
    codec = client_codec()

    def say(seq: int, body: object) -> None:
        socket.send(codec.encode(Frame(1, seq, 0, body)))

    say(0, Hello(PROTOCOL_VERSION, b"deaf"))
    for number in range(1, 61):  # of which each is refused
        say(number, Submit(number, bytes(15) + bytes([number]), msgspec.Raw(b"\x81\xa1x\x01"), "x"))
    heard: list[object] = []

    def hear() -> bool:
        while socket.poll(0):
            heard.append(codec.decode(socket.recv()).body)
        return any(isinstance(body, Reattach) for body in heard)

    stack.until(hear)
    port = stack.worker.readers._clients[b"deaf"]
    assert not port._messages
    finish(stack, [stream])
    assert (stream.text, stream.token_ids) == (plain.text, plain.token_ids)
    socket.close(linger=0)
