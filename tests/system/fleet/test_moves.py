"""Streams go on at another replica when theirs is lost: nothing lost, doubled or spliced."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from msgspec.structs import replace
from tests.helpers.mini_fleet import MiniFleet
from tests.helpers.mini_stack import CHAIN
from tests.helpers.stepped_client import Reading

from slipstream import ClosedError, SlipstreamError, SupersededError
from slipstream.client.connection.cluster import Cluster
from slipstream.client.endpoints import LOCK_NAME
from slipstream.client.placing import moves
from slipstream.client.placing.moves import MoveSettings
from slipstream.client.streams.stream_state import StreamState
from slipstream.prompt_logprobs import prompt_logprobs_of
from slipstream.request.requests import checked_params, new_resume, new_submit
from slipstream_ipc.messages import (
    Cancel,
    KeepOptions,
    ModelCard,
    Recall,
    StructuredOutputs,
)

pytestmark = pytest.mark.process

PROMPTS = [f"Chapter {n}: how names are bound, and where." for n in range(6)]
EVERYTHING = {"max_tokens": 60, "logprobs": 1, "stop": ("q}",)}


@pytest.fixture
def make_fleet(make_stack: Callable[..., Any]) -> Iterator[Callable[..., MiniFleet]]:
    fleets: list[MiniFleet] = []

    def make(num: int = 3, models: tuple[str, ...] = (), **settings: Any) -> MiniFleet:
        stacks = [make_stack(model) for model in models or (CHAIN,) * num]
        fleets.append(MiniFleet(stacks, **settings))
        fleets[-1].attach()
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def seen(readings: list[Any]) -> list[tuple[str, list[int], list[int]]]:
    return [(each.text, each.token_ids, each.ranks) for each in readings]


@pytest.mark.parametrize("num_steps", [*range(12), 20, 40, 80])
def test_replica_killed_at_every_protocol_point(make_fleet, expected, num_steps: int) -> None:
    plain = expected(PROMPTS, **EVERYTHING)
    fleet = make_fleet()
    readings = [fleet.submit(prompt, **EVERYTHING) for prompt in PROMPTS]
    for _ in range(num_steps):
        fleet.step()
    fleet.kill(fleet.where(readings[0]))
    fleet.finish(readings)
    assert seen(readings) == seen(plain)
    assert [each.state.end for each in readings] == [each.end for each in plain]


def test_three_replicas_killed_in_turn(make_fleet, expected) -> None:
    plain = expected(PROMPTS, max_tokens=300)
    fleet = make_fleet(4)
    readings = [fleet.submit(prompt, max_tokens=300) for prompt in PROMPTS]

    def has(num_tokens: int) -> bool:
        for each in readings:
            each.take()
        return all(len(each.token_ids) >= num_tokens for each in readings)

    for turn in range(3):
        fleet.until(lambda: has(30 * (turn + 1)))  # noqa: B023  (used at once)
        cut = [each for each in readings if not each.state.is_over]
        fleet.kill(turn)
    fleet.finish(readings)
    assert seen(readings) == seen(plain)
    assert max(each.state.moves for each in readings) >= 1
    assert {fleet.where(each) for each in cut} == {3}


def lost_with(fleet: MiniFleet, readings: list[Reading], num_tokens: int) -> None:
    """Kill the replica of the first stream once it has so many tokens."""
    fleet.until(lambda: len(readings[0].token_ids) >= num_tokens or bool(readings[0].take()))
    fleet.kill(fleet.where(readings[0]))


def test_fleet_gone_and_back_within_the_wait(make_fleet, expected) -> None:
    plain = expected(PROMPTS, max_tokens=60)
    fleet = make_fleet(2)
    readings = [fleet.submit(prompt, max_tokens=60) for prompt in PROMPTS]
    lost_with(fleet, readings, 10)
    for index, stack in enumerate(fleet.stacks):
        if stack.worker is not None:
            fleet.kill(index)
    fleet.until(lambda: not fleet.session.is_attached)
    for _ in range(20):
        fleet.step()
    fleet.start_again(1)
    fleet.finish(readings)
    assert seen(readings) == seen(plain)


def test_submitted_before_any_replica_is_there(make_stack, expected) -> None:
    plain = expected(PROMPTS, max_tokens=20)
    fleet = MiniFleet([make_stack(CHAIN) for _ in range(2)])
    try:
        readings = [fleet.submit(prompt, max_tokens=20) for prompt in PROMPTS]
        assert {fleet.where(each) for each in readings} == {-1}
        fleet.finish(readings)
    finally:
        fleet.close()
    assert seen(readings) == seen(plain)
    assert {each.state.moves for each in readings} == {0}


def test_several_answers_to_a_prompt_go_to_one_replica_and_move_together(
    make_fleet, make_stack
) -> None:
    plain = make_fleet(1)
    answers = plain.submit_together("A story:", 4, max_tokens=40)
    plain.finish(answers)
    fleet = make_fleet()
    readings = fleet.submit_together("A story:", 4, max_tokens=40)
    assert len({fleet.where(each) for each in readings}) == 1
    lost_with(fleet, readings, 10)
    fleet.finish(readings)
    assert len({text for text, _, _ in seen(answers)}) > 1
    assert {each.state.moves for each in readings} == {1}


def test_aborted_and_abandoned_while_a_replica_is_lost(make_fleet) -> None:
    fleet = make_fleet()
    readings = [fleet.submit(PROMPTS[0], max_tokens=400) for _ in range(3)]
    fleet.until(lambda: all(each.state.deltas for each in readings))
    fleet.kill(fleet.where(readings[0]))
    fleet.session.abort(readings[0].state)
    fleet.session.abandon(readings[1].state)
    fleet.finish(readings)
    assert len(readings[2].token_ids) == 400
    assert readings[1].state.end is None
    left = [stack for stack in fleet.stacks if stack.core is not None]
    fleet.until(lambda: not any(stack.held["running"] for stack in left))


def answer_of(fleet: MiniFleet, query: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    fleet.session.ask(query, answer, fleet.now(), lambda command: command())
    return answer


def under_way(fleet: MiniFleet, num: int, **keep: Any) -> list[Reading]:
    """Streams of many tokens, of which some have come."""
    given = checked_params(None, {"temperature": 0.0, "max_tokens": 400})
    submits = [replace(new_submit(PROMPTS[0], given), **keep) for _ in range(num)]
    readings = [fleet.start(StreamState(submit, wants_whole=False)) for submit in submits]
    fleet.until(lambda: all(each.state.deltas for each in readings))
    return readings


def test_a_stream_that_waits_for_room_elsewhere_can_be_cancelled(make_fleet, monkeypatch) -> None:
    """No replica knows it for a while; it was said never to have existed, and ran on."""
    monkeypatch.setattr(moves, "MAX_STARTS", 4)
    fleet = make_fleet(2)
    for member in fleet.session._moves._members.values():
        member.starts = deque(maxlen=4)
    readings = under_way(fleet, 24)
    lost = fleet.where(readings[0])
    there = [each for each in readings if fleet.where(each) == lost]
    fleet.kill(lost)
    fleet.until(lambda: any(fleet.where(each) == -1 for each in there))
    held = [each for each in there if fleet.where(each) == -1]
    answers = [answer_of(fleet, Cancel(0, (each.state.stream_id,))) for each in held]
    fleet.until(lambda: all(each.done() for each in answers))
    assert {found for each in answers for found in each.result().found} == {"running"}
    fleet.finish(readings)
    assert {each.state.end.reason for each in held} == {"abort"}


def test_a_stream_can_be_cancelled_while_the_whole_fleet_is_away(make_fleet) -> None:
    fleet = make_fleet(2)
    readings = under_way(fleet, 6)
    home = fleet.where(readings[0])
    there = tuple(each.state.stream_id for each in readings if fleet.where(each) == home)
    for number in range(2):
        fleet.kill(number)
    fleet.until(lambda: not fleet.session.is_attached)
    answer = answer_of(fleet, Cancel(0, there))
    for number in (1 - home, home):
        fleet.start_again(number)
        fleet.until(lambda number=number: number in fleet.attached)
    fleet.until(answer.done)
    assert set(answer.result().found) == {"running"}
    fleet.finish(readings)


def test_what_waits_to_be_cancelled_waits_no_longer_than_other_questions(make_fleet) -> None:
    fleet = make_fleet(1)
    [reading] = under_way(fleet, 1)
    fleet.kill(0)
    fleet.until(lambda: not fleet.session.is_attached)
    answer = answer_of(fleet, Cancel(0, (reading.state.stream_id,)))
    fleet.session.turn(fleet.now() + 59.0)
    assert not answer.done()
    fleet.session.turn(fleet.now() + 61.0)
    assert isinstance(answer.exception(timeout=0), SlipstreamError)


def test_what_waits_to_be_cancelled_is_told_when_the_client_ends(make_fleet) -> None:
    fleet = make_fleet(1)
    [reading] = under_way(fleet, 1)
    fleet.kill(0)
    fleet.until(lambda: not fleet.session.is_attached)
    answer, given_up = (answer_of(fleet, Cancel(0, (reading.state.stream_id,))) for _ in range(2))
    given_up.cancel()
    fleet.step()
    fleet.session.end_all(lambda: ClosedError("closed"))
    assert isinstance(answer.exception(), ClosedError)


@pytest.mark.parametrize("forget", [False, True])
def test_an_accepted_stream_is_aborted_where_its_prompt_is_tokenised_again(
    make_fleet, *, forget: bool
) -> None:
    """It ended as its client's fault, and its answer was lost."""
    fleet = make_fleet(2)
    [reading] = under_way(fleet, 1, keep=KeepOptions(b"record", b"", is_background=True))
    source = fleet.where(reading)
    fleet.stacks[1 - source].prompts.is_held = True
    fleet.kill(source)
    fleet.until(lambda: bool(fleet.stacks[1 - source].prompts.asked))
    reading.take()
    num_tokens, stream_id = len(reading.token_ids), reading.state.stream_id
    query = Recall(0, stream_id, forget=True) if forget else Cancel(0, (stream_id,))
    asked = answer_of(fleet, query)
    fleet.until(asked.done)
    fleet.stacks[1 - source].prompts.is_held = False
    fleet.finish([reading])
    assert reading.state.error is None
    assert reading.state.end.reason == "abort"
    assert len(reading.token_ids) == reading.state.end.num_tokens == num_tokens > 0
    recalled = answer_of(fleet, Recall(0, stream_id))
    fleet.until(recalled.done)
    kept = recalled.result().answer
    assert (kept is None) == forget
    assert forget or kept.end.reason == "abort"


