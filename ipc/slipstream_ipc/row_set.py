"""Sets of rows that histories, cursors and tables recognise when they are passed again."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias

import numpy as np

from slipstream_ipc.arrays import Int64s

_versions = count()


@dataclass(frozen=True, slots=True, eq=False)
class RowSet:
    """Row numbers in order, [n], with a version that no other set has.

    What is computed for the rows of a set can be cached by its version: a batch that stays the same
    from step to step passes the same set, and its rows are not looked up again. The array becomes
    read-only, so it must not be a view of an array that is written to.
    """

    array: Int64s
    version: int = field(default_factory=_versions.__next__, init=False)

    def __post_init__(self) -> None:
        """Make the array read-only."""
        self.array.setflags(write=False)

    def __len__(self) -> int:
        return len(self.array)

    def tolist(self) -> list[int]:
        """The rows as Python integers."""
        numbers: list[int] = self.array.tolist()
        return numbers


NO_ROWS = RowSet(np.empty(0, np.int64))

# A set if the caller has one; an array counts as rows that were never seen before.
Rows: TypeAlias = RowSet | Int64s


def array_of(rows: Rows) -> Int64s:
    """The row numbers, [n]."""
    return rows.array if isinstance(rows, RowSet) else rows
