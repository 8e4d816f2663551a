"""Tables of columns that grow together."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from slipstream_ipc.row_table import RowTable, column


class Table(RowTable):
    slot: npt.NDArray[np.int64] = column(np.int64, -1)
    share: npt.NDArray[np.float32] = column(np.float32, 0.5)
    is_open: npt.NDArray[np.bool_] = column(np.bool_)

    def __init__(self, num_rows: int) -> None:
        super().__init__(num_rows)
        self.beside = np.arange(3)


def test_rows_that_are_not_in_use_hold_the_fill_values() -> None:
    table = Table(2)
    table.slot[:], table.is_open[1] = [4, 5], True
    table.grow(3)
    assert table.num_rows == 4
    assert table.slot.tolist() == [4, 5, -1, -1]
    assert table.share.tolist() == [0.5] * 4
    assert table.is_open.tolist() == [False, True, False, False]
    assert (table.slot.dtype, table.share.dtype) == (np.int64, np.float32)


def test_an_array_that_is_no_column_does_not_grow() -> None:
    table = Table(1)
    table.grow(100)
    assert table.num_rows == 100
    assert table.beside.tolist() == [0, 1, 2]


def test_a_column_is_an_instance_own() -> None:
    one, other = Table(1), Table(1)
    one.slot[0] = 7
    assert other.slot.tolist() == [-1]
    with pytest.raises(AttributeError):
        _ = Table.slot
