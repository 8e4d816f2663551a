"""Paged memory for histories: page tables that map positions of rows to indices of pools of values.

A row grows one page at a time, and a thousand rows grow in a handful of numpy operations.
`token_log` and `logprob_log` combine tables and pools.

- A row is opened before it is written, and dropped when it is no longer needed.
- A position never moves to another index.
- Growing does not copy a large pool, which would stall the loop.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.arrays import Int64s

PAGE_LEN = 64
_SHIFT = 6  # PAGE_LEN is 1 << _SHIFT: numpy's division and modulo are many times slower
_MAX_NEW_PAGES = 8192  # added at a time, unless more are requested
_NO_PAGE = -1

assert 1 << _SHIFT == PAGE_LEN


class PageTable:
    """Maps positions of rows to indices of a pool, PAGE_LEN of them to a page.

    Rows and pages are added when they run out; the owner of a pool has to reserve `num_indices`
    there before writing. The columns are public for C extensions (`token_pages.c`), which read and
    write them in the same way.
    """

    def __init__(self, rows: int = 64) -> None:
        self.tables = np.full((rows, 8), _NO_PAGE, np.int64)  # [row, page number] -> page
        self.lengths = np.zeros(rows, np.int64)
        self.offsets = np.zeros(rows, np.int64)  # index minus position, in a row's last page
        self.free = np.arange(rows - 1, -1, -1)  # [pages]; the first `num_free` belong to no row
        self.num_free = rows

    @property
    def num_indices(self) -> int:
        """Indices that may be in use are below this."""
        return len(self.free) * PAGE_LEN

    @property
    def num_pages_used(self) -> int:
        """Pages that belong to a row."""
        return len(self.free) - self.num_free

    def length(self, row: int) -> int:
        """The number of positions that `row` holds."""
        return self.lengths.item(row)

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        if row >= len(self.tables):
            more = max(row + 1, 2 * len(self.tables)) - len(self.tables)
            self.tables = np.pad(self.tables, ((0, more), (0, 0)), constant_values=_NO_PAGE)
            self.lengths = np.pad(self.lengths, (0, more))
            self.offsets = np.pad(self.offsets, (0, more))
        self.drop(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        table = self.tables[row]
        pages = table[table != _NO_PAGE]
        if len(pages):
            self.free[self.num_free : self.num_free + len(pages)] = pages
            self.num_free += len(pages)
            table[:] = _NO_PAGE
        self.lengths[row] = 0

    def append(self, rows: Int64s) -> Int64s:
        """Append a position to each of `rows`, all different; their indices, [len(rows)]."""
        at = self.lengths.take(rows)
        begins = at & (PAGE_LEN - 1) == 0
        if begins.any():
            self._add_pages(rows[begins], at[begins] >> _SHIFT)
        self.lengths[rows] = at + 1
        at += self.offsets.take(rows)
        return at

    def append_spans(self, rows: Int64s, counts: Int64s) -> Int64s:
        """Append `counts[i]` positions to each of `rows`, all different; indices [sum(counts)]."""
        at = self.lengths.take(rows)
        ends = at + counts
        first = (at + PAGE_LEN - 1) >> _SHIFT
        fresh = ((ends + PAGE_LEN - 1) >> _SHIFT) - first
        if fresh.any():
            self._add_pages(np.repeat(rows, fresh), spans(first, fresh))
        self.lengths[rows] = ends
        return self._indices(np.repeat(rows, counts), spans(at, counts))

    def find(self, rows: Int64s, starts: Int64s, counts: Int64s | None) -> Int64s:
        """The indices of `counts[i]` (None: one) positions of each row from `starts[i]` on.

        Raises: IndexError for a position outside of the history.
        """
        if not len(rows):
            return starts
        ends = starts + (1 if counts is None else counts)
        has_negative = starts.min() < 0 or (counts is not None and counts.min() < 0)
        if has_negative or (ends > self.lengths.take(rows)).any():
            raise IndexError("positions outside of the history")
        if counts is None:
            return self._indices(rows, starts)
        return self._indices(np.repeat(rows, counts), spans(starts, counts))

    def are_next(self, rows: Int64s, positions: Int64s) -> bool:
        """True if each position equals the length of its row, so that it is appended next."""
        return bool((self.lengths.take(rows) == positions).all())

    def _indices(self, rows: Int64s, positions: Int64s) -> Int64s:
        numbers = positions >> _SHIFT
        pages = self.tables.reshape(-1).take(rows * self.tables.shape[1] + numbers)
        pages -= numbers
        pages <<= _SHIFT
        pages += positions
        return pages

    def _add_pages(self, rows: Int64s, numbers: Int64s) -> None:
        """Add a page for each (row, page number); the numbers of a row ascend."""
        if self.num_free < len(rows):
            had = len(self.free)
            more = max(min(had, _MAX_NEW_PAGES), len(rows))
            used, free = np.empty(had - self.num_free, np.int64), self.free[: self.num_free]
            self.free = np.concatenate([np.arange(had + more - 1, had - 1, -1), free, used])
            self.num_free += more
        widest = int(numbers.max()) + 1
        if widest > self.tables.shape[1]:
            more = max(widest, 2 * self.tables.shape[1]) - self.tables.shape[1]
            self.tables = np.pad(self.tables, ((0, 0), (0, more)), constant_values=_NO_PAGE)
        self.num_free -= len(rows)
        pages = self.free[self.num_free : self.num_free + len(rows)][::-1]  # as a stack
        self.tables[rows, numbers] = pages
        self.offsets[rows] = (pages - numbers) << _SHIFT  # the last page of a repeated row wins


class PagePool:
    """Values by index, `width` of one dtype to each."""

    def __init__(self, dtype: npt.DTypeLike, width: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self.values = np.zeros((0, width), dtype)
        # all values of an index as one item: numpy copies items several times faster than rows
        self._item = self.dtype if width == 1 else np.dtype((np.void, width * self.dtype.itemsize))
        self.items = self.values.view(self._item).reshape(-1)

    def __len__(self) -> int:
        return len(self.values)

    def reserve(self, num_indices: int) -> None:
        """Grow to at least `num_indices`."""
        if num_indices > len(self.values):
            del self.items  # the only view of the memory, which resizing moves
            # in place: the allocator remaps the memory of large pools instead of copying it
            self.values.resize((num_indices, self.width), refcheck=False)
            self.items = self.values.view(self._item).reshape(-1)

    def write(self, indices: Int64s, values: npt.NDArray[Any]) -> None:
        """Write values [n] or [n, width] at indices [n]."""
        values = np.ascontiguousarray(values, self.dtype)
        self.items[indices] = values.view(self._item).reshape(-1)

    def read(self, indices: Int64s) -> npt.NDArray[Any]:
        """A copy of the values: [n] if width is 1, else [n, width]."""
        if self.width == 1:
            return self.items.take(indices)
        return self.values.take(indices, 0)


def spans(starts: Int64s, sizes: Int64s) -> Int64s:
    """The indices of many spans, concatenated: [sum(sizes)]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + sizes, sizes)
