"""Paged memory for histories: page tables that map positions of rows to indices of pools of values.

A row grows one page at a time, and a thousand rows grow in a handful of numpy operations.
`token_log` and `logprob_log` combine tables and pools.

- A row is opened before it is written, and dropped when it is no longer needed.
- A position never moves to another index.
- Growing does not copy a large pool, which would stall the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]

PAGE_LEN = 64
_SHIFT = 6  # PAGE_LEN is 1 << _SHIFT: numpy's division and modulo are many times slower
_MAX_NEW_PAGES = 8192  # added at a time, unless more are requested
_NO_PAGE = -1

assert 1 << _SHIFT == PAGE_LEN


class PageTable:
    """Maps positions of rows to indices of a pool, PAGE_LEN of them to a page.

    Rows and pages are added when they run out; the owner of a pool has to reserve `num_indices`
    there before writing.
    """

    def __init__(self, rows: int = 64) -> None:
        self._num_pages = rows
        self._free: list[int] = list(range(rows - 1, -1, -1))
        self._tables = np.full((rows, 8), _NO_PAGE, np.int64)  # [row, page number] -> page
        self._lengths = np.zeros(rows, np.int64)
        self._offsets = np.zeros(rows, np.int64)  # index minus position, in a row's last page

    @property
    def num_indices(self) -> int:
        """Indices that may be in use are below this."""
        return self._num_pages * PAGE_LEN

    @property
    def num_pages_used(self) -> int:
        """Pages that belong to a row."""
        return self._num_pages - len(self._free)

    def lengths(self, rows: Int64s) -> Int64s:
        """How many positions each of `rows` holds, [len(rows)]."""
        return self._lengths.take(rows)

    def length(self, row: int) -> int:
        """How many positions `row` holds."""
        return self._lengths.item(row)

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        if row >= len(self._tables):
            more = max(row + 1, 2 * len(self._tables)) - len(self._tables)
            self._tables = np.pad(self._tables, ((0, more), (0, 0)), constant_values=_NO_PAGE)
            self._lengths = np.pad(self._lengths, (0, more))
            self._offsets = np.pad(self._offsets, (0, more))
        self.drop(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        table = self._tables[row]
        pages = table[table != _NO_PAGE]
        if len(pages):
            self._free.extend(pages.tolist())
            table[:] = _NO_PAGE
        self._lengths[row] = 0

    def append(self, rows: Int64s) -> Int64s:
        """Append a position to each of `rows`, all different; their indices, [len(rows)]."""
        at = self._lengths.take(rows)
        begins = at & (PAGE_LEN - 1) == 0
        if begins.any():
            self._add_pages(rows[begins], at[begins] >> _SHIFT)
        self._lengths[rows] = at + 1
        at += self._offsets.take(rows)
        return at

    def append_few(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """As `append`, for a few rows, all different; their indices and new lengths."""
        lengths, offsets = self._lengths, self._offsets
        indices, ends = [], []
        for row in rows:
            at = lengths.item(row)
            if at & (PAGE_LEN - 1) == 0:
                self._add_pages(np.array([row]), np.array([at >> _SHIFT]))
            lengths[row] = at + 1
            indices.append(at + offsets.item(row))
            ends.append(at + 1)
        return indices, ends

    def lengths_few(self, rows: Sequence[int]) -> list[int]:
        """As `lengths`, for a few rows."""
        item = self._lengths.item
        return [item(row) for row in rows]

    def last_index(self, row: int, position: int) -> int | None:
        """The index of this position of a row if it is the row's last one, else None."""
        if self._lengths.item(row) != position + 1:
            return None
        return position + self._offsets.item(row)

    def append_spans(self, rows: Int64s, counts: Int64s) -> Int64s:
        """Append `counts[i]` positions to each of `rows`, all different; indices [sum(counts)]."""
        at = self._lengths.take(rows)
        ends = at + counts
        first = (at + PAGE_LEN - 1) >> _SHIFT
        fresh = ((ends + PAGE_LEN - 1) >> _SHIFT) - first
        if fresh.any():
            self._add_pages(np.repeat(rows, fresh), spans(first, fresh))
        self._lengths[rows] = ends
        return self._indices(np.repeat(rows, counts), spans(at, counts))

    def find(self, rows: Int64s, starts: Int64s, counts: Int64s | None) -> Int64s:
        """The indices of `counts[i]` (None: one) positions of each row from `starts[i]` on.

        Raises: IndexError for a position outside of the history.
        """
        if not len(rows):
            return starts
        ends = starts + (1 if counts is None else counts)
        has_negative = starts.min() < 0 or (counts is not None and counts.min() < 0)
        if has_negative or (ends > self._lengths.take(rows)).any():
            raise IndexError("positions outside of the history")
        if counts is None:
            return self._indices(rows, starts)
        return self._indices(np.repeat(rows, counts), spans(starts, counts))

    def are_next(self, rows: Int64s, positions: Int64s) -> bool:
        """Whether each position equals the length of its row, so that it is appended next."""
        return bool((self._lengths.take(rows) == positions).all())

    def _indices(self, rows: Int64s, positions: Int64s) -> Int64s:
        numbers = positions >> _SHIFT
        pages = self._tables.reshape(-1).take(rows * self._tables.shape[1] + numbers)
        pages -= numbers
        pages <<= _SHIFT
        pages += positions
        return pages

    def _add_pages(self, rows: Int64s, numbers: Int64s) -> None:
        """Add a page for each (row, page number); the numbers of a row ascend."""
        if len(self._free) < len(rows):
            had = self._num_pages
            self._num_pages += max(min(had, _MAX_NEW_PAGES), len(rows))
            self._free[:0] = range(self._num_pages - 1, had - 1, -1)
        widest = int(numbers.max()) + 1
        if widest > self._tables.shape[1]:
            more = max(widest, 2 * self._tables.shape[1]) - self._tables.shape[1]
            self._tables = np.pad(self._tables, ((0, 0), (0, more)), constant_values=_NO_PAGE)
        cut = len(self._free) - len(rows)
        pages = np.array(self._free[cut:], np.int64)
        del self._free[cut:]
        self._tables[rows, numbers] = pages
        self._offsets[rows] = (pages - numbers) << _SHIFT  # the last page of a repeated row wins


