"""Positions by handle, found for a whole column at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.oracles.received_positions import NumpyPositions

from slipstream.client.streams.received_positions import ReceivedPositions
from slipstream.compiled import find_rows, rows_are_at
from slipstream_ipc.columns import pack_u32

HANDLES = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300, unique=True)


BOTH: list[type[ReceivedPositions[Any]]] = [ReceivedPositions, NumpyPositions]
KINDS = st.sampled_from(BOTH)


def column(*values: int) -> bytes:
    return pack_u32(np.array(values, np.uint32))


@given(HANDLES, KINDS, st.data())
def test_positions_stay_with_their_handles(
    handles: list[int], kind: type[ReceivedPositions[Any]], data: st.DataObject
) -> None:
    received: ReceivedPositions[str] = kind()
    expected: dict[int, tuple[int, int]] = {}
    for handle in handles:
        if not received.is_free(handle):
            continue
        position = (handle % 1000, handle % 77)
        received.open(handle, f"item {handle}", *position)
        expected[handle] = position
        assert not received.is_free(handle)
        if data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(expected)))
            received.close(gone)
            assert received.is_free(gone)
            del expected[gone]
        elif data.draw(st.booleans()):
            received.move(handle, 5, 6)
            expected[handle] = (5, 6)
    for handle, position in expected.items():
        assert received.position(handle) == position
    asked = data.draw(st.permutations(sorted(expected))) if expected else []
    chars = column(*[expected[handle][0] for handle in asked])
    tokens = column(*[expected[handle][1] for handle in asked])
    found = received.find(pack_u32(asked), chars, tokens)
    assert found is not None
    assert found.items == [f"item {handle}" for handle in asked]
    received.advance(
        found,
        column(*[expected[handle][0] + 3 for handle in asked]),
        column(*[expected[handle][1] + 1 for handle in asked]),
    )
    for handle, (num_chars, num_tokens) in expected.items():
        assert received.position(handle) == (num_chars + 3, num_tokens + 1)


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_not_exactly_so_is_not_found(kind: type[ReceivedPositions[Any]]) -> None:
    received: ReceivedPositions[str] = kind()
    for handle in (1, 2, 3):
        received.open(handle, "x", 10, 4)
    both = pack_u32([1, 2])
    assert received.find(both, column(10, 10), column(4, 4)) is not None
    assert received.find(both, column(10, 9), column(4, 4)) is None
    assert received.find(both, column(10, 10), column(4, 5)) is None
    assert received.find(pack_u32([1, 9]), column(10, 10), column(4, 4)) is None
    assert received.find(pack_u32([1, 1]), column(10, 10), column(4, 4)) is None
    assert received.find(pack_u32([1, 2 + 64]), column(10, 10), column(4, 4)) is None
    received.close(2)
    assert received.find(both, column(10, 10), column(4, 4)) is None


class AgainstDict(RuleBasedStateMachine):
    """Columns that go on and others, single moves, streams that come and go."""

    @initialize(kind=KINDS)
    def begin(self, kind: type[ReceivedPositions[Any]]) -> None:
        self.received: ReceivedPositions[int] = kind()
        self.at: dict[int, tuple[int, int]] = {}
        self.last: list[int] = []

    @rule(handle=st.integers(0, 130), position=st.tuples(st.integers(0, 9), st.integers(0, 9)))
    def open(self, handle: int, position: tuple[int, int]) -> None:
        if handle not in self.at and self.received.is_free(handle):
            self.received.open(handle, handle, *position, group_id=1 + handle % 2, number=handle)
            self.at[handle] = position

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.at)))
        self.received.close(handle)
        del self.at[handle]

    @precondition(lambda self: self.at)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        handle = data.draw(st.sampled_from(sorted(self.at)))
        self.at[handle] = (self.at[handle][0] + 1, self.at[handle][1] + 3)
        self.received.move(handle, *self.at[handle])

    @rule(data=st.data())
    def others_go_on(self, data: st.DataObject) -> None:
        some = st.lists(st.sampled_from(sorted(self.at)), unique=True) if self.at else st.just([])
        self.last = data.draw(some)
        self.go_on(0, False)

    @rule(off_by=st.sampled_from([0, 0, 0, -1, 1]), of_tokens=st.booleans())
    def go_on(self, off_by: int, of_tokens: bool) -> None:
        """The same as last time, if they are all here."""
        handles = self.last
        positions = [self.at.get(handle, (0, 0)) for handle in handles]
        chars, tokens = [each[0] for each in positions], [each[1] for each in positions]
        if handles:
            (tokens if of_tokens else chars)[-1] += off_by
        if any(number < 0 for number in chars + tokens):
            return
        found = self.received.find(column(*handles), column(*chars), column(*tokens))
        if not set(handles) <= set(self.at) or (off_by and handles):
            assert found is None
            return
        assert found is not None
        group_ids = {1 + handle % 2 for handle in handles}
        if len(group_ids) == 1:
            assert (found.group_id, found.numbers) == (*group_ids, handles)
        else:
            assert (found.group_id, found.items) == (0, handles)
        ends = [(at + 2, num + 1) for at, num in positions]
        self.at.update(zip(handles, ends, strict=True))
        self.received.advance(
            found, column(*[end[0] for end in ends]), column(*[end[1] for end in ends])
        )

    @rule()
    def positions(self) -> None:
        for handle, position in self.at.items():
            assert self.received.position(handle) == position

    def teardown(self) -> None:
        if hasattr(self, "at"):
            self.positions()


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def tables(**others: np.ndarray) -> list[np.ndarray]:
    """The arrays that `find` takes, with two rows."""
    numbers = {name: np.zeros(2, np.int64) for name in ("handles", "scratch", "groups")}
    objects = {name: np.zeros(2, object) for name in ("numbers", "items")}
    return list((numbers | objects | others).values())


def test_rows_that_do_not_fit_are_refused() -> None:
    row, one = np.zeros(1, np.int64), np.zeros(1, np.uint32)
    for wrong in (
        {"handles": np.zeros(3, np.int64)},
        {"handles": np.zeros(0, np.int64)},
        {"scratch": np.zeros(1, np.int64)},
        {"groups": np.zeros(2, np.int32)},
        {"items": np.zeros(1, object)},
    ):
        with pytest.raises(ValueError, match="expected"):
            find_rows(column(1), *tables(**wrong))
    with pytest.raises(TypeError, match="objects"):
        find_rows(column(1), *tables(numbers=np.zeros(2, np.int64)))
    with pytest.raises(ValueError, match="column"):
        find_rows(bytes(5), *tables())
    for rows in (row + 1, row - 1):
        with pytest.raises(IndexError):
            rows_are_at(rows, column(0), column(0), one, one)
    for wrong_column in (b"", bytes(3), bytes(8), row):
        with pytest.raises(ValueError, match="column"):
            rows_are_at(row, column(0), wrong_column, one, one)
    assert rows_are_at(row, column(0), column(0), one, one)
