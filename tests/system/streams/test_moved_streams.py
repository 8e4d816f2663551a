"""Streams that come from another replica with their tokens so far, also to one that knew them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec import structs
from tests.helpers.mini_stack import MiniStack, RawClient, Received

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    AdmissionRefused,
    Admitted,
    ComputedPromptLogprobs,
    Fault,
    LogprobColumns,
    Resume,
)
from slipstream_worker.streams.stream import Stage

GRACE_S = 5.0
PROMPT = "What a reader has of a stream is all that another replica needs."
PARAMS = {"max_tokens": 90, "logprobs": 2, "stop": ("q}", "zq"), "temperature": 0.8, "seed": 7}


def moved(client: RawClient, it: Received, num_tokens: int, moves: int = 1) -> Received:
    """The client takes the stream to this stack, with its first `num_tokens` tokens."""
    handle = len(client.streams)
    submit = structs.replace(
        it.submit,
        handle=handle,
        was_accepted=True,
        output_ids=pack_u32(it.token_ids[:num_tokens]),
        num_chars=len(it.text) if num_tokens else 0,
        moves=moves,
    )
    taken = client.send_submit(submit)
    if num_tokens:
        assert num_tokens == len(it.token_ids), "a client has all or none"
        taken.text, taken.token_ids = it.text, list(it.token_ids)
        taken.ranks, taken.logprobs = list(it.ranks), bytearray(it.logprobs)
    return taken


def begun(stack: MiniStack, num_tokens: int = 12) -> tuple[RawClient, Received]:
    """A client with a stream that has some tokens."""
    client = stack.client()
    client.resubmits = False
    it = client.submit(PROMPT, **PARAMS)
    stack.until(lambda: len(it.token_ids) >= num_tokens)
    return client, it


def check_whole(stack: MiniStack, taken: Received, plain: Received) -> None:
    stack.until(lambda: taken.is_over)
    assert taken.fault is None
    assert (taken.text, taken.token_ids, taken.ranks) == (plain.text, plain.token_ids, plain.ranks)
    assert taken.logprobs == plain.logprobs
    assert structs.replace(taken.end, num_cached_tokens=0) == structs.replace(
        plain.end, num_cached_tokens=0
    )


@pytest.fixture
def plain(expected: Callable[..., list[Received]]) -> Received:
    [received] = expected([PROMPT], **PARAMS)
    assert len(received.token_ids) > 40, "it is to be interrupted"
    return received


def test_a_stream_goes_on_at_a_replica_that_never_knew_it(make_stack, plain) -> None:
    _, it = begun(make_stack())
    other = make_stack()
    check_whole(other, moved(other.client(), it, len(it.token_ids)), plain)


def runs_here(stack: MiniStack, client: RawClient, it: Received) -> None:
    """It was never said that the stream went away."""


def aborted_here(stack: MiniStack, client: RawClient, it: Received) -> None:
    client.abort(it)
    stack.until(lambda: it.is_over)


def left_here(stack: MiniStack, client: RawClient, it: Received) -> None:
    client.goodbye()
    stack.until(stack.holds_nothing)


def forgotten_here(stack: MiniStack, client: RawClient, it: Received) -> None:
    aborted_here(stack, client, it)
    stack.let_pass(GRACE_S + 1.0)
    stack.until(stack.holds_nothing)


def forgotten_by_two_workers(stack: MiniStack, client: RawClient, it: Received) -> None:
    forgotten_here(stack, client, it)
    stack.kill_worker()
    stack.start_worker()


@pytest.mark.parametrize(
    "before",
    [runs_here, aborted_here, left_here, forgotten_here, forgotten_by_two_workers],
)
@pytest.mark.parametrize("has_tokens", [False, True])
def test_a_stream_comes_back_to_a_replica(make_stack, plain, before, has_tokens) -> None:
    stack = make_stack(grace_s=GRACE_S)
    client, it = begun(stack)
    before(stack, client, it)
    reader = stack.client()
    taken = moved(reader, it, len(it.token_ids) if has_tokens else 0)
    if not has_tokens:
        taken.accepted = 0
    check_whole(stack, taken, plain)
    assert before is not runs_here or it.is_superseded
    assert stack.core.handler.num_streams == 1


def test_a_stream_comes_back_while_the_link_to_the_core_is_cut(make_stack, plain) -> None:
    """What said so is lost with the link, and the core states the older copy."""
    stack = make_stack()
    _, it = begun(stack)
    core, stack.core = stack.core, None
    stack.worker._core.attach(stack.now())
    taken = moved(stack.client(), it, len(it.token_ids))
    stack.until(lambda: it.is_superseded)
    stack.core = core
    check_whole(stack, taken, plain)


def test_notices_about_the_older_copy_are_not_taken_for_the_newer(make_stack, plain) -> None:
    stack = make_stack()
    _, it = begun(stack)
    row = stack.worker.streams.get(it.stream_id).core_row
    stack.core, core = None, stack.core  # it says nothing about the newer copy yet
    reader = stack.client()
    taken = moved(reader, it, len(it.token_ids))
    stack.until(lambda: it.is_superseded)
    for late in (
        Admitted(it.stream_id, row),
        AdmissionRefused(it.stream_id, Fault("engine", "of the older copy")),
        ComputedPromptLogprobs(it.stream_id, 0, LogprobColumns(0, b"", b"", b"")),
    ):
        stack.worker._from_core.handle(late)
    stream = stack.worker.streams.get(it.stream_id)
    assert (stream.moves, stream.stage, stream.core_row) == (1, Stage.SUBMITTED, None)
    stack.core = core
    check_whole(stack, taken, plain)


@pytest.mark.parametrize("num_steps", [1, 4, 30])
@pytest.mark.parametrize("deaths", ["worker", "core", "worker core"])
def test_a_stream_that_came_back_survives_deaths(make_stack, plain, num_steps, deaths) -> None:
    stack = make_stack()
    _, it = begun(stack)
    taken = moved(stack.client(), it, len(it.token_ids))
    stack.until(lambda: taken.accepted > 0)
    for _ in range(num_steps):
        stack.step()
    for name in deaths.split():
        getattr(stack, f"kill_{name}")()
    for name in deaths.split():
        getattr(stack, f"start_{name}")()
    check_whole(stack, taken, plain)


@pytest.mark.parametrize("is_worker_new", [False, True])
def test_an_older_copy_is_superseded(make_stack, is_worker_new) -> None:
    stack = make_stack()
    client, it = begun(stack)
    taken = moved(stack.client(), it, len(it.token_ids), moves=2)
    stack.until(lambda: taken.accepted > 0 and it.is_superseded)
    if is_worker_new:
        stack.kill_worker()
        stack.start_worker()
    late = moved(client, it, len(it.token_ids), moves=1)
    stack.until(lambda: late.is_superseded)
    stack.until(lambda: taken.is_over)
    assert taken.end.reason != "error"


@pytest.mark.parametrize("moves", [2, 1])
@pytest.mark.parametrize("is_worker_new", [False, True])
def test_a_move_is_run_once_and_no_older_one_after_it(make_stack, is_worker_new, moves) -> None:
    stack = make_stack(grace_s=GRACE_S)
    client, it = begun(stack)
    taken = moved(client, it, len(it.token_ids), moves=2)
    stack.until(lambda: taken.accepted > 0)
    client.goodbye()
    stack.until(stack.holds_nothing)
    if is_worker_new:
        stack.kill_worker()
        stack.start_worker()
    late = moved(stack.client(), it, len(it.token_ids), moves=moves)
    stack.until(lambda: late.is_over)
    assert late.fault is not None
    assert late.fault.code == "unknown_stream"
    assert not taken.is_over


def test_a_resume_wants_no_older_copy(make_stack) -> None:
    stack = make_stack()
    _, it = begun(stack)
    other = stack.client()
    other.resubmits = False
    newer = Received(it.stream_id, it.submit)
    stack.until(lambda: other.hop.is_attached)
    other.streams[0] = newer
    other.send(Resume(0, it.stream_id, 0, 0, moves=1))
    stack.until(lambda: newer.is_unknown)
    assert not it.is_superseded


def test_strikes_of_other_replicas_count(make_stack) -> None:
    stack = make_stack()
    _, it = begun(make_stack())
    client = stack.client()
    for was_accepted in (True, False):
        submit = structs.replace(
            it.submit,
            handle=len(client.streams),
            stream_id=bytes([was_accepted]) * 16,
            was_accepted=was_accepted,
            moves=1,
            strikes=2,
        )
        taken = client.send_submit(submit)
        stack.until(lambda taken=taken: taken.accepted > 0)
        stream = stack.worker.streams.get(submit.stream_id)
        assert stream.strikes == 2
        assert stack.worker.lifecycle.readmission(stream).begun.strikes == stream.strikes


@pytest.mark.parametrize("other", [{"scope": b""}, {"token_ids": pack_u32([5, 7]), "text": None}])
def test_another_request_or_scope_replaces_no_stream(make_stack, other) -> None:
    stack = make_stack()
    client = stack.client()
    it = client.submit(PROMPT, **PARAMS)
    client._waiting.clear()
    it.submit = structs.replace(it.submit, scope=b"a scope")
    client.send(it.submit)
    stack.until(lambda: len(it.token_ids) > 5)
    thief = stack.client()
    stolen = structs.replace(it.submit, moves=1, was_accepted=True, **other)
    taken = thief.send_submit(stolen)
    stack.until(lambda: taken.is_over)
    assert taken.fault.code == "conflict"
    stack.until(lambda: it.is_over)
    assert not it.is_superseded
    assert it.fault is None


def test_a_stream_that_killed_three_cores_elsewhere_is_failed(make_stack) -> None:
    stack = make_stack()
    client, it = begun(stack)
    alone = client.send_submit(
        structs.replace(it.submit, handle=7, was_accepted=True, moves=1, strikes=2)
    )
    stack.until(lambda: alone.is_over)
    assert alone.fault is None
    failed = client.send_submit(
        structs.replace(it.submit, handle=8, was_accepted=True, moves=2, strikes=3)
    )
    stack.until(lambda: failed.is_over)
    assert failed.fault.code == "engine"
    assert "crashed the engine 3 times" in failed.fault.message
