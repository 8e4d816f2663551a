"""The controller against a launcher in memory: what it starts, drains, removes and finds again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.stack.settings import StackSettings
from slipstream_ipc.messages import Load
from slipstream_ray.actor_messages import (
    FleetSpec,
    FleetStatus,
    ReplicaReport,
    ScaleGoal,
    decoded,
    encoded,
)
from slipstream_ray.controller import Controller, NoReport
from slipstream_ray.scaling import CALM_S, ReplicaBounds

DRAIN_S = StackSettings().drain_s


def spec(least: int, most: int | None = None) -> FleetSpec:
    bounds = ReplicaBounds(least, least if most is None else most)
    return FleetSpec("demo", StackSettings(), 1.0, 0.0, ScaleGoal(bounds))


@dataclass
class Box:
    """What there is of a replica."""

    life: int
    answer: ReplicaReport | NoReport = "silent"
    goal: ScaleGoal | None = None
    is_draining: bool = False
    running: int = 0


@dataclass
class MemoryLauncher:
    """A launcher whose replicas serve, fail and end when the test says so."""

    boxes: dict[int, Box] = field(default_factory=dict)
    num_started: int = 0
    drained: list[int] = field(default_factory=list)

    def found(self) -> Collection[int]:
        return list(self.boxes)

    def start(self, index: int) -> None:
        assert index not in self.boxes
        self.num_started += 1
        self.boxes[index] = Box(self.num_started)

    def reports(self, indices: Collection[int]) -> Mapping[int, ReplicaReport | NoReport]:
        return {index: self.report(index) for index in indices}

    def report(self, index: int) -> ReplicaReport | NoReport:
        box = self.boxes.get(index)
        if box is None:
            return "gone"
        if not isinstance(box.answer, ReplicaReport):
            return box.answer
        report = msgspec.structs.replace(
            box.answer,
            goal=box.goal,
            is_draining=box.is_draining,
            load=None if box.answer.error else Load(running=box.running, max_seqs=4),
        )
        return decoded(encoded(report), ReplicaReport)

    def tell_goal(self, index: int, goal: ScaleGoal) -> None:
        self.boxes[index].goal = goal

    def drain(self, index: int) -> None:
        self.boxes[index].is_draining = True
        self.drained.append(index)

    def remove(self, index: int) -> None:
        self.boxes.pop(index, None)

    # what the test does

    def serve(self, index: int, running: int = 0) -> None:
        box = self.boxes[index]
        box.answer = ReplicaReport(f"tcp://h:{box.life}")
        box.running = running

    def serve_all(self) -> None:
        for index, box in self.boxes.items():
            if box.answer == "silent":
                self.serve(index)

    def end_drained(self) -> None:
        for box in self.boxes.values():
            if box.is_draining:
                box.answer = ReplicaReport("tcp://h:1", has_ended=True)


def started(least: int, most: int | None = None) -> tuple[Controller, MemoryLauncher]:
    """A fleet whose replicas serve, at time 1."""
    launcher = MemoryLauncher()
    controller = Controller(spec(least, most), launcher, 0.0)
    controller.turn(0.0)
    assert sorted(launcher.boxes) == list(range(least))
    assert not controller.addresses()
    launcher.serve_all()
    controller.turn(1.0)
    return controller, launcher


def conditions(controller: Controller) -> list[tuple[str, str]]:
    status = decoded(encoded(controller.status()), FleetStatus)
    return [(each.name, each.condition) for each in status.replicas]


def test_as_many_as_wanted_are_started_once():
    controller, launcher = started(3)
    assert controller.addresses() == ["tcp://h:1", "tcp://h:2", "tcp://h:3"]
    assert [each for _, each in conditions(controller)] == ["serving"] * 3
    for now in range(2, 20):
        controller.turn(float(now))
    assert launcher.num_started == 3
    assert all(box.goal == ScaleGoal(ReplicaBounds(3, 3)) for box in launcher.boxes.values())


def test_an_actor_that_is_restarted_keeps_its_address_until_it_has_another():
    controller, launcher = started(2)
    launcher.boxes[0].answer = "away"
    controller.turn(2.0)
    assert conditions(controller)[0] == ("replica-0", "away")
    assert controller.addresses() == ["tcp://h:1", "tcp://h:2"]
    launcher.boxes[0].answer, launcher.boxes[0].goal = ReplicaReport("tcp://h:9"), None
    controller.turn(3.0)
    assert controller.addresses() == ["tcp://h:9", "tcp://h:2"]
    assert launcher.num_started == 2
    assert launcher.boxes[0].goal == ScaleGoal(ReplicaBounds(2, 2))


def test_one_that_is_gone_is_started_again_under_its_name():
    controller, launcher = started(2)
    del launcher.boxes[0]
    controller.turn(2.0)
    assert sorted(launcher.boxes) == [0, 1]
    launcher.serve_all()
    controller.turn(3.0)
    assert controller.addresses() == ["tcp://h:3", "tcp://h:2"]


def test_one_that_cannot_be_started_is_tried_again_after_longer_and_longer():
    controller, launcher = started(1)
    begins = []
    launcher.boxes[0].answer = ReplicaReport(error="no such model")
    for tenth in range(20, 400):
        controller.turn(tenth / 10)
        if 0 in launcher.boxes and not isinstance(launcher.boxes[0].answer, ReplicaReport):
            begins.append(tenth / 10)
            launcher.boxes[0].answer = ReplicaReport(error="no such model")
    [shown] = controller.status().replicas
    assert (shown.condition, shown.why) == ("refused", "no such model")
    pauses = [later - sooner for sooner, later in pairwise(begins)]
    assert len(pauses) > 4
    assert pauses == sorted(pauses)
    assert pauses[-1] >= 10.0


def test_why_one_does_not_serve_is_shown():
    controller, launcher = started(1)
    controller.scale(ReplicaBounds(2, 2))
    controller.turn(2.0)
    assert controller.status().replicas[1].why == "it starts"
    launcher.boxes[1].answer = "unplaced"
    controller.turn(3.0)
    assert controller.status().replicas[1].why == "Ray has no room for it yet"


def test_the_emptiest_drains_and_is_removed_when_it_has_ended():
    controller, launcher = started(3)
    for index, running in enumerate((3, 1, 2)):
        launcher.serve(index, running)
    controller.turn(2.0)
    controller.scale(ReplicaBounds(2, 2))
    controller.turn(3.0)
    assert launcher.drained == [1]
    assert conditions(controller)[1] == ("replica-1", "draining")
    assert len(controller.addresses()) == 3  # its clients are still there
    controller.turn(4.0)
    assert launcher.drained == [1]
    launcher.end_drained()
    controller.turn(5.0)
    assert sorted(launcher.boxes) == [0, 2]


def test_those_that_do_not_serve_go_first_and_without_a_drain():
    controller, launcher = started(2)
    controller.scale(ReplicaBounds(4, 4))
    controller.turn(2.0)
    launcher.boxes[0].answer = "away"
    controller.turn(3.0)
    controller.scale(ReplicaBounds(1, 1))
    controller.turn(4.0)
    assert sorted(launcher.boxes) == [1]
    assert not launcher.drained


def test_a_drain_outlives_a_restart_of_the_actor_and_has_a_bound():
    controller, launcher = started(2)
    controller.scale(ReplicaBounds(1, 1))
    controller.turn(2.0)
    assert launcher.drained == [1]
    launcher.boxes[1].is_draining = False  # its actor was restarted
    controller.turn(3.0)
    assert launcher.drained == [1, 1]
    controller.turn(3.0 + DRAIN_S + 60.0)
    assert sorted(launcher.boxes) == [0]


def test_none_is_left_when_the_fleet_ends():
    controller, launcher = started(2)
    controller.scale(ReplicaBounds(0, 0))
    controller.turn(2.0)
    launcher.end_drained()
    controller.turn(3.0)
    assert not launcher.boxes
    assert controller.status().replicas == ()
    controller, launcher = started(2)
    controller.remove_all()
    controller.turn(2.0)
    assert (launcher.boxes, launcher.drained) == ({}, [])


def test_one_that_begins_anew_waits_for_what_it_finds():
    controller, launcher = started(1)
    controller.scale(ReplicaBounds(2, 2))
    controller.turn(2.0)
    launcher.serve_all()
    controller.turn(3.0)
    controller.turn(4.0)
    for box in launcher.boxes.values():
        box.answer = "silent"
    again = Controller(spec(1), launcher, 10.0)
    again.turn(10.0)
    assert again.is_finding
    launcher.serve_all()
    again.turn(11.0)
    assert not again.is_finding
    assert again.status().goal.bounds == ReplicaBounds(2, 2)  # not that of the start
    again.turn(12.0)
    assert (sorted(launcher.boxes), launcher.num_started, launcher.drained) == ([0, 1], 2, [])


@pytest.mark.parametrize("remembered", [1, 2])
@pytest.mark.parametrize("asked", [0, 4])
def test_what_is_asked_of_one_that_begins_anew_is_later_than_what_it_finds(
    remembered: int, asked: int
):
    controller, launcher = started(1)
    for number in range(2, 2 + remembered):
        controller.scale(ReplicaBounds(number, number))
        controller.turn(float(number))
        launcher.serve_all()
        controller.turn(number + 0.5)
    for box in launcher.boxes.values():
        box.answer = "silent"
    again = Controller(spec(1), launcher, 10.0)
    again.turn(10.0)
    again.scale(ReplicaBounds(asked, asked))
    launcher.serve_all()
    for now in range(11, 15):
        again.turn(float(now))
        launcher.end_drained()
    assert len(launcher.boxes) == asked
    goals = [box.goal for box in launcher.boxes.values() if box.goal is not None]
    assert all(goal.version > remembered for goal in (again.status().goal, *goals))


def test_one_that_finds_nobody_in_time_goes_on():
    _, launcher = started(1)
    launcher.boxes[0].answer = "silent"
    again = Controller(spec(2), launcher, 10.0)
    again.turn(39.0)
    assert again.is_finding
    again.turn(40.0)
    assert sorted(launcher.boxes) == [0, 1]


def test_requests_raise_the_number_at_once_and_their_end_lowers_it_later():
    controller, launcher = started(1, 4)
    launcher.serve(0, 7)
    controller.turn(2.0)
    assert sorted(launcher.boxes) == [0, 1, 2]
    launcher.serve_all()
    launcher.serve(0, 0)
    for second in range(3, 300):
        controller.turn(float(second))
    assert len(launcher.boxes) == 3
    assert not launcher.drained
    controller.turn(3.0 + CALM_S)
    assert len(launcher.drained) == 2


EVENTS = ["serve", "away", "gone", "fails", "drained", "restart", "scale"]


@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 4)), max_size=40),
    st.integers(1, 3),
)
def test_whatever_happens_there_are_as_many_in_the_end(events, wanted: int):
    launcher = MemoryLauncher()
    controller, now = Controller(spec(wanted), launcher, 0.0), 0.0
    for event, number in events:
        now += 1.0
        box = launcher.boxes.get(number)
        if event == "restart":
            controller = Controller(spec(1), launcher, now)
        elif event == "scale":
            wanted = max(1, number)
            controller.scale(ReplicaBounds(wanted, wanted))
        elif event == "gone":
            launcher.boxes.pop(number, None)
        elif event == "drained":
            launcher.end_drained()
        elif box is not None and event == "serve":
            launcher.serve(number)
        elif box is not None:
            box.answer = "away" if event == "away" else ReplicaReport(error="no")
        controller.turn(now)
    controller.scale(ReplicaBounds(wanted, wanted))
    for _ in range(200):
        now += 1.0
        controller.turn(now)
        for index, box in launcher.boxes.items():
            if not isinstance(box.answer, ReplicaReport) or box.answer.error:
                launcher.serve(index)
        launcher.end_drained()
    assert len(launcher.boxes) == wanted
    assert [each for _, each in conditions(controller)] == ["serving"] * wanted
    assert len(controller.addresses()) == len(set(controller.addresses())) == wanted


@pytest.mark.parametrize("message", [spec(1, 3), ReplicaReport("tcp://h:1", load=Load(running=3))])
def test_messages_survive_their_encoding(message: msgspec.Struct):
    assert decoded(encoded(message), type(message)) == message
