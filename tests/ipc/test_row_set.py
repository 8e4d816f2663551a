"""Rows that are recognised when they come again."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import NO_ROWS, RowSet, array_of


def test_a_set_cannot_be_written() -> None:
    rows = np.array([3, 1])
    one = RowSet(rows)
    for array in (rows, one.array):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.array = rows  # type: ignore[misc]
    assert (one.tolist(), len(one)) == ([3, 1], 2)


def test_sets_of_equal_rows_have_versions_of_their_own() -> None:
    versions = {NO_ROWS.version, *(RowSet(np.array([1, 2])).version for _ in range(3))}
    assert len(versions) == 4


def test_an_array_is_taken_as_it_is() -> None:
    rows = np.array([1, 2])
    assert array_of(rows) is rows
    assert array_of(RowSet(rows)) is rows
    rows = np.array([4])
    assert array_of(rows).flags.writeable


def test_what_is_put_aside_for_a_set_is_found_by_its_array_too() -> None:
    log, rows = TokenLog(), RowSet(np.array([0, 1]))
    for row in rows.tolist():
        log.open(row)
    for value in range(3):
        log.append(rows, np.array([value, 10 + value], np.uint32))
    assert log.lengths(rows).tolist() == [3, 3]
    assert log.last(rows).tolist() == [2, 12]
    for other in (np.array([1, 0]), RowSet(np.array([1, 0]))):
        assert log.lengths(other).tolist() == [3, 3]
        assert log.last(other).tolist() == [12, 2]
