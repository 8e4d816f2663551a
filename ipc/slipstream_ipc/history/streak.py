"""Streaks of a receiver's rows: message after message with one position of each of them.

Of a streak only the messages are counted. `StreakCounts` is in C, where other modules of C count,
too (`streak.h`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_ipc._native import StreakCounts
from slipstream_ipc.row_set import RowSet

Int64s = npt.NDArray[np.int64]


class Streak(StreakCounts):
    """Open rows that have been sent completely, one position each in every message."""

    def __init__(
        self, rows: RowSet, first: Int64s, counts: Int64s, generations: Int64s, receiver: int
    ) -> None:
        """A streak that begins with one position of each row, `first`. `counts` are their numbers,
        all 1; `generations`: see `Portion`.
        """
        super().__init__()
        self.rows = rows
        self.first = first
        self.counts = counts
        self.generations = generations
        self.receiver = receiver

    @property
    def sent(self) -> Int64s:
        """Positions of each row sent so far."""
        return self.first + self.num_sent

    @property
    def acked(self) -> Int64s:
        """Positions of each row up to the latest that was acknowledged."""
        return self.first + self.num_acked
