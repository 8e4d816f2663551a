"""Cursors of receivers into token histories (`token_log`): what was sent, and acknowledged.

`Cursors` decides which rows have something new and how much of it goes into the next message.

- A message takes the positions between the cursor and the end of the history, and moves the cursor.
- A message has a budget of tokens, shared evenly by the rows that have news; rows that were left
  out come first in the next one.
- An attach moves cursors back to what the receiver states that it has. Otherwise they move back
  only when a message could not be sent (`rewind`).
- A row has one receiver; there may be several.
- Opening a row again begins a new life of it, which voids acknowledgements of earlier ones: a row
  can be reused by another stream while messages about the previous one are in flight.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from slipstream_ipc.arrays import Int64s
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.row_table import RowTable, column


class Portion(Struct, frozen=True, eq=False, gc=False):
    """The part of a log that a message carries: `counts` positions of each row, from `starts`
    on.
    """

    rows: RowSet
    starts: Int64s
    counts: Int64s
    life: int  # of the cursors (see Cursors.open) when the message was made
    num_tokens: int  # the sum of counts, none of which is 0
    is_all: bool  # the rows asked about have nothing more to send

    @property
    def is_one_each(self) -> bool:
        """True if it has one position of each row."""
        return self.num_tokens == len(self.rows)


class Cursors(RowTable):
    """Cursors by row; positions count from the row's start.

    acked: positions acknowledged so far; must not be written to from outside. life: the number of
    rows opened so far.
    """

    _sent: Int64s = column(np.int64)
    acked: Int64s = column(np.int64)
    _open: npt.NDArray[np.bool_] = column(np.bool_)
    _opened_at: Int64s = column(np.int64)  # the `life` that began with it

    def __init__(self, rows: int = 64) -> None:
        super().__init__(rows)
        self._first = 0  # the row that comes first when not all fit the budget
        self.life = 0

    @property
    def columns(self) -> tuple[Int64s, Int64s, npt.NDArray[np.bool_], Int64s]:
        """The columns that C works on until a row is opened: positions sent and acknowledged, what
        is open and since when.
        """
        return self._sent, self.acked, self._open, self._opened_at

    def open(self, row: int, position: int) -> None:
        """Send `row` from `position` on, as a new life of the row."""
        if row >= self.num_rows:
            self.grow(row + 1)
        self._sent[row] = self.acked[row] = position
        self._open[row] = True
        self.life += 1
        self._opened_at[row] = self.life

    def close(self, row: int) -> None:
        """Stop sending `row`."""
        self._open[row] = False

    def is_open(self, row: int) -> bool:
        """True if `row` is being sent."""
        return row < len(self._open) and bool(self._open[row])

    def sent(self, row: int) -> int:
        """Positions of `row` sent so far."""
        return int(self._sent[row])

    def next_portion(self, rows: RowSet, lengths: Int64s, budget: int) -> Portion:
        """The next message's portion of `rows`, whose histories have `lengths`; moves the cursors.

        It has at most `budget` positions in all, and at least one if any row has news.
        """
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
        return Portion(rows, starts, counts, self.life, num_tokens, is_all)

    def rewind(self, portion: Portion) -> None:
        """Move the cursors back: the message with `portion`, the last one that its receiver's rows
        got, was not sent.
        """
        self._sent[portion.rows.array] = portion.starts

    def lags(self, rows: Int64s, lengths: Int64s) -> npt.NDArray[np.bool_]:
        """True for the rows that are open and have not been sent up to their `lengths`, bool
        [n].
        """
        behind: npt.NDArray[np.bool_] = self._open.take(rows) & (self._sent.take(rows) < lengths)
        return behind

    def acknowledge(self, portion: Portion) -> None:
        """The receiver has everything up to the end of `portion`."""
        ends = portion.starts + portion.counts
        self.acknowledge_ends(portion.rows.array, ends, portion.life)

    def acknowledge_ends(self, rows: Int64s, ends: Int64s, life: int) -> None:
        """The receiver has everything up to `ends` [n] of these rows, which was sent in this
        `life`.
        """
        same = self._opened_at.take(rows) <= life
        if not same.all():
            rows, ends = rows[same], ends[same]
        self.acked[rows] = np.maximum(self.acked.take(rows), ends)

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