def test_what_is_asked_before_a_replica_is_missed_is_asked_where_its_streams_go(make_fleet) -> None:
    """The others did not know them yet, and the one that comes back does not know them any more."""
    fleet = make_fleet(2)
    keep = KeepOptions(b"record", b"", is_background=True)
    first, second = readings = under_way(fleet, 2, keep=keep)
    ids = [each.state.stream_id for each in readings]
    source = fleet.where(first)
    assert fleet.where(second) == source
    fleet.kill(source)
    recalled, cancelled = (
        answer_of(fleet, Recall(0, ids[0])),
        answer_of(fleet, Cancel(0, (ids[1],))),
    )
    fleet.until(lambda: {fleet.where(each) for each in readings} == {1 - source})
    fleet.start_again(source)
    fleet.until(lambda: recalled.done() and cancelled.done())
    assert recalled.result().answer is not None
    assert cancelled.result().found == ("running",)
    fleet.finish(readings)
    assert [each.state.end.reason for each in readings] == ["length", "abort"]


def test_new_streams_go_where_a_replica_is(make_fleet) -> None:
    fleet = make_fleet()
    fleet.kill(1)
    fleet.until(lambda: fleet.attached == [0, 2])
    readings = [fleet.submit(f"{n} {PROMPTS[0]}", max_tokens=4) for n in range(12)]
    assert {fleet.where(each) for each in readings} == {0, 2}
    fleet.finish(readings)


