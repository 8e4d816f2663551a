"""Changes of adapters in fleets: replicas that die between the stages, files that differ."""

from __future__ import annotations

import select
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S

from slipstream.client.placing.staged_change import Ask, StagedChange, commit_of
from slipstream_core.adapters.adapter_error import AdapterError
from slipstream_core.adapters.names_file import AdapterNames
from slipstream_core.config import LoraConfig
from slipstream_core.workers.adapter_changes import AdapterChanges
from slipstream_core.workers.adapters import Adapters
from slipstream_ipc.adapter_records import RecordTable
from slipstream_ipc.messages import (
    AdapterChange,
    AdapterChanged,
    AdapterRecord,
    AdapterRef,
    ChangeAdapter,
    Fault,
)

NAMES, PATHS, NUM_REPLICAS = "xy", ("/1", "/2"), 3


@dataclass(frozen=True)
class Read:
    digest: bytes
    num_bytes: int = 10
    warning: str = ""


@dataclass
class Disk:
    """In place of a runner's memory, with the files that a replica can read."""

    files: dict[str, bytes]
    held: dict[int, Read] = field(default_factory=dict)

    def prepare_thread(self) -> None:
        pass

    def read(self, path: str, roots: Any = None) -> Read:
        if path not in self.files:
            raise AdapterError(f"{path}: there is no folder", "missing")
        return Read(self.files[path])

    def put(self, place: int, adapter: Read) -> None:
        self.held[place] = adapter

    def clear(self, place: int) -> None:
        del self.held[place]

    def num_bytes(self, place: int) -> int:
        return self.held[place].num_bytes


class Replica:
    """A core's part in changes, that dies and starts again."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.disk = Disk(files)
        self._numbers = count()
        self._start(AdapterNames())

    def _start(self, left: AdapterNames) -> None:
        self.disk.held.clear()
        served = [each for each in left.served if each.path in self.disk.files]
        served = [replace(each, digest=self.disk.files[each.path]) for each in served]
        for place, each in enumerate(served):
            self.disk.put(place, Read(each.digest))
        adapters = Adapters(served, num_places=4, store=self.disk)  # type: ignore[arg-type]
        lora = LoraConfig(max_rank=16, max_loras=4, is_updatable=True, roots=("/",))
        self.changes = AdapterChanges(adapters, ("base",), lora, self.disk, None, left)  # type: ignore[arg-type]

    def restart(self, *, forgets: bool) -> None:
        """A whole replica is lost, or its core, whose successor reads what it has left."""
        served, records = self.changes.adapters.served, self.changes.records.all
        self.close()
        self._start(AdapterNames() if forgets else AdapterNames(served, records=records))

    def close(self) -> None:
        self.changes.close()

    def ask(self, query: ChangeAdapter) -> AdapterChanged:
        """The answer of the replica, once it has it."""
        fields = {name: getattr(query, name) for name in query.__struct_fields__}
        change = AdapterChange(**fields | {"number": next(self._numbers)})
        outcome = self.changes.ask(b"worker", change)
        while outcome is None:
            assert select.select([self.changes], [], [], PATIENCE_S)[0]
            for done in self.changes.take_done(0.0):
                outcome = done.outcome
        given = {name: getattr(outcome, name) for name in outcome.__struct_fields__}
        return AdapterChanged(**given)

    @property
    def served(self) -> dict[str, bytes]:
        return {each.name: each.digest for each in self.changes.adapters.served}

    @property
    def records(self) -> RecordTable:
        return self.changes.records

    def catch_up(self, known: RecordTable) -> None:
        """Someone who knows of these changes tells it of those that it lacks."""
        for record in known.not_done(self.records, self.changes.adapters.served):
            self.ask(commit_of(record))


class Fleet:
    """Replicas, and one who changes all of them, step by step."""

    def __init__(self, replicas: list[Replica]) -> None:
        self.replicas = replicas
        self.known = RecordTable()
        self._operations = count(1)

    def hear(self) -> None:
        """The records that all replicas report."""
        for replica in self.replicas:
            for record in replica.records.all:
                self.known.take(record)

    def served_as(self, name: str) -> AdapterRef | None:
        """What a client's list says of a name."""
        self.hear()
        record = self.known.get(name)
        if record is None or not record.path:
            return None
        return AdapterRef(name, record.path, record.digest)

    def operation(self) -> bytes:
        return next(self._operations).to_bytes(16, "big")

    def begin(self, name: str, path: str, *, load_inplace: bool = False) -> StagedChange:
        change = ChangeAdapter(0, self.operation(), name, path, load_inplace)
        numbers = {number: f"r{number}" for number in range(len(self.replicas))}
        return StagedChange(change, numbers, 0, self.served_as(name), self.operation())

    def ask(self, ask: Ask, away: set[int] = frozenset()) -> dict[int, AdapterChanged | None]:  # type: ignore[assignment]
        return {
            each: None if each in away else self.replicas[each].ask(ask.query)
            for each in ask.members
        }

    def go_on(
        self, staged: StagedChange, answers: Mapping[int, AdapterChanged | None]
    ) -> Ask | AdapterChanged:
        self.hear()
        return staged.go_on(answers, self.known.next_version)

    def change(self, name: str, path: str, *, load_inplace: bool = False) -> AdapterChanged:
        staged = self.begin(name, path, load_inplace=load_inplace)
        following: Ask | AdapterChanged = staged.begin()
        while isinstance(following, Ask):
            following = self.go_on(staged, self.ask(following))
        return following


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    replicas = [Replica({"/1": b"one", "/2": b"two"}) for _ in range(NUM_REPLICAS)]
    yield Fleet(replicas)
    for each in replicas:
        each.close()


