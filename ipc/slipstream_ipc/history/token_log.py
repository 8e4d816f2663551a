"""Histories of streams' tokens as paged numpy columns, and digests of them.

A row is a small integer that the caller assigns; a position counts the values of a row since its
start.

- A row is opened before it is written and dropped when its stream is forgotten.
- Positions never move, and a written value never changes.
- The values appended last are kept as they came until something else is read, or many have
  gathered. They are scattered over memory: writing a thousand of them takes longer than making a
  message with just those values, so a sender sends first and writes later (`flush_deferred`).
- A caller that appends to the same rows again passes the same `RowSet`. Then no row is looked up:
  the values are deferred and written sixteen positions at a time.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc.history.pages import PageTable, Pool
from slipstream_ipc.row_set import NO_ROWS, Rows, RowSet, array_of

Int64s = npt.NDArray[np.int64]

_MAX_DEFERRED = 16  # positions of each row


def history_digest(token_ids: npt.NDArray[np.uint32]) -> int:
    """A u64 hash (BLAKE2b) by which two processes check that they have the same tokens."""
    digest = hashlib.blake2b(token_ids.astype("<u4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def history_checksum(token_ids: bytes, before: int = 0) -> int:
    """The CRC-32 of a u32 column of tokens, continued from the checksum of the tokens before it.

    Unlike the digest it can be continued without having those tokens.
    """
    return zlib.crc32(token_ids, before)


class TokenLog:
    """Growing columns of token ids (uint32) by row. Returned arrays must not be written to."""

    def __init__(self, *, rows: int = 64) -> None:
        self._table = PageTable(rows)
        self._pool = Pool(np.uint32)
        self._rows = NO_ROWS  # the rows that were appended to last
        self._is_same_rows = False  # the append before was to the same rows
        self._deferred: list[npt.NDArray[Any]] = []  # appended to `_rows`, not written yet
        self._indices: Int64s | None = None  # of the first of `_deferred`, if the table has it

    @property
    def num_pages_used(self) -> int:
        """Pages that hold values of a row."""
        self._write_deferred()
        return self._table.num_pages_used

    def lengths(self, rows: Rows) -> Int64s:
        """How many positions each of `rows` holds, [len(rows)]."""
        num = self._num_uncounted
        if num:
            if isinstance(rows, RowSet) and rows.version == self._rows.version:
                return self._table.lengths(rows.array) + num
            self._write_deferred()
        return self._table.lengths(array_of(rows))

    def length(self, row: int) -> int:
        """How many positions `row` holds."""
        if self._num_uncounted:
            self._write_deferred()
        return self._table.length(row)

    def lengths_few(self, rows: Sequence[int]) -> list[int]:
        """As `lengths`, for a few rows."""
        self._write_deferred()
        return self._table.lengths_few(rows)

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        self._write_deferred()
        self._table.open(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        self._write_deferred()
        self._table.drop(row)

    def append(self, rows: RowSet, values: npt.NDArray[Any]) -> None:
        """Append a position to each of `rows`, all different.

        The values, [n], are kept as they are and must not be written to afterwards.
        """
        self._is_same_rows = rows.version == self._rows.version
        if not self._is_same_rows:
            self._write_deferred()
            self._rows, self._indices = rows, self._table.append(rows.array)
        elif len(self._deferred) >= _MAX_DEFERRED:
            self._write_deferred()
        self._deferred.append(values)

    def append_few(self, rows: Sequence[int], values: Sequence[int]) -> list[int]:
        """As `append`, for a few rows and integers, without numpy's fixed costs.

        Returns the new lengths of the rows.
        """
        self._write_deferred()
        indices, lengths = self._table.append_few(rows)
        self._pool.reserve(self._table.num_indices)
        self._pool.write_few(indices, values)
        return lengths

    def flush_deferred(self) -> None:
        """Write what was deferred, unless more for the same rows is to be expected.

        To be called when the loop has time for it.
        """
        if not self._is_same_rows or len(self._deferred) >= _MAX_DEFERRED:
            self._write_deferred()

    def last(self, rows: Rows) -> npt.NDArray[Any]:
        """The last position of each of `rows`, [n]. Raises: IndexError for an empty row."""
        if self._deferred and isinstance(rows, RowSet) and rows.version == self._rows.version:
            return self._deferred[-1].astype(np.uint32, copy=False)
        return self.gather(rows, self.lengths(rows) - 1, None)

    def append_spans(self, rows: Int64s, counts: Int64s, values: npt.NDArray[Any]) -> None:
        """Append `counts[i]` positions to each of `rows`, all different.

        values: [sum(counts)], row by row.
        """
        self._write_deferred()
        self._write(self._table.append_spans(rows, counts), values)

    def extend(self, row: int, values: npt.NDArray[Any]) -> None:
        """Append many positions to one row; values [n]."""
        self.append_spans(np.array([row]), np.array([len(values)]), values)

    def read(self, row: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Positions [start, stop) of `row`, [stop - start]."""
        return self.gather(np.array([row]), np.array([start]), np.array([stop - start]))

    def read_few(self, spans: Sequence[tuple[int, int, int]]) -> list[int]:
        """As `gather`, for a few spans (row, start, count), as integers.

        Cheap if each is only the last position of its row.
        """
        self._write_deferred()
        values: list[int] = []
        for row, start, count in spans:
            index = self._table.last_index(row, start) if count == 1 else None
            if index is not None:
                values.append(self._pool.read_one(index))
            elif count:
                values += self.read(row, start, start + count).tolist()
        return values

    def gather(self, rows: Rows, starts: Int64s, counts: Int64s | None) -> npt.NDArray[Any]:
        """`counts[i]` (None: one) positions of each row from `starts[i]` on, row by row.

        [sum(counts)]. Raises: IndexError for a position outside of the history.
        """
        if self._deferred:
            is_same = isinstance(rows, RowSet) and rows.version == self._rows.version
            if is_same and counts is None and self._are_last(starts):
                return self.last(rows)
            self._write_deferred()
        return self._pool.read(self._table.find(array_of(rows), starts, counts))

    def _are_last(self, starts: Int64s) -> bool:
        """Whether these are the last positions of `self._rows`."""
        lengths = self._table.lengths(self._rows.array)
        return bool((lengths + (self._num_uncounted - 1) == starts).all())

    @property
    def _num_uncounted(self) -> int:
        """Deferred positions that the table does not count yet."""
        return len(self._deferred) - (self._indices is not None)

    def _write_deferred(self) -> None:
        """Write everything that was deferred."""
        rows, deferred, indices = self._rows.array, self._deferred, self._indices
        if not deferred:
            return
        self._deferred, self._indices = [], None
        if indices is not None:
            self._write(indices, deferred.pop(0))
        if len(deferred) == 1:
            self._write(self._table.append(rows), deferred[0])
        elif deferred and len(rows):
            values = np.stack(deferred, 1).reshape(-1)
            self._write(self._table.append_spans(rows, np.full(len(rows), len(deferred))), values)

    def _write(self, indices: Int64s, values: npt.NDArray[Any]) -> None:
        self._pool.reserve(self._table.num_indices)
        self._pool.write(indices, values)