def begun(fleet: MiniFleet, num_tokens: int = 15, **params: Any) -> Reading:
    """A stream of which so many tokens were read."""
    reading = fleet.submit(PROMPTS[0], **params)
    read_on(fleet, reading, num_tokens)
    return reading


def read_on(fleet: MiniFleet, reading: Reading, num_tokens: int) -> None:
    def has_more() -> bool:
        reading.take()
        return len(reading.token_ids) >= num_tokens

    fleet.until(has_more)


def moved_away(fleet: MiniFleet, reading: Reading) -> int:
    """The replica that a stream leaves for another one, where it runs on for a while."""
    first = fleet.where(reading)
    fleet.cut(first)
    fleet.until(lambda: fleet.where(reading) not in (first, -1))
    read_on(fleet, reading, len(reading.token_ids) + 5)
    return first


LONG = {"max_tokens": 300, "logprobs": 1, "temperature": 0.8, "seed": 3}


def test_stream_returns_to_a_replica_where_it_still_runs(make_fleet, expected) -> None:
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    first = moved_away(fleet, reading)
    second = fleet.where(reading)
    assert fleet.stacks[first].held["running"] == 1
    fleet.kill(second)
    fleet.until(lambda: fleet.where(reading) == second and second not in fleet.attached)
    fleet.heal(first)
    fleet.finish([reading])
    assert (fleet.where(reading), reading.state.moves) == (first, 2)
    assert seen([reading]) == seen([plain])


