"""Cursors: fair portions within a budget, and acknowledgements that count for one life alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from slipstream_ipc.history.cursors import Cursors, Portion
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

    @rule(budget=st.integers(1, 30), leaves=st.booleans())
    def take(self, budget: int, leaves: bool) -> None:
        rows = row_set(*sorted(self.opened))
        portion = self.cursors.next_portion(rows, self.lengths[rows.array], budget)
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
            portion, lives = self.flying.pop(which % len(self.flying))
            self.cursors.acknowledge(portion)
            for row, (start, count) in as_dict(portion).items():
                life = lives[row]
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
