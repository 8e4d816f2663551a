"""Several output workers under one core: the deal, deaths, answers together, other numbers."""

from __future__ import annotations

import random
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec import structs
from tests.helpers.stepped_client import Client, Reading, finish

from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.queries import new_recall
from slipstream.client.streams.stream_group import StreamGroup
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import UnknownStreamError
from slipstream.request.requests import checked_params, new_submit
from slipstream_ipc.messages import Cancel, KeepOptions, Locate
from slipstream_ipc.worker_deal import worker_of

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]


def client_of(stack: Any) -> Client:
    return Client(stack, kind=Cluster)


def submit_all(stack: Any, client: Client, **params: Any) -> list[Reading]:
    """Each prompt, dealt to the workers in turns."""
    num = stack.num_workers
    ids = [stack.ids(at % num, 1 + at // num)[-1] for at in range(len(PROMPTS))]
    return [client.submit(prompt, it, **params) for prompt, it in zip(PROMPTS, ids, strict=True)]


def nums_of(stack: Any) -> list[int]:
    return [len(worker.streams) for worker in stack.workers]


@pytest.mark.parametrize("num_workers", [2, 3])
def test_streams_are_dealt_by_their_ids(make_stack, expected, outcome, num_workers: int) -> None:
    params = {"max_tokens": 60, "logprobs": 1, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    stack = make_stack(num_workers=num_workers)
    streams = submit_all(stack, client_of(stack), **params)
    finish(stack, streams)
    assert outcome(streams) == outcome(plain)
    assert nums_of(stack) == [len(PROMPTS) // num_workers] * num_workers
    for stream in streams:
        assert stream.state.worker == worker_of(stream.state.stream_id, num_workers)


def test_answers_to_one_prompt_share_a_worker_that_renders_it_once(make_stack) -> None:
    stack = make_stack(num_workers=2)
    client = client_of(stack)
    stack.until(lambda: client.session.is_attached)
    asked: list[int] = []
    for source in stack.sources:
        ask = source.ask
        source.ask = lambda *given, ask=ask: asked.append(1) or ask(*given)
    streams = client.submit_together(PROMPTS[0], 3, max_tokens=20)
    finish(stack, streams)
    assert sorted(nums_of(stack)) == [0, 3]
    assert len(asked) == 1


def test_what_is_asked_before_the_first_welcome_is_dealt_with_it(make_stack) -> None:
    stack = make_stack(num_workers=2)
    client = client_of(stack)
    streams = submit_all(stack, client, max_tokens=20)
    assert {stream.state.worker for stream in streams} == {0}, "one is known of yet"
    future: Future[Any] = Future()
    client.session.ask(new_recall(stack.ids(1, 1)[0]), future, stack.now(), lambda call: call())
    finish(stack, streams)
    stack.until(future.done)
    assert nums_of(stack) == [3, 3]


@pytest.mark.parametrize("seed", range(4))
def test_streams_survive_any_deaths(make_stack, expected, outcome, seed: int) -> None:
    params = {"max_tokens": 120, "logprobs": 1, "stop": ("q}",)}
    plain = expected(PROMPTS, **params)
    dice = random.Random(seed)
    stack = make_stack(num_workers=2)
    streams = submit_all(stack, client_of(stack), **params)
    kills = [(0,), (1,), (0, 1), ("core",), (0, "core"), (1, "core"), (0, 1, "core")]
    for kill in dice.sample(kills, len(kills)):
        for _ in range(dice.randrange(40)):
            stack.step()
            for each in streams:
                each.take(dice.randrange(3))
        if "core" in kill:
            stack.kill_core()
        for index in (0, 1):
            if index in kill:
                stack.kill(index)
        if "core" in kill:
            stack.start_core()
        for _ in range(dice.randrange(10)):
            stack.step()
        stack.start_worker()
    finish(stack, streams)
    assert outcome(streams) == outcome(plain)
    assert [each.ranks for each in streams] == [each.ranks for each in plain]
    assert [each.state.end for each in streams] == [each.end for each in plain]


def test_the_death_of_one_worker_touches_its_own_streams_alone(make_stack, expected) -> None:
    [plain] = expected(PROMPTS[:1], max_tokens=400)
    stack = make_stack(num_workers=2)
    client = client_of(stack)
    stack.until(lambda: client.session.is_attached)
    kept = client.submit(PROMPTS[0], stack.ids(1, 1)[0], max_tokens=400)
    other = client.submit(PROMPTS[1], stack.ids(0, 1)[0], max_tokens=400)
    epoch = client.session._alone.links[1]._dealer.epoch
    num_deaths = 0
    while not kept.is_over:
        before = len(kept.state.deltas)
        stack.kill(0)
        # it goes on while the other worker is away
        stack.until(lambda before=before: kept.is_over or len(kept.state.deltas) > before + 3)
        stack.start(0)
        num_deaths += 1
        stack.until(lambda: kept.is_over or client.session.is_attached)
    finish(stack, [kept, other])
    assert num_deaths > 2
    assert (kept.text, kept.token_ids) == (plain.text, plain.token_ids)
    assert client.session._alone.links[1]._dealer.epoch == epoch, "its session went on"


def test_another_client_goes_on_with_a_stream_of_each_worker(make_stack, expected) -> None:
    plain = expected(PROMPTS[:2], max_tokens=150)
    stack = make_stack(num_workers=2)
    old = client_of(stack)
    before = [
        old.submit(prompt, stack.ids(worker, 1)[0], max_tokens=150)
        for worker, prompt in enumerate(PROMPTS[:2])
    ]
    stack.until(lambda: all(len(each.state.deltas) > 10 for each in before))
    for each in before:
        each.take(5)
    old.die()
    new = client_of(stack)  # it knows of one worker when it asks
    after = [new.resume(each.state.stream_id, *each.position) for each in before]
    finish(stack, after)
    for first, rest, whole in zip(before, after, plain, strict=True):
        assert first.text + rest.text == whole.text


def test_a_cancel_reaches_each_worker(make_stack) -> None:
    stack = make_stack(num_workers=2)
    client, other = client_of(stack), client_of(stack)
    streams = submit_all(stack, client, max_tokens=400)
    stack.until(lambda: all(len(each.state.deltas) > 3 for each in streams))
    ids = [bytes.fromhex(stack.ids(1, 9)[8]), *[each.state.stream_id for each in streams]]
    future: Future[Any] = Future()
    stack.until(lambda: other.session.is_attached)
    other.session.ask(Cancel(0, tuple(ids)), future, stack.now(), lambda call: call())
    stack.until(lambda: future.done() and all(each.is_over for each in streams))
    assert future.result().found == ("unknown", *["running"] * len(streams))
    assert {each.state.end.reason for each in streams} == {"abort"}


def test_streams_are_located_at_each_worker(make_stack) -> None:
    stack = make_stack(num_workers=2)
    client, other = client_of(stack), client_of(stack)
    streams = submit_all(stack, client, max_tokens=400)
    stack.until(lambda: all(len(each.state.deltas) > 3 for each in streams))
    ids = [bytes.fromhex(stack.ids(1, 9)[8]), *[each.state.stream_id for each in streams]]
    future: Future[Any] = Future()
    stack.until(lambda: other.session.is_attached)
    other.session.ask(Locate(0, tuple(ids)), future, stack.now(), lambda call: call())
    stack.until(future.done)
    assert future.result().moves == (0, *[1] * len(streams))


def test_the_first_worker_tells_the_load_of_the_stack(make_stack) -> None:
    stack = make_stack(num_workers=2)
    cluster = Cluster(
        stack.context, stack.client_address, 60.0, stack.poller, stack.now(), is_fleet=True
    )
    [member] = cluster._members.listed
    workers = [each._load_notices for each in stack.workers]

    def is_attached() -> bool:
        cluster.turn(stack.now())
        return len(member.links) == 2 and member.are_links_attached and member.said is not None

    stack.until(is_attached)
    assert [len(each.sessions) for each in workers] == [1, 0]
    cluster.close()


@pytest.mark.parametrize("worker", [0, 1])
def test_a_kept_answer_is_found_by_its_id_and_survives_its_worker(make_stack, worker: int) -> None:
    stack = make_stack(num_workers=2, response_store_mib=1.0)
    client = client_of(stack)
    stack.until(lambda: client.session.is_attached)
    submit = new_submit(
        PROMPTS[0], checked_params(None, {"max_tokens": 20}), stream_id=stack.ids(worker, 1)[0]
    )
    keep = KeepOptions(b"a record", b"a scope")
    [state] = [StreamState(submit, wants_whole=False)]
    state.request = state.resubmittable = structs.replace(submit, keep=keep)
    it = client._start(state)
    finish(stack, [it])
    for _ in range(20):
        stack.step()
    stack.kill(worker)
    stack.start(worker)
    future: Future[Any] = Future()
    asked = new_recall(stack.ids(worker, 1)[0], b"a scope")
    client_of(stack).session.ask(asked, future, stack.now(), lambda call: call())
    stack.until(future.done)
    assert future.result().answer.text == it.text


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (3, 2), (2, 3)])
def test_the_next_stack_may_have_another_number(
    make_stack, expected, outcome, before: int, after: int
) -> None:
    """All its processes are gone, so the client has the streams alone."""
    params = {"max_tokens": 120, "logprobs": 1}
    plain = expected(PROMPTS, **params)
    stack = make_stack(num_workers=before)
    client = client_of(stack)
    streams = submit_all(stack, client, **params)
    stack.until(lambda: all(len(each.state.deltas) > 5 for each in streams))
    stack.kill_worker()
    stack.kill_core()
    stack.num_workers = after
    del stack.workers[after:], stack.sources[after:]
    stack.start_core()
    stack.start_worker()
    finish(stack, streams)
    assert outcome(streams) == outcome(plain)
    assert len(client.session._alone.links) == after
    for stream in streams:
        assert stream.state.worker == worker_of(stream.state.stream_id, after)


def test_a_group_is_read_over_all_workers(make_stack, expected) -> None:
    plain = expected(PROMPTS, max_tokens=40)
    stack = make_stack(num_workers=2)
    client = client_of(stack)
    given = checked_params(None, {"temperature": 0.0, "max_tokens": 40})
    states = [StreamState(new_submit(each, given), wants_whole=False) for each in PROMPTS]
    group = StreamGroup(states)
    for state in states:
        client.session.submit(state, stack.now())
    stack.until(lambda: group.is_over)
    texts = [""] * len(states)
    for items in group.unread:
        for index, delta in items:
            texts[index] += delta.text
    assert texts == [each.text for each in plain]
    assert not any(session._table._groups for session in client.session._alone.links)


def test_a_foreign_client_may_stay_with_the_first_worker(make_stack, expected) -> None:
    """It is served there, whatever its ids; who looks by the deal finds nothing."""
    [plain] = expected(PROMPTS[:1], max_tokens=60)
    stack = make_stack(num_workers=2)
    foreign, client = stack.client(), client_of(stack)
    it = foreign.submit(PROMPTS[0], bytes.fromhex(stack.ids(1, 1)[0]), max_tokens=60)
    stack.until(lambda: it.is_over)
    assert (it.text, it.token_ids) == (plain.text, plain.token_ids)
    resumed = client.resume(it.stream_id, 0, 0)
    stack.until(lambda: resumed.is_over)
    assert isinstance(resumed.state.error, UnknownStreamError)


def test_goodbye_is_said_to_all(make_stack) -> None:
    stack = make_stack(num_workers=2)
    client = client_of(stack)
    streams = submit_all(stack, client, max_tokens=400)
    stack.until(lambda: all(len(each.state.deltas) > 3 for each in streams))
    stack.clients.remove(client)
    while not client.session.say_goodbye(stack.now()):
        stack.step()
    client.session.close()
    stack.until(lambda: nums_of(stack) == [0, 0])
