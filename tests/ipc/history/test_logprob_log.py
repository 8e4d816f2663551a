"""Ragged log-probability histories against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream_ipc._native import write_logprobs
from slipstream_ipc.columns import f32, pack_f32, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history import logprob_log
from slipstream_ipc.history.logprob_log import LogprobLog, Logprobs
from slipstream_ipc.history.pages import PAGE_LEN
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import RowSet

NUM_ROWS = 5


def portion(*columns: list[int]) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    return [np.array(column, np.int64) for column in columns]


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.lists(st.one_of(st.none(), st.integers(0, 4)), min_size=NUM_ROWS, max_size=NUM_ROWS),
    bases=st.lists(st.integers(0, 70), min_size=NUM_ROWS, max_size=NUM_ROWS),
    steps=st.lists(st.sets(st.integers(0, NUM_ROWS - 1), min_size=1), min_size=1, max_size=80),
    data=st.data(),
)
def test_columns_equal_lists(
    wanted: list[int | None], bases: list[int], steps: list[set[int]], data: st.DataObject
) -> None:
    log = LogprobLog()
    for row, k in enumerate(wanted):
        if k is not None:
            log.open(row, k, bases[row])
    expected: list[list[tuple[list[float], list[int], int]]] = [[] for _ in wanted]
    counter = 0
    for step in steps:
        rows = np.array(sorted(step))
        num = len(rows) + 2  # the step sampled others, too
        values = np.arange(counter, counter + num * 5, dtype=np.float32).reshape(num, 5)
        ids = values.astype(np.uint32) + 7
        ranks = np.arange(counter, counter + num, dtype=np.uint32)
        counter += num * 5
        index = np.arange(len(rows)) + 1
        log.append(RowSet(rows), Logprobs(values, ids, ranks), index)
        for row, at in zip(rows.tolist(), index.tolist(), strict=True):
            k = wanted[row]
            if k is not None:
                entry = (values[at, : k + 1].tolist(), ids[at, : k + 1].tolist(), int(ranks[at]))
                expected[row].append(entry)
    rows_out, starts, counts = [], [], []
    for row in range(NUM_ROWS):
        have = len(expected[row]) if wanted[row] is not None else 3
        if not have:
            continue
        start = data.draw(st.integers(0, have - 1))
        rows_out.append(row)
        starts.append(bases[row] + start)
        counts.append(data.draw(st.integers(1, have - start)))
    if not rows_out:
        return
    columns = log.columns(*portion(rows_out, starts, counts))
    widths = [0 if wanted[row] is None else 1 + wanted[row] for row in rows_out]
    if not any(widths):
        assert columns is None
        return
    assert columns is not None
    if columns.widths:
        assert u32(columns.widths).tolist() == widths
    else:
        assert {columns.width} == set(widths)
    flat = []
    for row, start, count in zip(rows_out, starts, counts, strict=True):
        if wanted[row] is not None:
            flat += expected[row][start - bases[row] :][:count]
    assert f32(columns.values).tolist() == [v for values, _, _ in flat for v in values]
    assert u32(columns.ids).tolist() == [i for _, ids, _ in flat for i in ids]
    assert u32(columns.ranks).tolist() == [rank for _, _, rank in flat]


def test_a_dropped_row_can_be_opened_again_at_another_width() -> None:
    log = LogprobLog()
    row = np.array([3])
    ones = Logprobs(np.ones((1, 4), np.float32), np.ones((1, 4), np.uint32), row)
    log.open(3, 1, 10)
    log.append(RowSet(row), ones, row * 0)
    log.drop(3)
    assert log.columns(*portion([3], [10], [1])) is None
    log.open(3, 3, 0)
    log.append(RowSet(row), ones, row * 0)
    columns = log.columns(*portion([3], [0], [1]))
    assert columns is not None
    assert columns.width == 4


Entry = tuple[list[float], list[int], int]  # one token's


def message(entries: list[list[Entry]], widths: list[int], ragged: bool) -> LogprobColumns:
    flat = [entry for of_row in entries for entry in of_row]
    return LogprobColumns(
        0 if ragged else widths[0],
        pack_f32([v for values, _, _ in flat for v in values]),
        pack_u32([i for _, ids, _ in flat for i in ids]),
        pack_u32([rank for values, _, rank in flat if values]),
        pack_u32(widths) if ragged else b"",
    )


def entries_of(columns: LogprobColumns) -> list[Entry]:
    values, ids = f32(columns.values).tolist(), u32(columns.ids).tolist()
    width = columns.width
    return [
        (values[at * width :][:width], ids[at * width :][:width], rank)
        for at, rank in enumerate(u32(columns.ranks).tolist())
    ]


class AgainstDict(RuleBasedStateMachine):
    """Rows of any width, opened, dropped, written by messages and by steps, read anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.log = LogprobLog()
        self.wanted: dict[int, int] = {}  # width by row
        self.bases: dict[int, int] = {}
        self.oracle: dict[int, list[Entry]] = {}
        self.counter = 0
        self.latest: RowSet | None = None  # rows appended to last
        self.earlier: RowSet | None = None  # before these

    @initialize(widths=st.lists(st.integers(0, 2), min_size=3, max_size=5))
    def begin(self, widths: list[int]) -> None:
        for row, k in enumerate(widths):
            self.open(row, k, 10 * row)

    def _entry(self, width: int) -> Entry:
        self.counter += 1
        values = [self.counter + i / 8 for i in range(width)]
        return values, [self.counter * 10 + i for i in range(width)], self.counter

    @rule(row=st.sampled_from([*range(6), 100]), k=st.integers(0, 3), base=st.integers(0, 200))
    def open(self, row: int, k: int, base: int) -> None:
        self.log.open(row, k, base)
        self.wanted[row], self.bases[row], self.oracle[row] = k + 1, base, []

    @rule(row=st.integers(0, 6))
    def drop(self, row: int) -> None:
        self.log.drop(row)
        for known in (self.wanted, self.bases, self.oracle):
            known.pop(row, None)

    @rule(
        data=st.data(),
        others=st.sets(st.integers(0, 200), max_size=2),
        one_each=st.booleans(),
        same=st.booleans(),
    )
    def a_message(self, data: Any, others: set[int], one_each: bool, same: bool) -> None:
        """With rows that are not open among them: their entries are passed over."""
        rows = data.draw(st.permutations(sorted({*self.wanted, *others})))
        width_of = {row: self.wanted.get(row, data.draw(st.integers(0, 4))) for row in rows}
        if same and rows:
            rows = [row for row in rows if width_of[row] == width_of[rows[0]]]
        if not rows:
            return
        counts = [1 if one_each else data.draw(st.sampled_from([0, 1, 2, 70])) for _ in rows]
        widths = [width_of[row] for row in rows]
        entries = [
            [self._entry(width) for _ in range(n)] for width, n in zip(widths, counts, strict=True)
        ]
        ragged = len(set(widths)) > 1 or data.draw(st.booleans())
        self.earlier, self.latest = self.latest, RowSet(np.array(rows))
        self.log.append_columns(
            self.latest,
            None if one_each else np.array(counts),
            message(entries, widths, ragged),
        )
        for row, new in zip(rows, entries, strict=True):
            if row in self.wanted:
                self.oracle[row] += new

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def a_step(self, data: Any) -> None:
        """As the sampler gives it: as wide as the widest, rows in any order."""
        width = data.draw(st.sampled_from([None, *set(self.wanted.values())]))
        rows = [row for row, own in sorted(self.wanted.items()) if width in (None, own)]
        rows = data.draw(st.lists(st.sampled_from(rows), unique=True, min_size=1))
        widest = max(self.wanted.values())
        sampled = [self._entry(widest) for _ in range(len(rows) + data.draw(st.integers(0, 2)))]
        index = sorted(data.draw(st.permutations(range(len(sampled))))[: len(rows)])
        logprobs = Logprobs(
            np.array([values for values, _, _ in sampled], np.float32),
            np.array([ids for _, ids, _ in sampled], np.uint32),
            np.array([rank for _, _, rank in sampled], np.uint32),
        )
        self.earlier, self.latest = self.latest, RowSet(np.array(rows))
        self.log.append(self.latest, logprobs, np.array(index))
        for row, at in zip(rows, index, strict=True):
            values, ids, rank = sampled[at]
            width = self.wanted[row]
            self.oracle[row].append((values[:width], ids[:width], rank))

    @precondition(lambda self: self.latest is not None)
    @rule(num=st.integers(1, 20), sampled=st.booleans(), others=st.booleans())
    def the_same_rows_again(self, num: int, sampled: bool, others: bool) -> None:
        """Step after step, whose tokens are written together. others: those before the last."""
        if others and self.earlier is not None:
            self.earlier, self.latest = self.latest, self.earlier
        assert self.latest is not None
        rows = self.latest.tolist()
        if any(row not in self.wanted for row in rows):
            return
        widths = [self.wanted[row] for row in rows]
        for _ in range(num):
            entries = [[self._entry(width)] for width in widths]
            columns = message(entries, widths, len(set(widths)) > 1)
            if sampled and not columns.widths:
                shape = len(rows), columns.width
                values, ids = f32(columns.values), u32(columns.ids)
                ranks = u32(columns.ranks)
                logprobs = Logprobs(values.reshape(shape), ids.reshape(shape), ranks)
                self.log.append(self.latest, logprobs, np.arange(len(rows)))
            else:
                self.log.append_columns(self.latest, None, columns)
            for row, new in zip(rows, entries, strict=True):
                self.oracle[row] += new
            self.log.flush_deferred()

    @precondition(lambda self: self.latest is not None)
    @rule(back=st.sampled_from([1, 1, 1, 2]), counted=st.booleans(), settled=st.booleans())
    def what_came_last(self, back: int, counted: bool, settled: bool) -> None:
        """By the very array it was appended with, whatever has become of its rows since."""
        assert self.latest is not None
        if settled:
            self.log.flush_deferred()
        rows = self.latest.tolist()
        ends = [self.bases.get(row, 0) + len(self.oracle.get(row, ())) for row in rows]
        starts = np.array([end - back for end in ends])
        counts = np.ones(len(rows), np.int64) if counted else None
        if any(len(self.oracle[row]) < back for row in rows if row in self.wanted):
            with pytest.raises(IndexError):
                self.log.columns(self.latest, starts, counts)
            return
        last = self.log.last(self.latest, ends[0])
        columns = self.log.columns(self.latest, starts, counts)
        assert last is None or back > 1 or last == columns
        widths = [self.wanted.get(row, 0) for row in rows]
        if columns is None:
            assert not any(widths)
            return
        if columns.widths:
            assert u32(columns.widths).tolist() == widths
        else:
            assert set(widths) == {columns.width}
        entries = [self.oracle[row][-back] for row in rows if row in self.wanted]
        assert f32(columns.values).tolist() == [v for values, _, _ in entries for v in values]
        assert u32(columns.ids).tolist() == [i for _, ids, _ in entries for i in ids]
        assert u32(columns.ranks).tolist() == [rank for _, _, rank in entries]

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def read(self, data: Any) -> None:
        row = data.draw(st.sampled_from(sorted(self.wanted)))
        start = data.draw(st.integers(0, len(self.oracle[row])))
        stop = data.draw(st.integers(start, len(self.oracle[row])))
        base = self.bases[row]
        columns = self.log.read(row, base + start, base + stop)
        assert columns is not None
        assert not columns.widths
        assert columns.width == self.wanted[row]
        assert entries_of(columns) == self.oracle[row][start:stop]

    @rule()
    def all_ends_are_as_in_the_oracle(self) -> None:
        num_pages = sum(-(-len(entries) // PAGE_LEN) for entries in self.oracle.values())
        assert self.log.num_pages_used == num_pages
        for row, entries in self.oracle.items():
            assert self.log.end(row) == self.bases[row] + len(entries)

    @invariant()
    def widths_are_as_in_the_oracle(self) -> None:
        for row in range(101):
            assert self.log.width(row) == self.wanted.get(row, 0)

    def teardown(self) -> None:
        for row, entries in self.oracle.items():
            columns = self.log.read(row, self.bases[row], self.bases[row] + len(entries))
            assert columns is not None
            assert entries_of(columns) == entries


class InNumpy(AgainstDict):
    """As if nothing could be written in place."""

    def __init__(self) -> None:
        super().__init__()
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(logprob_log, "write_logprobs", lambda *_: -1)

    def teardown(self) -> None:
        self._patch.undo()
        super().teardown()


TestAgainstDict = AgainstDict.TestCase
TestAgainstDict.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestInNumpy = InNumpy.TestCase
TestInNumpy.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


def test_what_cannot_be_written_in_c_has_no_effect() -> None:
    rows, lengths, offsets = np.array([1, 0]), np.array([64, 60, 0]), np.zeros(3, np.int64)
    tables, free = np.array([[0, -1], [1, -1], [-1, -1]]), np.array([2, 3, 4, 5])
    pools = [np.zeros(6 * 64 * width, np.float32) for width in (2, 2, 1)]
    columns = LogprobColumns(2, bytes(16), bytes(16), bytes(8))
    right: list[Any] = [[columns] * 5, 2, 2, rows, lengths, offsets, tables, free, *pools]
    short = [np.zeros(2 * 64 * width, np.float32) for width in (2, 2, 1)]
    left = {
        "pages": {2: 1},
        "tables": {6: tables[:, :1].copy()},
        "pools": {8: short[0], 9: short[1], 10: short[2]},
        "a row twice": {3: np.array([0, 0])},
        "no row": {3: np.array([0, 3])},
    }
    before = lengths.copy()
    for what, arguments in left.items():
        given = [arguments.get(at, value) for at, value in enumerate(right)]
        assert write_logprobs(*given) == -1, what
        assert np.array_equal(lengths, before), what
    wrong = {0: [columns, LogprobColumns(2, bytes(16), bytes(16), bytes(4))], 1: 3, 2: 9, 3: None}
    for at, value in wrong.items():
        given = list(right)
        given[at] = value
        with pytest.raises((TypeError, ValueError)):
            write_logprobs(*given)
    assert write_logprobs(*right) == 0
    assert lengths.tolist() == [69, 65, 0]
    assert tables.tolist() == [[0, 2], [1, 3], [-1, -1]]


def test_a_width_that_no_row_has_any_more_gives_its_memory_back() -> None:
    """Else 64 waves, each of another width, would hold 64 times what a wave takes."""
    log = LogprobLog()
    for width in range(1, 65):
        num = 2**23 // (8 * width)  # 8 MiB
        log.open(0, width - 1, 0)
        columns = LogprobColumns(
            width, b"\0" * 4 * num * width, b"\0" * 4 * num * width, b"\0" * 4 * num
        )
        log.append_columns(RowSet(np.array([0])), np.array([num]), columns)
        log.open(1, width - 1, 0)
        log.drop(0)
        assert len(log._by_width) == 1
        log.drop(1)
        assert not log._by_width


def test_a_row_that_wants_none_is_read_as_none() -> None:
    assert LogprobLog().read(70, 0, 0) is None


def test_an_entry_of_another_width_than_its_row_is_refused() -> None:
    log = LogprobLog()
    log.open(2, 4, 0)
    rows = RowSet(np.array([2]))
    with pytest.raises(ProtocolError, match="3 values to a token for row 2, which has 5"):
        log.append_columns(rows, None, message([[([1.0] * 3, [1] * 3, 1)]], [3], ragged=False))
    assert log.end(2) == 0


def test_columns_that_do_not_fit_each_other_are_refused() -> None:
    log = LogprobLog()
    log.open(0, 0, 0)
    rows, two = RowSet(np.array([0])), pack_u32([1, 2])
    with pytest.raises(ProtocolError, match="expected 1"):
        log.append_columns(rows, None, LogprobColumns(1, two, two, two))
    with pytest.raises(ProtocolError, match="expected 1"):
        log.append_columns(rows, None, LogprobColumns(0, two, two, two, pack_u32([1])))


def test_positions_that_are_not_there_are_refused() -> None:
    log = LogprobLog()
    log.open(0, 0, 10)
    columns = message([[([1.0], [1], 1)]], [1], ragged=False)
    log.append_columns(RowSet(np.array([0])), None, columns)
    for start, stop in [(9, 10), (10, 12), (11, 12)]:
        with pytest.raises(IndexError):
            log.read(0, start, stop)
