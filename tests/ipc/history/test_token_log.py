"""TokenLog against plain lists, in C and in numpy: both leave the same columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.oracles.token_log import NumpyTokenLog, has_marked

from slipstream_ipc import _native
from slipstream_ipc._native import RowAppender
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.pages import PAGE_LEN
from slipstream_ipc.history.token_log import (
    TokenLog,
    history_checksum,
    history_digest,
)
from slipstream_ipc.row_set import RowSet

ROWS = 7


class Both:
    """Two logs that are asked the same: one in C where that can be had, one in numpy."""

    def __init__(self, rows: int) -> None:
        self.logs = TokenLog(rows=rows), NumpyTokenLog(rows=rows)

    @property
    def num_pages_used(self) -> int:
        return self._same([log.num_pages_used for log in self.logs])

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._same([self._called(log, name, args) for log in self.logs])

    def _called(self, log: TokenLog, name: str, args: Any) -> Any:
        try:
            return getattr(log, name)(*args)
        except IndexError as error:
            return error

    def _same(self, results: list[Any]) -> Any:
        fast, reference = results
        if isinstance(reference, IndexError):
            assert isinstance(fast, IndexError)
            raise reference
        assert np.array_equal(fast, reference)
        for name in ("lengths", "offsets", "tables", "num_free"):
            one, other = (getattr(log.table, name) for log in self.logs)
            assert np.array_equal(one, other), name
        free = [log.table.free[: log.table.num_free] for log in self.logs]
        assert np.array_equal(*free)
        return reference


class AgainstLists(RuleBasedStateMachine):
    @initialize(rows=st.integers(1, 9))
    def begin(self, rows: int) -> None:
        self.log = Both(rows)
        self.lists: dict[int, list[int]] = {}
        self.next_value = 0
        self.latest: RowSet | None = None  # rows appended to last
        self.appender: RowAppender | None = None  # of some of them
        self.its_rows: RowSet | None = None
        for row in range(ROWS - 2):
            self.open(row)

    def _values(self, num: int) -> list[int]:
        self.next_value += num
        return list(range(self.next_value - num, self.next_value))

    def _array(self, values: list[int]) -> np.ndarray[Any, Any]:
        return np.array(values, np.uint32)

    @rule(row=st.integers(0, ROWS))
    def open(self, row: int) -> None:
        self.log.open(row)
        self.lists[row] = []

    @rule(row=st.integers(0, ROWS))
    def drop(self, row: int) -> None:
        if row in self.lists:
            self.log.drop(row)
            self.log.drop(row)
            self.lists[row] = []

    @rule(rows=st.sets(st.integers(0, ROWS)), times=st.sampled_from([1, 1, 1, 2, 70, 520]))
    def append(self, rows: set[int], times: int) -> None:
        self.latest = RowSet(np.array([row for row in rows if row in self.lists], np.int64))
        self._append(times)

    @precondition(lambda self: self.latest is not None)
    @rule(times=st.sampled_from([1, 2, 63, 64, 65]))
    def append_to_the_same(self, times: int) -> None:
        """By the very set, whatever has become of its rows since."""
        self._append(times)

    def _append(self, times: int) -> None:
        assert self.latest is not None
        some = self.latest.tolist()
        for _ in range(times):
            values = self._values(len(some))
            self.log.append(self.latest, self._array(values))
            for row, value in zip(some, values, strict=True):
                self.lists[row].append(value)

    @precondition(lambda self: self.latest is not None)
    @rule(times=st.sampled_from([1, 2, 63, 130]), is_new=st.booleans())
    def append_by_an_appender(self, times: int, is_new: bool) -> None:
        """Made for these rows now, or before whatever has become of them since."""
        assert self.latest is not None
        fast, reference = self.log.logs
        if is_new or self.its_rows is None:
            self.appender, self.its_rows = fast.appender(self.latest), self.latest
        self.latest = rows = self.its_rows
        for _ in range(times):
            values = self._values(len(rows))
            ids = self._array(values)
            if self.appender is None or not self.appender.append(ids):
                fast.append(rows, ids)
                self.appender = fast.appender(rows)
            assert fast.last(rows) is ids
            reference.append(rows, ids)
            for row, value in zip(rows.tolist(), values, strict=True):
                self.lists[row].append(value)
        self.log.lengths(rows)

    @rule(row=st.integers(0, ROWS), num=st.sampled_from([0, 1, 3, 63, 64, 65, 200, 1500]))
    def extend(self, row: int, num: int) -> None:
        if row in self.lists:
            values = self._values(num)
            self.log.extend(row, self._array(values))
            self.lists[row] += values

    @precondition(lambda self: self.latest is not None)
    @rule(back=st.sampled_from([1, 1, 1, 2]), counted=st.booleans())
    def gather_what_came_last(self, back: int, counted: bool) -> None:
        """By the very array it was appended with, whatever has become of its rows since."""
        assert self.latest is not None
        rows = self.latest.tolist()
        starts = np.array([len(self.lists[row]) - back for row in rows], np.int64)
        counts = np.ones(len(rows), np.int64) if counted else None
        if (starts < 0).any():
            with pytest.raises(IndexError):
                self.log.gather(self.latest, starts, counts)
            return
        expected = [self.lists[row][-back] for row in rows]
        if back == 1:
            assert np.array_equal(self.log.last(self.latest), self._array(expected))
        assert np.array_equal(self.log.gather(self.latest, starts, counts), self._array(expected))

    @rule(rows=st.lists(st.integers(0, ROWS)))
    def last_of_any(self, rows: list[int]) -> None:
        some = RowSet(np.array([row for row in rows if row in self.lists], np.int64))
        lists = [self.lists[row] for row in some.tolist()]
        if all(lists):
            expected = self._array([values[-1] for values in lists])
            assert np.array_equal(self.log.last(some), expected)
            return
        with pytest.raises(IndexError):
            self.log.last(some)

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def append_spans(self, data: Any) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lists)), unique=True))
        sizes = st.sampled_from([0, 1, 1, 2, 63, 64, 65, 300])
        counts = [data.draw(sizes) for _ in rows]
        spans = [self._values(count) for count in counts]
        where = [np.array(column, np.int64) for column in (rows, counts)]
        self.log.append_spans(*where, self._array([value for span in spans for value in span]))
        for row, span in zip(rows, spans, strict=True):
            self.lists[row] += span

    @rule(data=st.data())
    def gather(self, data: Any) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lists)))) if self.lists else []
        starts, counts, expected = [], [], []
        for row in rows:
            start = data.draw(st.integers(0, len(self.lists[row])))
            stop = data.draw(st.integers(start, len(self.lists[row])))
            starts.append(start)
            counts.append(stop - start)
            expected += self.lists[row][start:stop]
        where = [np.array(column, np.int64) for column in (rows, starts, counts)]
        assert np.array_equal(self.log.gather(*where), self._array(expected))

    @precondition(lambda self: self.latest is not None)
    @rule()
    def lengths_of_what_came_last(self) -> None:
        assert self.latest is not None
        expected = [len(self.lists[row]) for row in self.latest.tolist()]
        assert self.log.lengths(self.latest).tolist() == expected

    @rule()
    def lengths_are_those_of_the_lists(self) -> None:
        num_pages = 0
        for row, values in self.lists.items():
            assert self.log.length(row) == len(values)
            num_pages += -(-len(values) // PAGE_LEN)
        assert self.log.num_pages_used == num_pages

    @rule()
    def read_everything(self) -> None:
        for row, values in self.lists.items():
            assert np.array_equal(self.log.read(row, 0, len(values)), self._array(values))

    def teardown(self) -> None:
        if hasattr(self, "lists"):
            self.lengths_are_those_of_the_lists()
            self.read_everything()


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def _columns(num_pages: int = 2) -> list[Any]:
    """The columns and the arguments of `append`: of two rows, the second has one full page."""
    return [
        np.array([0, 64]),
        np.array([0, 0]),
        np.array([[-1, -1], [0, -1]]),
        np.arange(num_pages),
        np.zeros(num_pages * PAGE_LEN, np.uint32),
        np.array([0]),
        np.array([7], np.uint32),
        num_pages,
        None,
    ]


@pytest.mark.parametrize(
    ("at", "wrong"),
    [
        (0, np.array([0])),
        (1, np.array([0, 0, 0])),
        (2, np.zeros(3, np.int64)),
        (3, np.arange(1)),
        (5, np.array([2])),
        (5, np.array([-1])),
        (5, np.array([0, 1])),
        (6, np.array([7])),
        (7, -2),
        (7, 3),
        (8, np.array([0])),
        (8, np.array([2])),
        (8, np.array([-1])),
        (8, np.array([2**63 - 1])),
        (8, np.array([1, 0])),
    ],
)
def test_columns_that_do_not_fit_are_refused(at: int, wrong: Any) -> None:
    args = _columns()
    args[at] = wrong
    before = [each.copy() for each in args[:5]]
    with pytest.raises((IndexError, ValueError)):
        _native.TokenPages(*args[:5]).append(*args[5:])
    for each, was in zip(args[:5], before, strict=True):
        assert np.array_equal(each, was)


@pytest.mark.parametrize(
    ("at", "short"),
    [
        (0, np.array([128, 64])),  # the tables are too narrow
        (0, np.array([-64, 64])),
        (3, np.array([5, 5])),  # pages behind the pool's end
        (3, np.array([-3, -3])),
        (4, np.zeros(PAGE_LEN, np.uint32)),
        (7, 0),
        (0, np.array([-1, 64])),
        (0, np.array([2**63 - 2, 64])),
    ],
)
def test_nothing_is_appended_where_something_has_to_grow(at: int, short: Any) -> None:
    args = _columns()
    args[at] = short
    before = [each.copy() for each in args[:5]]
    assert _native.TokenPages(*args[:5]).append(*args[5:]) == -1
    for each, was in zip(args[:5], before, strict=True):
        assert np.array_equal(each, was)


@pytest.mark.parametrize(
    ("rows", "starts", "counts", "num"),
    [
        ([2], [0], None, 1),
        ([-1], [0], None, 1),
        ([0], [-1], None, 1),
        ([0], [0], [-1], 0),
        ([0], [60], [5], 5),
        ([0], [2**62], [2**62], 5),
        ([0, 0], [0], None, 2),
        ([0], [0], [1, 1], 1),
        ([0], [0], [2], 1),
        ([0], [0], [1], 2),
        ([1], [0], [1], 1),  # a position without a page
    ],
)
def test_positions_that_are_not_there_are_refused(
    rows: list[int], starts: list[int], counts: list[int] | None, num: int
) -> None:
    lengths, tables, pool = np.array([64, 64]), np.array([[0], [-1]]), np.zeros(64, np.uint32)
    where = [None if each is None else np.array(each) for each in (rows, starts, counts)]
    pages = _native.TokenPages(lengths, lengths.copy(), tables, lengths.copy(), pool)
    with pytest.raises((IndexError, ValueError)):
        pages.gather(np.zeros(num, np.uint32), *where)


@pytest.mark.parametrize(
    ("rows", "num"),
    [([2], 1), ([-1], 1), ([1], 1), ([3], 1), ([4], 1), ([0], 2), ([0, 0], 1), ([0], 0)],
)
def test_rows_without_a_last_value_are_refused(rows: list[int], num: int) -> None:
    """No such row, an empty one, one without a page, one beyond its table, columns that differ."""
    lengths, tables = np.array([64, 0, 64, 65]), np.array([[0], [0], [-1], [0]])
    pages = _native.TokenPages(lengths, lengths.copy(), tables, lengths.copy(), np.zeros(64, "u4"))
    with pytest.raises((IndexError, ValueError)):
        pages.last(np.zeros(num, np.uint32), np.array(rows))


def test_an_appender_leaves_what_it_cannot_append() -> None:
    log, rows = TokenLog(rows=4), RowSet(np.array([0, 1]))
    for row in (0, 1):
        log.open(row)
    appender = log.appender(rows)
    assert appender is not None
    ids = np.array([3, 4], np.uint32)
    assert not appender.append(ids), "without a pool"
    log.append(rows, ids)
    assert not appender.append(ids), "the columns are others now"
    appender = log.appender(rows)
    assert appender is not None
    assert appender.append(ids)
    assert log.read(1, 0, 2).tolist() == [4, 4]
    log.open(2)
    log.extend(2, np.zeros(1500, np.uint32))
    assert not appender.append(ids), "tables and pool have grown"
    appender = log.appender(rows)
    assert appender is not None
    for wrong in (ids[:1], np.zeros(4, np.uint32)[::2], None):
        with pytest.raises((TypeError, ValueError, BufferError)):
            appender.append(wrong)  # type: ignore[arg-type]
    elsewhere = log.appender(RowSet(np.array([0, 99])))
    assert elsewhere is not None
    assert not elsewhere.append(ids)
    twice = log.appender(RowSet(np.array([1, 1])))
    assert twice is not None
    assert not twice.append(ids)
    assert log.lengths(rows).tolist() == [2, 2]
    with pytest.raises(TypeError):
        _native.RowAppender(log, None, rows, rows.array)


def test_what_was_read_is_a_copy() -> None:
    log = TokenLog()
    log.open(0)
    log.extend(0, np.arange(3))
    read = log.read(0, 0, 3)
    log.drop(0)
    log.extend(0, np.arange(7, 10))
    assert read.tolist() == [0, 1, 2]


def test_what_came_last_goes_with_its_row() -> None:
    log = TokenLog()
    rows = RowSet(np.array([0]))
    log.open(0)
    log.append(rows, np.array([7], np.uint32))
    assert log.gather(rows, np.array([0]), None).tolist() == [7]
    log.drop(0)
    with pytest.raises(IndexError, match="outside"):
        log.gather(rows, np.array([-1]), None)
    with pytest.raises(IndexError, match="outside"):
        log.gather(rows, np.array([0]), None)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 4), (2, 1), (4, 4)])
def test_positions_outside_of_the_history(start: int, stop: int) -> None:
    log = TokenLog()
    log.open(0)
    log.extend(0, np.arange(3))
    with pytest.raises(IndexError, match="outside"):
        log.read(0, start, stop)


def test_memory_is_used_again() -> None:
    log = TokenLog(rows=1)
    for _ in range(50):
        log.open(0)
        log.extend(0, np.ones(5 * PAGE_LEN, np.uint32))
        assert log.num_pages_used == 5
        log.drop(0)
    assert log.num_pages_used == 0
    assert log.table.num_indices < 20 * PAGE_LEN


@given(st.lists(st.integers(0, 2**32 - 1)), st.sampled_from([np.uint32, np.int64]))
def test_digest_is_of_the_values(ids: list[int], dtype: Any) -> None:
    digest = history_digest(np.array(ids, np.uint32))
    assert digest == history_digest(np.array(ids, dtype))  # type: ignore[arg-type]
    assert 0 <= digest < 2**64
    assert digest != history_digest(np.array([*ids, 0], np.uint32))


@given(ids=st.lists(st.integers(0, 2**32 - 1), max_size=50), data=st.data())
def test_a_checksum_is_carried_on_from_any_part(ids: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(ids)))
    first, rest = pack_u32(ids[:at]), pack_u32(ids[at:])
    whole = history_checksum(first + rest)
    assert history_checksum(rest, history_checksum(first)) == whole
    if ids:
        other = [*ids[:-1], ids[-1] ^ 1]
        assert history_checksum(pack_u32(other)) != whole
    assert history_checksum(pack_u32([97, 98, 99])) == 1937709347  # as PROTOCOL.md has it


@given(
    marks=st.lists(st.booleans(), max_size=9),
    ids=st.lists(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))),
)
def test_marked_ids_are_found(marks: list[bool], ids: list[int]) -> None:
    expected = any(token_id < len(marks) and marks[token_id] for token_id in ids)
    columns = np.array(marks, np.bool_), np.array(ids, np.uint32)
    assert has_marked(*columns) == expected
    assert _native.has_marked(*columns) == expected


def test_spans_append_where_there_is_room_for_all_of_them() -> None:
    args = _columns(3)
    values = np.arange(66, dtype=np.uint32)
    args[4] = np.zeros(3 * PAGE_LEN, np.uint32)
    args[5:] = np.array([0, 1]), values, 3, np.array([65, 1])
    pages = _native.TokenPages(*args[:5])
    before = [each.copy() for each in args[:5]]
    for wrong in (2, 1, 0):
        assert pages.append(*args[5:7], wrong, args[8]) == -1
    assert pages.append(args[5], np.arange(130, dtype=np.uint32), 3, np.array([129, 1])) == -1
    for each, was in zip(args[:5], before, strict=True):
        assert np.array_equal(each, was)
    assert pages.append(*args[5:]) == 0
    assert args[0].tolist() == [65, 65]
    assert args[2].tolist() == [[2, 1], [0, 0]]
    assert args[4][2 * PAGE_LEN :].tolist() == values[:PAGE_LEN].tolist()
    assert args[4][[PAGE_LEN, 0]].tolist() == [64, 65]


@pytest.mark.parametrize("counts", [None, np.array([1, 1]), np.array([0, 2])])
@pytest.mark.parametrize("length", [0, 63, 127])
def test_a_row_that_comes_twice_is_left_to_numpy(length: int, counts: Any) -> None:
    """Counted once, its second page would be written behind the columns."""
    args = _columns()
    args[0][0] = length
    args[5:7] = np.array([0, 0]), np.array([7, 8], np.uint32)
    args[8] = counts
    before = [each.copy() for each in args[:5]]
    assert _native.TokenPages(*args[:5]).append(*args[5:]) == -1
    for each, was in zip(args[:5], before, strict=True):
        assert np.array_equal(each, was)
