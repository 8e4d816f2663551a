"""Cursors: fair portions within a budget, and acknowledgements that count for one life alone."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from slipstream_ipc._native import StreakCounts
from slipstream_ipc.history.cursors import Cursors, Portion
from slipstream_ipc.history.streak import Streak
from slipstream_ipc.row_set import RowSet


def ints(*values: int) -> npt.NDArray[np.int64]:
    return np.array(values, np.int64)


def row_set(*rows: int) -> RowSet:
    return RowSet(ints(*rows))


def opened(*rows: int) -> Cursors:
    cursors = Cursors(rows=1)
    for row in rows:
        cursors.open(row, 0)
    return cursors


def as_dict(portion: Portion) -> dict[int, tuple[int, int]]:
    columns = (portion.rows.array, portion.starts, portion.counts)
    return {row: (start, count) for row, start, count in zip(*map(np.ndarray.tolist, columns))}  # noqa: B905


def test_a_portion_lies_between_cursor_and_end() -> None:
    cursors = opened(0, 3, 5)
    cursors.open(3, 2)
    rows, lengths = ints(0, 3, 5), ints(1, 4, 0)
    assert cursors.lags(rows, lengths).tolist() == [True, True, False]
    portion = cursors.next_portion(RowSet(rows), lengths, 100)
    assert as_dict(portion) == {0: (0, 1), 3: (2, 2)}
    assert not cursors.lags(rows, lengths).any()
    assert not len(cursors.next_portion(RowSet(rows), lengths, 100).rows)
    cursors.rewind(portion)
    assert as_dict(cursors.next_portion(RowSet(rows), lengths, 100)) == {0: (0, 1), 3: (2, 2)}


def test_a_closed_row_is_not_sent() -> None:
    cursors = opened(0, 1)
    cursors.close(0)
    assert (cursors.is_open(0), cursors.is_open(1), cursors.is_open(1000)) == (False, True, False)
    assert not cursors.lags(ints(0), ints(5)).any()
    assert as_dict(cursors.next_portion(row_set(0, 1), ints(5, 5), 100)) == {1: (0, 5)}


def test_nothing_to_take() -> None:
    cursors = opened(0)
    assert not len(cursors.next_portion(row_set(), ints(), 10).rows)
    assert not len(cursors.next_portion(row_set(0), ints(0), 0).rows)


def test_a_budget_of_nothing_is_one_position() -> None:
    cursors = opened(0, 1)
    for budget in (0, -3):
        assert cursors.next_portion(row_set(0, 1), ints(9, 9), budget).counts.tolist() == [1]


def test_short_rows_leave_their_share_to_long_ones() -> None:
    cursors = opened(0, 1, 2)
    portion = cursors.next_portion(row_set(0, 1, 2), ints(2, 50, 100), 42)
    assert as_dict(portion) == {0: (0, 2), 1: (0, 20), 2: (0, 20)}


def test_acknowledged_is_the_furthest_end() -> None:
    cursors = opened(4)
    first = cursors.next_portion(row_set(4), ints(3), 100)
    second = cursors.next_portion(row_set(4), ints(8), 100)
    cursors.acknowledge(second)
    cursors.acknowledge(first)
    assert cursors.acked[4] == 8


def test_acknowledgement_of_an_earlier_life_is_void() -> None:
    cursors = opened(0, 1)
    portion = cursors.next_portion(row_set(0, 1), ints(7, 7), 100)
    cursors.close(0)
    cursors.open(0, 1)  # another stream's now
    cursors.acknowledge(portion)
    assert cursors.acked.tolist()[:2] == [1, 7]


def test_what_goes_on_is_not_looked_up() -> None:
    cursors, rows = opened(0, 1), row_set(0, 1)
    assert cursors.next_in_streak(rows, 100) is None, "nothing is known of them"
    first = cursors.next_portion(rows, ints(1, 1), 100)
    for start in (1, 2):
        portion = cursors.next_in_streak(rows, 2)
        assert portion is not None
        assert as_dict(portion) == {0: (start, 1), 1: (start, 1)}
    assert cursors.next_in_streak(rows, 1) is None, "over the budget"
    assert cursors.next_in_streak(row_set(0, 1), 2) is None, "another set"
    cursors.acknowledge(portion)
    cursors.acknowledge(first)
    assert cursors.acked[:2].tolist() == [3, 3]
    cursors.rewind(portion)
    assert cursors.next_in_streak(rows, 2) is None, "they have two positions to be sent"
    assert as_dict(cursors.next_portion(rows, ints(4, 4), 100)) == {0: (2, 2), 1: (2, 2)}


@pytest.mark.parametrize("what", ["open", "close"])
def test_who_comes_or_goes_ends_what_goes_on(what: str) -> None:
    cursors, rows = opened(0, 1, 2), row_set(0, 1)
    cursors.next_portion(rows, ints(1, 1), 100)
    assert cursors.next_in_streak(rows, 2) is not None
    if what == "open":
        cursors.open(1, 0)
    else:
        cursors.close(1)
    assert cursors.next_in_streak(rows, 2) is None
    expected = {0: (2, 1), 1: (0, 3)} if what == "open" else {0: (2, 1)}
    assert as_dict(cursors.next_portion(rows, ints(3, 3), 100)) == expected


def test_positions_beyond_32_bits() -> None:
    cursors = opened(0)
    far = 2**40
    cursors.open(0, far)
    portion = cursors.next_portion(row_set(0), ints(far + 2**33), 2**32)
    assert as_dict(portion) == {0: (far, 2**32)}


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=20),
    st.integers(1, 25),
    st.randoms(use_true_random=False),
)
def test_fair_sharing(lengths: list[int], budget: int, random: object) -> None:
    """Never beyond the budget, each position once, and nobody waits for a second round."""
    num = len(lengths)
    order = list(range(num))
    random.shuffle(order)  # type: ignore[attr-defined]
    rows, ends = np.array(order) * 3, np.array(lengths)[order]
    cursors = opened(*rows.tolist())
    got = dict.fromkeys(rows.tolist(), 0)
    waited = dict.fromkeys(rows.tolist(), 0)
    left = sum(lengths)
    while left:
        waiting = set(rows[cursors.lags(rows, ends)].tolist())
        portion = cursors.next_portion(RowSet(rows), ends, budget)
        assert 0 < portion.counts.sum() <= budget
        assert portion.counts.min() > 0
        for row, (start, count) in as_dict(portion).items():
            assert start == got[row]
            got[row] += count
            left -= count
        for row in waiting:
            waited[row] = 0 if row in portion.rows.array else waited[row] + 1
            assert waited[row] <= -(-num // budget)
        if len(waiting) <= budget and left:  # what is left over is less than one each
            assert portion.counts.sum() > budget - len(waiting)
            taken = portion.rows.array
            cut = portion.counts[cursors.lags(taken, _ends_of(rows, ends, taken))]
            assert len(set(cut.tolist())) == 1
            assert portion.counts.max() == cut[0]
    assert got == dict(zip(rows.tolist(), ends.tolist(), strict=True))


def _ends_of(
    rows: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], some: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    of = dict(zip(rows.tolist(), ends.tolist(), strict=True))
    return np.array([of[row] for row in some.tolist()])


def test_a_short_row_is_served_among_long_ones_that_never_end() -> None:
    rows = RowSet(np.arange(8))
    cursors = opened(*range(8))
    lengths = np.full(8, 10**6)
    lengths[5] = 1
    for _ in range(4):  # 8 rows, 2 to a message
        cursors.next_portion(rows, lengths, 2)
    assert cursors.sent(5) == 1


def test_an_acknowledgement_that_comes_late_takes_nothing_back() -> None:
    cursors, rows = opened(0), row_set(0)
    first = cursors.next_portion(rows, np.array([1]), 9)
    second = cursors.next_in_streak(rows, 9)
    assert second is not None
    cursors.acknowledge(second)
    assert cursors.acked[0] == 2
    cursors.acknowledge(first)
    assert cursors.acked[0] == 2


class AgainstDicts(RuleBasedStateMachine):
    """Rows opened, closed and reused while portions are under way, in any order."""

    @initialize()
    def begin(self) -> None:
        self.cursors = Cursors(rows=2)
        self.lengths = np.zeros(12, np.int64)
        self.opened: dict[int, int] = {}  # row -> its life
        self.num_lives = 0
        self.sent: dict[int, int] = {}
        self.acked: dict[int, int] = {}  # by life
        self.flying: list[tuple[Portion, dict[int, int]]] = []
        self.rows = row_set()  # that were taken last
        self.is_steady = False  # they have got nothing since

    @rule(row=st.integers(0, 11), position=st.integers(0, 20))
    def open(self, row: int, position: int) -> None:
        self.cursors.open(row, position)
        self.num_lives += 1
        self.opened[row] = self.num_lives
        self.sent[row] = self.acked[self.num_lives] = position
        self.lengths[row] = max(self.lengths[row], position)

    @rule(row=st.integers(0, 11))
    def close(self, row: int) -> None:
        if row in self.opened:
            self.cursors.close(row)
            del self.opened[row]

    @rule(row=st.integers(0, 11), more=st.integers(1, 20))
    def grow(self, row: int, more: int) -> None:
        self.lengths[row] += more
        self.is_steady = False

    @rule(budget=st.integers(1, 30), leaves=st.booleans())
    def take(self, budget: int, leaves: bool) -> None:
        self.rows = row_set(*sorted(self.opened))
        self._take(budget, leaves)

    @rule(
        times=st.integers(1, 3),
        budget=st.sampled_from([1, 30]),
        leaves=st.booleans(),
        acks=st.booleans(),
    )
    def next_in_streak(self, times: int, budget: int, leaves: bool, acks: bool) -> None:
        for _ in range(times):
            self.lengths[self.rows.array] += 1
            self._take(budget, leaves, is_steady=self.is_steady)
            if acks:
                self.acknowledge(-1)

    def _take(self, budget: int, leaves: bool, *, is_steady: bool = False) -> None:
        rows = self.rows
        lengths = self.lengths[rows.array]
        portion = self.cursors.next_in_streak(rows, budget) if is_steady else None
        if portion is None:
            portion = self.cursors.next_portion(rows, lengths, budget)
        else:
            assert as_dict(portion) == {row: (self.sent[row], 1) for row in rows.tolist()}
            assert lengths.tolist() == [self.sent[row] + 1 for row in rows.tolist()]
        self.is_steady = True
        assert portion.counts.sum() <= budget
        if not len(portion.rows):
            assert all(
                self.lengths[row] <= self.sent[row] for row in rows.tolist() if row in self.opened
            )
        if not leaves:
            self.cursors.rewind(portion)
            return
        for row, (start, count) in as_dict(portion).items():
            assert start == self.sent[row]
            assert start + count <= self.lengths[row]
            self.sent[row] += count
        self.flying.append((portion, dict(self.opened)))

    @rule(which=st.integers(0, 9))
    def acknowledge(self, which: int) -> None:
        if self.flying:
            portion, generations = self.flying.pop(which % len(self.flying))
            self.cursors.acknowledge(portion)
            for row, (start, count) in as_dict(portion).items():
                life = generations[row]
                self.acked[life] = max(self.acked[life], start + count)

    @rule()
    def agrees(self) -> None:
        for row, life in self.opened.items():
            assert self.cursors.is_open(row)
            assert self.cursors.sent(row) == self.sent[row]
            assert self.cursors.acked[row] == self.acked[life] <= self.sent[row]

    def teardown(self) -> None:
        if hasattr(self, "opened"):
            self.agrees()


TestAgainstDicts = AgainstDicts.TestCase
TestAgainstDicts.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(["next", "next", "next", "acknowledge", "acknowledge", "open", "close"]),
        max_size=40,
    )
)
def test_messages_that_are_counted_are_as_those_that_are_made(actions: list[str]) -> None:
    """Of a streak, by one who counts them there."""
    made, counted = opened(0, 1, 2), opened(0, 1, 2)
    rows, flying = row_set(0, 2), deque[tuple[Portion, Portion | Streak]]()
    lengths, streak = ints(0, 0), None
    for action in actions:
        if action == "next":
            lengths = lengths + 1
            one = made.next_in_streak(rows, 9) or made.next_portion(rows, lengths, 9)
            if streak is not None and streak.is_on:
                streak.num_sent += 1
                streak.is_written = False
                flying.append((one, streak))
            else:
                other = counted.next_portion(rows, lengths, 9)
                streak = other.streak
                flying.append((one, other))
        elif action == "acknowledge" and flying:
            one, acknowledged = flying.popleft()
            made.acknowledge(one)
            if isinstance(acknowledged, Streak):
                counted.acknowledge_next(acknowledged)
            else:
                counted.acknowledge(acknowledged)
        elif action == "open":
            for cursors in (made, counted):
                cursors.open(2, int(lengths[1]))
        elif action == "close":
            for cursors in (made, counted):
                cursors.close(1)
        assert made.acked.tolist() == counted.acked.tolist()
    assert [made.sent(row) for row in range(3)] == [counted.sent(row) for row in range(3)]


def test_counts_begin_with_a_message_that_was_made() -> None:
    names = ("num_sent", "num_acked", "is_on", "is_written", "is_acked_written")
    assert [getattr(StreakCounts(), name) for name in names] == [1, 0, True, True, True]


def test_each_receiver_has_a_streak_of_its_own() -> None:
    cursors = opened(0, 1, 2)
    ours, theirs = row_set(0, 2), row_set(1)
    cursors.next_portion(ours, ints(1, 1), 100)
    cursors.next_portion(theirs, ints(1), 100, receiver=1)
    mine = cursors.next_in_streak(ours, 100)
    other = cursors.next_in_streak(theirs, 100, receiver=1)
    assert mine is not None
    assert other is not None
    assert (as_dict(mine), as_dict(other)) == ({0: (1, 1), 2: (1, 1)}, {1: (1, 1)})
    cursors.acknowledge(other)
    assert cursors.acked[:3].tolist() == [0, 2, 0]
    cursors.rewind(other)
    assert cursors.next_in_streak(theirs, 100, receiver=1) is None
    assert cursors.next_in_streak(ours, 100) is not None, "it goes on"
    cursors.acknowledge(mine)
    assert cursors.acked[:3].tolist() == [2, 2, 2]
    assert [cursors.sent(row) for row in (0, 1, 2)] == [3, 1, 3]
