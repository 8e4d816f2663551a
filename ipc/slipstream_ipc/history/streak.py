"""Streaks of a receiver's rows: message after message with one position of each of them.

Of a streak only the messages are counted. `StreakCounts` exists twice: here, which is the
reference, and in C (`streak.c`), where other extensions count (`streak.h`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.native.extension import load_extension
from slipstream_ipc.row_set import RowSet

Int64s = npt.NDArray[np.int64]

HEADER = Path(__file__).with_name("streak.h")  # of the counts in C


class StreakCounts:
    """Counts of the messages of a streak, which begins with one that was made.

    num_sent: messages so far. num_acked: those up to the latest that was acknowledged. is_on: it
    may go on. is_written, is_acked_written: whether the cursors' columns hold what was sent, and
    what was acknowledged.
    """

    def __init__(self) -> None:
        self.num_sent = 1
        self.num_acked = 0
        self.is_on = True
        self.is_written = True
        self.is_acked_written = True


def native_streak_counts() -> Any:
    """`StreakCounts` in C; None where that cannot be had."""
    native: Any = load_extension("streak", HEADER.with_suffix(".c"), (HEADER,))
    return None if native is None else native.StreakCounts


if TYPE_CHECKING:
    NativeStreakCounts = StreakCounts
    NewStreakCounts = StreakCounts
else:
    NativeStreakCounts = native_streak_counts()  # None where that cannot be had
    NewStreakCounts = NativeStreakCounts or StreakCounts


class Streak(NewStreakCounts):
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
