"""Cursors of receivers into token histories (`token_log`): what was sent, and acknowledged.

`Cursors` decides which rows have something new and how much of it goes into the next message.

- A message takes the positions between the cursor and the end of the history, and moves the cursor.
- A message has a budget of tokens, shared evenly by the rows that have news; rows that were left
  out come first in the next one.
- An attach moves cursors back to what the receiver states that it has. Otherwise they move back
  only when a message could not be sent (`rewind`).
- A row has one receiver; there may be several.
- A streak, that is message after message with one position of each of the same rows, is counted
  instead of looked up (`next_in_streak`), as long as no row is opened or closed. Each receiver has
  its own. While `Streak.is_on`, its messages may also be counted there, by `num_sent`, where they
  are made; each of these is acknowledged by `acknowledge_next`.
- Opening a row again begins a new life of it, which voids acknowledgements of earlier ones: a row
  can be reused by another stream while messages about the previous one are in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

from slipstream_ipc.history.streak import Streak
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.row_table import RowTable, column

Int64s = npt.NDArray[np.int64]


class Portion(Struct, frozen=True, eq=False, gc=False):
    """The part of a log that a message carries: `counts` positions of each row, from `starts`
    on.
    """

    rows: RowSet
    first: Int64s  # `starts`, or those of the first portion of the streak
    counts: Int64s
    generations: Int64s  # the row's life (see Cursors.open) when the message was made
    num_tokens: int  # the sum of counts, none of which is 0
    is_all: bool  # the rows asked about have nothing more to send
    streak: Streak | None = None  # that it is part of
    num_before: int = 0  # portions of the streak before it
    receiver: int = 0

    @property
    def starts(self) -> Int64s:
        """The first position of each row."""
        return self.first + self.num_before if self.num_before else self.first

    @property
    def is_one_each(self) -> bool:
        """True if it has one position of each row."""
        return self.num_tokens == len(self.rows)


class Cursors(RowTable):
    """Cursors by row; positions count from the row's start."""

    _sent: Int64s = column(np.int64)
    _acked: Int64s = column(np.int64)
    _open: npt.NDArray[np.bool_] = column(np.bool_)
    _generations: Int64s = column(np.int64)

    def __init__(self, rows: int = 64) -> None:
        super().__init__(rows)
        self._first = 0  # the row that comes first when not all fit the budget
        self._streaks: dict[int, Streak] = {}  # by receiver

    @property
    def acked(self) -> Int64s:
        """Positions acknowledged so far, [num_rows]; must not be written to."""
        for streak in self._streaks.values():
            if not streak.is_acked_written:
                # no row was opened since the portion was made, and acknowledgements only grow
                self._acked[streak.rows.array] = streak.acked
                streak.is_acked_written = True
        return self._acked

    def open(self, row: int, position: int) -> None:
        """Send `row` from `position` on, as a new life of the row."""
        self._end_streaks()
        if row >= self.num_rows:
            self.grow(row + 1)
        self._sent[row] = self._acked[row] = position
        self._open[row] = True
        self._generations[row] += 1

    def close(self, row: int) -> None:
        """Stop sending `row`."""
        self._end_streaks()
        self._open[row] = False

    def is_open(self, row: int) -> bool:
        """True if `row` is being sent."""
        return row < len(self._open) and bool(self._open[row])

    def sent(self, row: int) -> int:
        """Positions of `row` sent so far."""
        self._write_sent()
        return int(self._sent[row])

    def next_portion(
        self, rows: RowSet, lengths: Int64s, budget: int, receiver: int = 0
    ) -> Portion:
        """The next message's portion of `rows`, whose histories have `lengths`; moves the cursors.

        It has at most `budget` positions in all, and at least one if any row has news. receiver: of
        these rows.
        """
        self._end_streak(receiver)
        some = rows.array
        starts = self._sent.take(some)
        counts = lengths - starts
        news = self._open.take(some)
        news &= counts > 0
        if not news.all():
            some, starts, counts = some[news], starts[news], counts[news]
            rows = RowSet(some)
        num_tokens = int(counts.sum())
        is_all = num_tokens <= max(budget, 1)
        if not is_all:
            some, starts, counts = self._share(some, starts, counts, max(budget, 1))
            rows = RowSet(some)
            num_tokens = int(counts.sum())
        self._sent[some] = starts + counts
        lives = self._generations.take(some)
        portion = Portion(rows, starts, counts, lives, num_tokens, is_all, receiver=receiver)
        if is_all and num_tokens and portion.is_one_each:
            streak = self._streaks[receiver] = Streak(rows, starts, counts, lives, receiver)
            portion = replace(portion, streak=streak)
        return portion

    def next_in_streak(self, rows: RowSet, budget: int, receiver: int = 0) -> Portion | None:
        """Return the next portion as `next_portion` does, but cheaper, for rows that each got
        exactly one position since the last portion; None if they are not the streak's rows and
        `next_portion` has to be called.
        """
        streak = self._streaks.get(receiver)
        if streak is None or streak.rows.version != rows.version:
            return None
        num_tokens = len(streak.counts)
        if num_tokens > budget:
            return None
        num_before = streak.num_sent
        streak.num_sent = num_before + 1
        streak.is_written = False
        return Portion(
            rows,
            streak.first,
            streak.counts,
            streak.generations,
            num_tokens,
            True,
            streak,
            num_before,
            receiver,
        )

    def rewind(self, portion: Portion) -> None:
        """Move the cursors back: the message with `portion`, the last one that its receiver's rows
        got, was not sent.
        """
        self._end_streak(portion.receiver)
        self._sent[portion.rows.array] = portion.starts

    def lags(self, rows: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
        """True for the rows that are open and have not been sent up to their `lengths`, bool
        [n].
        """
        self._write_sent()
        behind: npt.NDArray[np.bool_] = self._open.take(rows) & (self._sent.take(rows) < lengths)
        return behind

    def acknowledge(self, portion: Portion) -> None:
        """The receiver has everything up to the end of `portion`."""
        streak = portion.streak
        if streak is not None and portion.num_before >= streak.num_acked:
            streak.num_acked = portion.num_before + 1
            streak.is_acked_written = False
        if streak is None or not streak.is_on:
            ends = portion.starts + portion.counts
            self._acknowledge(portion.rows.array, ends, portion.generations)

    def acknowledge_next(self, streak: Streak) -> None:
        """The receiver has one more message of `streak`; those before it are acknowledged."""
        streak.num_acked += 1
        streak.is_acked_written = False
        if not streak.is_on:
            self._acknowledge(streak.rows.array, streak.acked, streak.generations)

    def _acknowledge(self, rows: Int64s, ends: Int64s, generations: Int64s) -> None:
        same = self._generations.take(rows) == generations
        if not same.all():
            rows, ends = rows[same], ends[same]
        self._acked[rows] = np.maximum(self._acked.take(rows), ends)

    def _write_sent(self) -> None:
        for streak in self._streaks.values():
            if not streak.is_written:
                self._sent[streak.rows.array] = streak.sent
                streak.is_written = True

    def _end_streaks(self) -> None:
        """End all streaks: write what was sent and acknowledged into the columns."""
        if self._streaks:
            self._write_sent()
            _ = self.acked
            for streak in self._streaks.values():
                streak.is_on = False
            self._streaks.clear()

    def _end_streak(self, receiver: int) -> None:
        if receiver in self._streaks:
            self._write_sent()
            _ = self.acked
            self._streaks.pop(receiver).is_on = False

    def _share(
        self, rows: Int64s, starts: Int64s, counts: Int64s, budget: int
    ) -> tuple[Int64s, Int64s, Int64s]:
        order = np.argsort(rows)
        order = np.roll(order, -int(np.searchsorted(rows[order], self._first)))[:budget]
        rows, starts, counts = rows[order], starts[order], counts[order]
        self._first = int(rows[-1]) + 1
        # the largest even share under which all fit: short rows leave theirs to the long ones
        ascending = np.sort(counts)
        left = budget - np.concatenate([[0], np.cumsum(ascending)[:-1]])
        shares = left // np.arange(len(counts), 0, -1)
        exceeds = ascending > shares
        share = int(shares[np.argmax(exceeds)]) if exceeds.any() else int(ascending[-1])
        return rows, starts, np.minimum(counts, max(share, 1))