class Pool:
    """Values by index, `width` of one dtype to each."""

    def __init__(self, dtype: npt.DTypeLike, width: int = 1) -> None:
        self.dtype = np.dtype(dtype)
        self.width = width
        self._values = np.zeros((0, width), dtype)
        # all values of an index as one item: numpy copies items several times faster than rows
        self._item = self.dtype if width == 1 else np.dtype((np.void, width * self.dtype.itemsize))
        self._items = self._values.view(self._item).reshape(-1)

    def __len__(self) -> int:
        return len(self._values)

    def reserve(self, num_indices: int) -> None:
        """Grow to at least `num_indices`."""
        if num_indices > len(self._values):
            del self._items  # the only view of the memory, which resizing moves
            # in place: the allocator remaps the memory of large pools instead of copying it
            self._values.resize((num_indices, self.width), refcheck=False)
            self._items = self._values.view(self._item).reshape(-1)

    def write(self, indices: Int64s, values: npt.NDArray[Any]) -> None:
        """Write values [n] or [n, width] at indices [n]."""
        values = np.ascontiguousarray(values, self.dtype)
        self._items[indices] = values.view(self._item).reshape(-1)

    def write_few(self, indices: Sequence[int], values: Sequence[int]) -> None:
        """As `write`, for a few integers; width 1."""
        items = self._items
        for index, value in zip(indices, values, strict=True):
            items[index] = value

    def read_one(self, index: int) -> Any:
        """The value at one index; width 1."""
        return self._items.item(index)

    def read(self, indices: Int64s) -> npt.NDArray[Any]:
        """A copy of the values: [n] if width is 1, else [n, width]."""
        if self.width == 1:
            return self._items.take(indices)
        return self._values.take(indices, 0)


def spans(starts: Int64s, sizes: Int64s) -> Int64s:
    """The indices of many spans, concatenated: [sum(sizes)]."""
    ends = np.cumsum(sizes)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total) + np.repeat(starts - ends + sizes, sizes)
