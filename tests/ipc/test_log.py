"""PagedLog against plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from slipstream_ipc.log import PAGE_LEN, PagedLog, history_digest

ROWS = 7


class AgainstLists(RuleBasedStateMachine):
    @initialize(width=st.integers(1, 3), rows=st.integers(1, 9))
    def begin(self, width: int, rows: int) -> None:
        self.width = width
        self.log = PagedLog(np.uint32, width, rows=rows)
        self.lists: dict[int, list[list[int]]] = {}
        self.freed: dict[int, int] = {}  # positions below are gone
        self.next_value = 0

    def _values(self, num: int) -> list[list[int]]:
        self.next_value += num
        first = self.next_value - num
        return [[(first + i) * 3 + j for j in range(self.width)] for i in range(num)]

    def _array(self, values: list[list[int]]) -> np.ndarray[Any, Any]:
        array = np.array(values, np.uint32).reshape(-1, self.width)
        return array[:, 0] if self.width == 1 else array

    @rule(row=st.integers(0, ROWS))
    def open(self, row: int) -> None:
        self.log.open(row)
        self.lists[row] = []
        self.freed[row] = 0

    @rule(row=st.integers(0, ROWS))
    def drop(self, row: int) -> None:
        if row in self.lists:
            self.log.drop(row)
            self.log.drop(row)
            self.open(row)

    @rule(rows=st.sets(st.integers(0, ROWS)), times=st.integers(1, 70))
    def append(self, rows: set[int], times: int) -> None:
        some = [row for row in rows if row in self.lists]
        for _ in range(times):
            values = self._values(len(some))
            self.log.append(np.array(some, np.int64), self._array(values))
            for row, value in zip(some, values, strict=True):
                self.lists[row].append(value)

    @rule(row=st.integers(0, ROWS), num=st.sampled_from([0, 1, 3, 63, 64, 65, 200, 1500]))
    def extend(self, row: int, num: int) -> None:
        if row in self.lists:
            values = self._values(num)
            self.log.extend(row, self._array(values))
            self.lists[row] += values

    @rule(row=st.integers(0, ROWS), part=st.floats(0, 1))
    def forget(self, row: int, part: float) -> None:
        if row in self.lists:
            position = round(part * len(self.lists[row]))
            self.log.forget_before(row, position)
            self.freed[row] = max(self.freed[row], position // PAGE_LEN * PAGE_LEN)

    @rule(data=st.data())
    def gather(self, data: Any) -> None:
        rows = data.draw(st.lists(st.sampled_from(sorted(self.lists)))) if self.lists else []
        starts, counts, expected = [], [], []
        for row in rows:
            start = data.draw(st.integers(self.freed[row], len(self.lists[row])))
            stop = data.draw(st.integers(start, len(self.lists[row])))
            starts.append(start)
            counts.append(stop - start)
            expected += self.lists[row][start:stop]
        where = [np.array(column, np.int64) for column in (rows, starts, counts)]
        assert np.array_equal(self.log.gather(*where), self._array(expected))

    @invariant()
    def everything_is_as_in_the_lists(self) -> None:
        if not hasattr(self, "lists"):
            return
        num_pages = 0
        for row, values in self.lists.items():
            assert self.log.length(row) == len(values)
            first = self.freed[row]
            assert np.array_equal(
                self.log.read(row, first, len(values)), self._array(values[first:])
            )
            num_pages += -(-len(values) // PAGE_LEN) - first // PAGE_LEN
        assert self.log.num_pages_used == num_pages


TestAgainstLists = AgainstLists.TestCase
TestAgainstLists.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_what_was_read_is_a_copy() -> None:
    log = PagedLog(np.uint32)
    log.open(0)
    log.extend(0, np.arange(3))
    read = log.read(0, 0, 3)
    log.drop(0)
    log.extend(0, np.arange(7, 10))
    assert read.tolist() == [0, 1, 2]


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (0, 4), (2, 1), (4, 4)])
def test_positions_outside_of_the_history(start: int, stop: int) -> None:
    log = PagedLog(np.uint32)
    log.open(0)
    log.extend(0, np.arange(3))
    with pytest.raises(IndexError, match="outside"):
        log.read(0, start, stop)


def test_what_was_freed_cannot_be_read() -> None:
    log = PagedLog(np.uint32)
    log.open(0)
    log.extend(0, np.arange(3 * PAGE_LEN))
    log.forget_before(0, 2 * PAGE_LEN - 1)
    with pytest.raises(IndexError, match="freed"):
        log.read(0, PAGE_LEN - 1, PAGE_LEN + 1)
    assert log.read(0, PAGE_LEN, PAGE_LEN + 2).tolist() == [PAGE_LEN, PAGE_LEN + 1]


@pytest.mark.parametrize("position", [-1, 11, 100])
def test_nobody_forgets_what_is_yet_to_come(position: int) -> None:
    """It would free the page that is being written, and the row would write into another's."""
    log = PagedLog(np.uint32, rows=1)
    log.open(0)
    log.extend(0, np.arange(10))
    with pytest.raises(AssertionError):
        log.forget_before(0, position)


def test_a_page_boundary_that_is_forgotten_to_the_last() -> None:
    log = PagedLog(np.uint32, rows=1)
    log.open(0)
    log.extend(0, np.arange(PAGE_LEN))
    log.forget_before(0, PAGE_LEN)
    assert log.num_pages_used == 0
    log.append(np.array([0]), np.array([5]))
    assert log.read(0, PAGE_LEN, PAGE_LEN + 1).tolist() == [5]


def test_memory_is_used_again() -> None:
    log = PagedLog(np.float32, 2, rows=1)
    for _ in range(50):
        log.open(0)
        log.extend(0, np.ones((5 * PAGE_LEN, 2)))
        assert log.num_pages_used == 5
        log.drop(0)
    assert log.num_pages_used == 0
    assert len(log._pages) < 20


@given(st.lists(st.integers(0, 2**32 - 1)), st.sampled_from([np.uint32, np.int64]))
def test_digest_is_of_the_values(ids: list[int], dtype: Any) -> None:
    digest = history_digest(np.array(ids, np.uint32))
    assert digest == history_digest(np.array(ids, dtype))  # type: ignore[arg-type]
    assert 0 <= digest < 2**64
    assert digest != history_digest(np.array([*ids, 0], np.uint32))