def test_all_replicas_change(fleet: Fleet) -> None:
    assert fleet.change("x", "/1") == AdapterChanged(0)
    assert [it.served for it in fleet.replicas] == [{"x": b"one"}] * 3
    refused = fleet.change("x", "/2").fault
    assert refused is not None
    assert refused.message.startswith("lora_name: got 'x', which is loaded")
    assert fleet.change("x", "/2", load_inplace=True).fault is None
    assert fleet.change("y", "/1").fault is None
    assert fleet.change("x", "").fault is None
    assert [it.served for it in fleet.replicas] == [{"y": b"one"}] * 3
    unknown = fleet.change("x", "")
    assert unknown.why == "missing"
    assert len({it.records.all for it in fleet.replicas}) == 1


def test_none_changes_where_one_lacks_the_files(fleet: Fleet) -> None:
    del fleet.replicas[1].disk.files["/1"]
    refused = fleet.change("x", "/1")
    assert refused.why == "missing"
    assert refused.fault == Fault(
        "bad_request",
        "no replica has changed anything, as r1: the adapter 'x': /1: there is no folder",
    )
    fleet.replicas[1].disk.files["/1"] = b"others"
    refused = fleet.change("x", "/1")
    assert refused.fault is not None
    assert refused.fault.message == (
        "lora_path: the files at '/1' of r0, r2 differ from those of r1"
    )
    for each in fleet.replicas:
        assert (each.served, each.records.all) == ({}, ())


@pytest.mark.parametrize("forgets", [False, True])
def test_one_that_dies_between_the_stages_reads_again(fleet: Fleet, forgets: bool) -> None:
    staged = fleet.begin("x", "/1")
    ask = fleet.go_on(staged, fleet.ask(staged.begin()))
    assert isinstance(ask, Ask)
    fleet.replicas[2].restart(forgets=forgets)
    assert fleet.go_on(staged, fleet.ask(ask)) == AdapterChanged(0)
    assert [it.served for it in fleet.replicas] == [{"x": b"one"}] * 3


@pytest.mark.parametrize("before", ["", "/2"])
def test_files_that_change_between_the_stages_undo_it(fleet: Fleet, before: str) -> None:
    if before:
        assert fleet.change("x", before).fault is None
    staged = fleet.begin("x", "/1", load_inplace=True)
    ask = fleet.go_on(staged, fleet.ask(staged.begin()))
    assert isinstance(ask, Ask)
    fleet.replicas[2].restart(forgets=False)
    fleet.replicas[2].disk.files["/1"] = b"others"
    undo = fleet.go_on(staged, fleet.ask(ask))
    assert isinstance(undo, Ask)
    refused = fleet.go_on(staged, fleet.ask(undo))
    assert isinstance(refused, AdapterChanged)
    assert refused.fault is not None
    assert "r2: the adapter 'x': /1 has other files" in refused.fault.message
    assert [it.served for it in fleet.replicas] == [{"x": b"two"} if before else {}] * 3
    assert len({it.records.all for it in fleet.replicas}) == 1


