"""Recalls that wait: who is asked about them, how often, and in which order they are answered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream_ipc.messages import Recall, Recalled
from slipstream_worker.lifecycle import recall_queue as module
from slipstream_worker.lifecycle.recall_queue import RecallQueue

MANY = 1000


class World:
    """A worker's lifecycle and clients, which count what they are asked. num_looks: how often it
    was asked whether a stream is undecided; forgotten: the streams that are, in their order.
    """

    def __init__(self) -> None:
        self.keeper = SimpleNamespace(is_complete=True)
        self.retention: Any = SimpleNamespace(now=100.0)
        self.undecided: set[bytes] = set()
        self.unread: set[bytes] = set()  # clients that leave much unread
        self.num_looks = 0
        self.num_reads = 0  # how often it was asked what a client has left unread
        self.forgotten: list[bytes] = []
        self.said: list[tuple[bytes, Recalled]] = []
        world: Any = self
        self.queue = RecallQueue(world, world, self.retention)

    def is_undecided(self, stream_id: bytes) -> bool:
        self.num_looks += 1
        return stream_id in self.undecided

    def leaves_much_unread(self, client: bytes) -> bool:
        self.num_reads += 1
        return client in self.unread

    def recall(self, stream_id: bytes, scope: bytes, *, forget: bool) -> None:
        if forget:
            self.forgotten.append(stream_id)

    def respond(self, client: bytes, found: Recalled) -> None:
        self.said.append((client, found))

    def flush_all(self) -> None:
        for _ in range(MANY):
            self.retention.now += module.LOOK_S
            self.queue.flush()

    @property
    def numbers(self) -> list[int]:
        """Of the Recalls that have been answered, without a fault."""
        return [found.number for _, found in self.said if found.fault is None]


def session(identity: bytes = b"me", public_key: bytes = b"") -> Any:
    return SimpleNamespace(identity=identity, public_key=public_key, is_open=True)


@pytest.fixture
def world() -> World:
    return World()


def test_what_arrives_is_looked_at_once_and_answered_in_order(world: World) -> None:
    mine = session()
    for number in range(MANY):
        world.queue.add(mine, Recall(number, b"%d" % number, forget=True))
    assert (world.said, world.forgotten) == ([], [])  # before what has arrived with it
    world.flush_all()
    assert world.numbers == list(range(MANY))
    assert world.forgotten == [b"%d" % number for number in range(MANY)]
    assert (world.num_looks, len(world.queue)) == (MANY, 0)


def test_nothing_is_looked_at_while_answers_are_restored(world: World) -> None:
    world.keeper.is_complete = False
    mine = session()
    for number in range(MANY):
        world.queue.add(mine, Recall(number, b"a"))
        world.queue.flush()
    assert (world.num_looks, world.num_reads, world.said) == (0, 0, [])
    world.keeper.is_complete = True
    world.flush_all()
    assert world.numbers == list(range(MANY))


def test_turns_cost_nothing_while_streams_are_undecided(world: World) -> None:
    """Each is looked at as it arrives, and then in one turn of those that follow at once."""
    world.undecided.add(b"a")
    mine = session()
    for number in range(MANY):
        world.queue.add(mine, Recall(number, b"a"))
        world.queue.flush()
    for _ in range(MANY):
        world.queue.flush()
    assert world.num_looks <= 2 * MANY + 1
    assert (world.num_reads, world.said, len(world.queue)) == (0, [], MANY)
    world.retention.now += module.LOOK_S
    world.queue.flush()
    assert world.num_looks <= 3 * MANY + 1
    world.undecided.clear()
    world.flush_all()
    assert sorted(world.numbers) == list(range(MANY))


def test_a_turn_answers_a_limited_number(world: World) -> None:
    mine = session()
    for number in range(2 * module.MAX_ANSWERED + 1):
        world.queue.add(mine, Recall(number, b"a"))
    found = []
    for _ in range(4):
        world.queue.flush()
        found.append(len(world.said))
    most = module.MAX_ANSWERED
    assert found == [most, 2 * most, 2 * most + 1, 2 * most + 1]


def test_a_client_that_has_much_to_read_gets_no_fault_and_holds_up_no_other(world: World) -> None:
    world.unread.add(b"slow")
    slow, quick = session(b"slow"), session(b"quick")
    for number in range(MANY):
        world.queue.add(slow, Recall(number, b"a"))
    world.queue.add(quick, Recall(MANY, b"b"))
    world.queue.flush()
    assert world.numbers == [MANY]
    world.unread.clear()
    world.flush_all()
    assert sorted(world.numbers) == list(range(MANY + 1))


def test_one_whose_session_has_ended_is_dropped(world: World) -> None:
    """Its client repeats it; before that it may have been looked at, or not."""
    world.undecided.add(b"a")
    before, after = session(), session()
    world.queue.add(before, Recall(1, b"a", forget=True))
    world.queue.flush()
    world.queue.add(before, Recall(2, b"b", forget=True))
    before.is_open = False
    world.queue.add(after, Recall(1, b"a", forget=True))
    world.undecided.clear()
    world.flush_all()
    assert (world.numbers, world.forgotten, len(world.queue)) == ([1], [b"a"], 0)


def test_one_whose_session_has_ended_takes_no_room(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    world.keeper.is_complete = False
    for _ in range(5):
        mine = session()
        world.queue.add(mine, Recall(1, b"a"))
        mine.is_open = False
        world.queue.beat()
        assert len(world.queue) == 0
    assert not world.said


@pytest.mark.parametrize("public_key", [b"", b"key"])
def test_a_tenant_leaves_room_for_others(
    world: World, monkeypatch: pytest.MonkeyPatch, public_key: bytes
) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 16)
    world.keeper.is_complete = False
    greedy = session(b"greedy", public_key)
    for number in range(10):
        world.queue.add(greedy, Recall(number, b"a", forget=True))
    assert [found.number for _, found in world.said] == [8, 9]
    assert {found.fault and found.fault.code for _, found in world.said} == {"overloaded"}
    for number in range(10, 14):
        world.queue.add(session(b"%d" % number, public_key and b"other"), Recall(number, b"a"))
    assert len(world.said) == 2
    world.keeper.is_complete = True
    world.flush_all()
    assert sorted(world.numbers) == [*range(8), *range(10, 14)]
    assert len(world.forgotten) == 8
