"""Histories of streams as paged numpy columns: the token half of STREAMS' `Log`.

Owns: the values that streams have produced so far, by row. A row is a small integer that its
user hands out; a position counts the values of that row since its start. Appending to a thousand
rows is a handful of numpy operations, and a row's memory grows by one page at a time.

Does not know: cursors, messages, what a value means.

Rules:
- A row is opened before it is written and dropped when its stream is forgotten.
- Positions never move: `forget_before` frees pages but keeps the count.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

PAGE_LEN = 64
_NO_PAGE = -1


def history_digest(token_ids: npt.NDArray[np.uint32]) -> int:
    """A u64 by which two parties see that they have the same tokens."""
    digest = hashlib.blake2b(token_ids.astype("<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


class PagedLog:
    """Growing columns of one dtype, `width` values to a position.

    Memory is a pool of pages of PAGE_LEN positions each; the pool and the row table double when
    they run out.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int = 1, *, rows: int = 64) -> None:
        self._width = width
        self._pages = np.zeros((rows, PAGE_LEN, width), dtype)
        self._free: list[int] = list(range(rows - 1, -1, -1))
        self._tables = np.full((rows, 8), _NO_PAGE, np.int64)  # [row, page number] -> page
        self._lengths = np.zeros(rows, np.int64)

    @property
    def width(self) -> int:
        """Values to a position."""
        return self._width

    @property
    def num_pages_used(self) -> int:
        """Pages that hold values of some row."""
        return len(self._pages) - len(self._free)

    def lengths(self, rows: Int64s) -> Int64s:
        """How many positions each of `rows` holds, [len(rows)]."""
        return self._lengths[rows]

    def length(self, row: int) -> int:
        """How many positions `row` holds, those already freed included."""
        return int(self._lengths[row])

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        if row >= len(self._tables):
            more = max(row + 1, 2 * len(self._tables)) - len(self._tables)
            self._tables = np.pad(self._tables, ((0, more), (0, 0)), constant_values=_NO_PAGE)
            self._lengths = np.pad(self._lengths, (0, more))
        self.drop(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        table = self._tables[row]
        held = table[table != _NO_PAGE]
        if len(held):
            self._free.extend(held.tolist())
            table[:] = _NO_PAGE
        self._lengths[row] = 0

    def forget_before(self, row: int, position: int) -> None:
        """Free the pages of `row` that lie wholly below `position`, which it has reached."""
        assert 0 <= position <= self._lengths[row]
        table = self._tables[row, : position // PAGE_LEN]
        held = table[table != _NO_PAGE]
        if len(held):
            self._free.extend(held.tolist())
            table[:] = _NO_PAGE

    def append(self, rows: Int64s, values: npt.NDArray[Any]) -> None:
        """One position for each of `rows`, all different; values [n] or [n, width]."""
        at = self._lengths[rows]
        offset = at % PAGE_LEN
        fresh = rows[offset == 0]
        if len(fresh):
            self._add_pages(fresh, self._lengths[fresh] // PAGE_LEN)
        pages = self._tables[rows, at // PAGE_LEN]
        self._pages[pages, offset] = values.reshape(len(rows), self._width)
        self._lengths[rows] = at + 1

    def extend(self, row: int, values: npt.NDArray[Any]) -> None:
        """Many positions for one row; values [n] or [n, width]."""
        values = values.reshape(-1, self._width)
        length = int(self._lengths[row])
        end = length + len(values)
        numbers = np.arange(-(-length // PAGE_LEN), -(-end // PAGE_LEN))
        if len(numbers):
            self._add_pages(np.full(len(numbers), row), numbers)
        positions = np.arange(length, end)
        pages = self._tables[row, positions // PAGE_LEN]
        self._pages[pages, positions % PAGE_LEN] = values
        self._lengths[row] = end

    def read(self, row: int, start: int, stop: int) -> npt.NDArray[Any]:
        """A copy of positions [start, stop) of `row`: [n] where width is 1, else [n, width]."""
        return self.gather(np.array([row]), np.array([start]), np.array([stop - start]))

    def gather(self, rows: Int64s, starts: Int64s, counts: Int64s) -> npt.NDArray[Any]:
        """`counts[i]` positions of each row from `starts[i]` on, one row's behind the other's.

        [sum(counts)] where width is 1, else [sum(counts), width]. Raises IndexError for a
        position that is not there yet or was freed.
        """
        if (
            (starts < 0).any()
            or (counts < 0).any()
            or (starts + counts > self._lengths[rows]).any()
        ):
            raise IndexError("positions outside of the history")
        ends = np.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        positions = np.arange(total) + np.repeat(starts - ends + counts, counts)
        pages = self._tables[np.repeat(rows, counts), positions // PAGE_LEN]
        if (pages == _NO_PAGE).any():
            raise IndexError("positions below what was freed")
        values = self._pages[pages, positions % PAGE_LEN]
        return values[:, 0] if self._width == 1 else values

    def _add_pages(self, rows: Int64s, numbers: Int64s) -> None:
        """A fresh page for each (row, page number)."""
        if len(self._free) < len(rows):
            had = len(self._pages)
            more = max(had, len(rows))
            self._pages = np.concatenate(
                [self._pages, np.zeros_like(self._pages, shape=(more, PAGE_LEN, self._width))]
            )
            self._free[:0] = range(had + more - 1, had - 1, -1)
        widest = int(numbers.max()) + 1
        if widest > self._tables.shape[1]:
            more = max(widest, 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, more)), constant_values=_NO_PAGE)
        cut = len(self._free) - len(rows)
        self._tables[rows, numbers] = self._free[cut:]
        del self._free[cut:]
