"""Streams go on at another replica when theirs is lost: nothing lost, doubled or spliced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.mini_fleet import MiniFleet
from tests.helpers.mini_stack import CHAIN
from tests.helpers.stepped_client import Reading

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
    plain = expected(PROMPTS, max_tokens=150)
    fleet = make_fleet(4)
    readings = [fleet.submit(prompt, max_tokens=150) for prompt in PROMPTS]

    def has(num_tokens: int) -> bool:
        for each in readings:
            each.take()
        return all(len(each.token_ids) >= num_tokens for each in readings)

    for turn in range(3):
        fleet.until(lambda: has(30 * (turn + 1)))  # noqa: B023  (used at once)
        fleet.kill(turn)
    fleet.finish(readings)
    assert seen(readings) == seen(plain)
    assert max(each.state.moves for each in readings) >= 1
    assert {fleet.where(each) for each in readings} == {3}


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


def test_new_streams_go_where_a_replica_is(make_fleet) -> None:
    fleet = make_fleet()
    fleet.kill(1)
    fleet.until(lambda: fleet.attached == [0, 2])
    readings = [fleet.submit(f"{n} {PROMPTS[0]}", max_tokens=4) for n in range(12)]
    assert {fleet.where(each) for each in readings} == {0, 2}
    fleet.finish(readings)
