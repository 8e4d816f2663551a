"""A history of tokens in numpy, as `TokenLog` appends to it and reads it in C."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import Rows, RowSet, array_of


def has_marked(marks: npt.NDArray[np.bool_], token_ids: UInt32s) -> bool:
    """True if any of these ids is marked. marks: bool [number of ids]; larger ids are not
    marked.
    """
    return bool(marks[token_ids[token_ids < len(marks)]].any())


class NumpyTokenLog(TokenLog):
    """The same columns and errors. It has no appenders."""

    def appender(self, rows: RowSet) -> Any:
        return None

    def last(self, rows: Rows) -> UInt32s:
        latest, values, counts = self.latest
        if isinstance(rows, RowSet) and rows.version == latest.version and counts is None:
            return values
        return self.gather(rows, self.lengths(rows) - 1, None)

    def gather(self, rows: Rows, starts: Int64s, counts: Int64s | None) -> UInt32s:
        return self.pool.read(self.table.find(array_of(rows), starts, counts))

    def _append_natively(self, rows: Int64s, values: UInt32s, counts: Int64s | None) -> bool:
        return False