def test_those_that_are_away_are_told_later(fleet: Fleet) -> None:
    staged = fleet.begin("x", "/1")
    ask = fleet.go_on(staged, fleet.ask(staged.begin(), away={0}))
    assert isinstance(ask, Ask)
    changed = fleet.go_on(staged, fleet.ask(ask))
    assert changed == AdapterChanged(0, warning="1 replica is away, and told later")
    fleet.hear()
    fleet.replicas[0].catch_up(fleet.known)
    assert [it.served for it in fleet.replicas] == [{"x": b"one"}] * 3
    staged = fleet.begin("x", "")
    gone = fleet.go_on(staged, fleet.ask(staged.begin(), away={0, 1, 2}))
    assert isinstance(gone, AdapterChanged)
    assert gone.fault is not None
    assert gone.fault.code == "overloaded"


STEPS = st.one_of(
    st.tuples(st.just("begin"), st.sampled_from(NAMES), st.sampled_from(["", *PATHS])),
    st.tuples(st.just("answer"), st.integers(0, 5), st.integers(0, NUM_REPLICAS - 1)),
    st.tuples(st.just("lose"), st.integers(0, 5), st.integers(0, NUM_REPLICAS - 1)),
    st.tuples(st.just("restart"), st.integers(0, NUM_REPLICAS - 1), st.booleans()),
    st.tuples(st.just("leave"), st.integers(0, 5)),
    st.tuples(st.just("tell"), st.integers(0, NUM_REPLICAS - 1)),
)


@dataclass
class UnderWay:
    """A change by a client that may leave; what it has heard from each replica that it asked."""

    staged: StagedChange
    ask: Ask
    answers: dict[int, AdapterChanged | None] = field(default_factory=dict)


@given(st.lists(STEPS, max_size=40))
def test_whatever_dies_all_come_to_the_same(steps: list[Any]) -> None:
    """Several clients change at once, and leave; replicas lose messages, die, and are told later:
    in the end all serve the same, which is what the last change that any of them made says.
    """
    with ExitStack() as closed:
        fleet = Fleet([Replica({"/1": b"one", "/2": b"two"}) for _ in range(NUM_REPLICAS)])
        for replica in fleet.replicas:
            closed.callback(replica.close)
        under_way: list[UnderWay] = []
        answered: dict[bytes, AdapterChanged] = {}
        for what, *given_ in steps:
            fleet.hear()
            if what == "begin":
                name, path = given_
                staged = fleet.begin(name, path, load_inplace=True)
                under_way.append(UnderWay(staged, staged.begin()))
            elif what in ("answer", "lose") and given_[0] < len(under_way):
                it, number = under_way[given_[0]], given_[1]
                if number in it.ask.members and number not in it.answers:
                    answer = fleet.replicas[number].ask(it.ask.query)
                    it.answers[number] = answer if what == "answer" else None
                if len(it.answers) < len(it.ask.members):
                    continue
                following = fleet.go_on(it.staged, it.answers)
                if isinstance(following, Ask):
                    it.ask, it.answers = following, {}
                else:
                    answered[it.staged.operation] = following
                    under_way.remove(it)
            elif what == "restart":
                fleet.replicas[given_[0]].restart(forgets=given_[1])
            elif what == "leave" and given_[0] < len(under_way):
                under_way.pop(given_[0])
            elif what == "tell":
                fleet.replicas[given_[0]].catch_up(fleet.known)
        fleet.hear()
        for replica in fleet.replicas:
            replica.catch_up(fleet.known)
        wanted = {it.name: it.digest for it in fleet.known.all if it.path}
        for replica in fleet.replicas:
            assert replica.records.all == fleet.known.all
            assert replica.served == wanted
        for operation, changed in answered.items():
            if changed.fault is not None and changed.fault.code != "overloaded":
                assert operation not in {it.operation for it in fleet.known.all}


def test_a_record_is_committed_as_it_is() -> None:
    record = AdapterRecord("x", 3, b"operation", "/1", b"one")
    change = commit_of(record)
    assert (change.stage, change.version, change.digest) == ("commit", 3, b"one")