def test_stream_returns_to_a_replica_that_aborted_it(make_fleet, expected) -> None:
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    first = moved_away(fleet, reading)
    fleet.heal(first)
    fleet.until(lambda: fleet.stacks[first].held["running"] == 0)
    assert not reading.is_over
    fleet.kill(fleet.where(reading))
    fleet.finish([reading])
    assert (fleet.where(reading), reading.state.moves) == (first, 2)
    assert seen([reading]) == seen([plain])


def test_stream_returns_to_a_replica_that_forgot_it(make_fleet, expected) -> None:
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    first = fleet.where(reading)
    fleet.kill(first)
    fleet.until(lambda: fleet.where(reading) not in (first, -1))
    read_on(fleet, reading, len(reading.token_ids) + 5)
    fleet.start_again(first)
    fleet.attach()
    fleet.kill(fleet.where(reading))
    fleet.finish([reading])
    assert (fleet.where(reading), reading.state.moves) == (first, 2)
    assert seen([reading]) == seen([plain])


def test_partition_heals_no_stream_doubled(make_fleet, expected) -> None:
    plain = expected(PROMPTS, max_tokens=200)
    fleet = make_fleet(2)
    readings = [fleet.submit(prompt, max_tokens=200) for prompt in PROMPTS]
    read_on(fleet, readings[0], 20)
    first = moved_away(fleet, readings[0])
    fleet.heal(first)
    fleet.attach()
    fleet.finish(readings)
    assert seen(readings) == seen(plain)
    fleet.until(lambda: fleet.stacks[first].held["running"] == 0)


def test_worker_of_a_replica_replaced_without_a_move(make_fleet, expected) -> None:
    plain = expected(PROMPTS, max_tokens=150)
    fleet = make_fleet(2)
    readings = [fleet.submit(prompt, max_tokens=150) for prompt in PROMPTS]
    read_on(fleet, readings[0], 10)
    stack = fleet.stacks[fleet.where(readings[0])]
    stack.kill_worker()
    stack.start_worker()
    fleet.finish(readings)
    assert seen(readings) == seen(plain)
    assert {each.state.moves for each in readings} == {0}


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 20])
@pytest.mark.parametrize(
    "params",
    [
        {"stop": ("q}", "zq")},
        {"presence_penalty": 0.7, "repetition_penalty": 1.2, "min_tokens": 30},
        {"structured_outputs": StructuredOutputs(regex="[a-z ]{120,160}"), "stop_token_ids": [0]},
        {"prompt_logprobs": 2},
        {"ignore_eos": True, "skip_special_tokens": False},
    ],
    ids=["stop", "penalties", "grammar", "prompt_logprobs", "eos"],
)
def test_moved_with_everything_a_request_may_ask(
    make_fleet, params: dict[str, Any], num_tokens: int
) -> None:
    asked = {"max_tokens": 60, "logprobs": 2, "temperature": 0.9, "seed": 5, **params}
    alone = make_fleet(1)
    plain = alone.submit(PROMPTS[0], **asked)
    alone.finish([plain])
    fleet = make_fleet(2)
    reading = begun(fleet, num_tokens, **asked)
    fleet.kill(fleet.where(reading))
    fleet.finish([reading])
    assert seen([reading]) == seen([plain])
    assert prompt_logprobs_of(reading.state.prompt_logprobs) == prompt_logprobs_of(
        plain.state.prompt_logprobs
    )
    assert reading.state.end is not None
    assert plain.state.end is not None
    assert reading.state.end.reason == plain.state.end.reason


def resumed(fleet: MiniFleet, session: Cluster, reading: Reading) -> Reading:
    """The reader comes back, with the request, to where it has read."""
    return resumed_at(fleet, session, reading, reading.position)


def resumed_at(
    fleet: MiniFleet, session: Cluster, reading: Reading, position: tuple[int, int]
) -> Reading:
    """A reader comes back, with the request, to a position."""
    resume = new_resume(reading.state.stream_id.hex(), *position)
    submit = reading.state.resubmittable
    state = StreamState(resume, wants_whole=False, resubmittable=submit)
    return fleet.start(state, session)


def assert_only_the_later_reads(
    fleet: MiniFleet, reading: Reading, later: Reading, plain: Reading
) -> None:
    fleet.until(lambda: reading.is_over and later.is_over)
    later.take()
    assert isinstance(reading.state.error, SupersededError)
    assert later.state.error is None, later.state.error
    assert reading.text + later.text == plain.text


@pytest.mark.parametrize("is_noticed", [False, True], ids=["at_once", "held"])
def test_reader_back_at_its_front_while_the_replica_is_lost(
    make_fleet, expected, is_noticed: bool
) -> None:
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    first = fleet.where(reading)
    fleet.kill(first)
    if is_noticed:
        fleet.kill(1 - first)  # so that the stream is nowhere
        fleet.until(lambda: not fleet.session.is_attached)
        fleet.start_again(1 - first)
    later = resumed(fleet, fleet.session, reading)
    assert_only_the_later_reads(fleet, reading, later, plain)


@pytest.mark.parametrize("comes", [True, False])
def test_client_waits_for_other_replicas_for_a_moment(make_fleet, comes: bool) -> None:
    """Else a batch that is submitted at once goes to the first that answers."""
    fleet = make_fleet(2)
    stack = fleet.stacks[0]
    stack.kill_worker()
    (stack.directory / LOCK_NAME).write_text(str(os.getpid()))  # its supervisor is there
    other, card = fleet.client(), Future[ModelCard]()
    other.connect(card, fleet.now())
    fleet.until(lambda: other.is_attached)
    assert not card.done()
    if comes:
        stack.start_worker()
    fleet.until(card.done)
    assert card.result().name


def test_request_made_again_after_its_stream_has_moved(make_fleet, expected) -> None:
    """Its client has died and submits what it has read nothing of, under the same id."""
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    moved_away(fleet, reading)
    fleet.clients.remove(fleet.session)
    other = fleet.client()
    fleet.until(lambda: other.is_attached)
    submit = reading.state.resubmittable
    assert submit is not None
    again = fleet.start(StreamState(submit, wants_whole=False), other)
    fleet.finish([again])
    assert seen([again]) == seen([plain])


def test_resumed_while_the_worker_that_has_it_is_replaced(make_fleet, expected) -> None:
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    stack = fleet.stacks[fleet.where(reading)]
    fleet.clients.remove(fleet.session)
    stack.kill_worker()
    (stack.directory / LOCK_NAME).write_text(str(os.getpid()))  # its supervisor is there
    other = fleet.client()
    fleet.until(lambda: other.is_attached)
    later = fleet.resume(other, reading)
    begin = fleet.now()
    fleet.until(lambda: fleet.now() > begin + 1.5 * MoveSettings().patience_s)
    assert not later.is_over, later.state.error
    stack.start_worker()
    fleet.finish([later])
    assert reading.text + later.text == plain.text


def test_reader_back_at_another_front_while_the_replica_is_lost(make_fleet, expected) -> None:
    """The first front moves the stream when the later reader has it already."""
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    fleet.kill(fleet.where(reading))
    fleet.clients.remove(fleet.session)  # it has not noticed
    other = fleet.client()
    fleet.until(lambda: other.is_attached)
    later = resumed(fleet, other, reading)
    fleet.until(lambda: bool(later.state.deltas))
    fleet.clients.append(fleet.session)
    assert_only_the_later_reads(fleet, reading, later, plain)


@pytest.mark.parametrize("are_spread", [False, True], ids=["alike", "other_loads"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["ahead", "behind"])
def test_two_readers_at_two_fronts_of_a_stream_that_no_replica_has(
    make_fleet, expected, order: tuple[int, int], are_spread: bool
) -> None:
    """Both have it computed again, with the same `moves`; one of them reads it to its end."""
    [plain] = expected(PROMPTS[:1], **LONG)
    fleet = make_fleet(2)
    reading = begun(fleet, **LONG)
    positions = [reading.position]
    read_on(fleet, reading, 60)
    positions.append(reading.position)
    for index in range(2):
        fleet.kill(index)
    fleet.clients.remove(fleet.session)  # its front is lost, too
    fleet.session.close()
    for index in range(2):
        fleet.start_again(index)
    fronts = fleet.client(), fleet.client()
    fleet.until(lambda: all(len(each._moves.open_members()) == 2 for each in fronts))
    if are_spread:  # each front has sent much to another replica
        for index, front in enumerate(fronts):
            front._members[index].load.note_sent(1_000_000, fleet.now())
    readers = [
        resumed_at(fleet, front, reading, positions[number])
        for front, number in zip(fronts, order, strict=True)
    ]
    fleet.until(lambda: all(each.is_over for each in readers))
    [other] = [each for each in readers if each.state.error is not None]
    assert isinstance(other.state.error, SupersededError), other.state.error
    [whole] = [each for each in readers if each is not other]
    whole.take()
    _, num_tokens = positions[order[readers.index(whole)]]
    assert whole.token_ids == plain.token_ids[num_tokens:]
    assert plain.text.endswith(whole.text)
