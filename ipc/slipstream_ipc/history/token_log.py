"""Histories of streams' tokens as paged numpy columns, and digests of them.

A row is a small integer that the caller assigns; a position counts the values of a row since its
start.

- A row is opened before it is written and dropped when its stream is forgotten.
- Positions never move, and a written value never changes.
- The values appended last are also kept as they came: a caller that asks for them with the same
  `RowSet` gets them as they are.
- Values for the same rows again and again are appended by a `RowAppender`, in one call.
- Rows are appended to and read in C (`token_pages.c`); what makes columns grow is in numpy.
"""

from __future__ import annotations

import hashlib
import zlib
from typing import Any

import numpy as np
import numpy.typing as npt

from slipstream_ipc._native import RowAppender, TokenPages
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.pages import PagePool, PageTable
from slipstream_ipc.row_set import NO_ROWS, Rows, RowSet, array_of

Latest = tuple[RowSet, UInt32s, Int64s | None]

_NOTHING: Latest = NO_ROWS, np.empty(0, np.uint32), None


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
        self.table = PageTable(rows)
        self.pool = PagePool(np.uint32)
        self._pages: TokenPages | None = None  # of table and pool, made when needed
        # what was appended last, with the counts of spans, while its rows have nothing newer;
        # modules of C look here, too
        self.latest: Latest = _NOTHING

    @property
    def num_pages_used(self) -> int:
        """Pages that hold values of a row."""
        return self.table.num_pages_used

    @property
    def pages(self) -> TokenPages | None:
        """The columns as C sees them, by which they may be appended to as well, until they have to
        grow; None while nothing was appended or read since they did.
        """
        self.latest = _NOTHING
        return self._pages

    def lengths(self, rows: Rows) -> Int64s:
        """The number of positions that each of `rows` holds, [len(rows)]."""
        return self.table.lengths.take(array_of(rows))

    def length(self, row: int) -> int:
        """The number of positions that `row` holds."""
        return self.table.length(row)

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        self.latest = _NOTHING
        self._leave_pages()
        self.table.open(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        self.latest = _NOTHING
        self.table.drop(row)

    def append(self, rows: RowSet, values: UInt32s) -> None:
        """Append a position to each of `rows`, all different.

        The values, [n], are kept as they are and must not be written to afterwards.
        """
        self.latest = rows, values, None
        if not self._append_natively(rows.array, values, None):
            self._write(self.table.append(rows.array), values)

    def appender(self, rows: RowSet) -> RowAppender:
        """Appends to these rows, all different, until the columns have to grow."""
        return RowAppender(self, self._pages or self._new_pages(), rows, rows.array)

    def last(self, rows: Rows) -> UInt32s:
        """The last position of each of `rows`, [n]. Raises: IndexError for an empty row."""
        latest, values, counts = self.latest
        if isinstance(rows, RowSet) and rows.version == latest.version and counts is None:
            return values
        some = array_of(rows)
        found = np.empty(len(some), np.uint32)
        pages = self._pages or self._new_pages()
        pages.last(found, some)
        return found

    def append_spans(self, rows: Rows, counts: Int64s, values: npt.NDArray[Any]) -> None:
        """Append `counts[i]` positions to each of `rows`, all different.

        values: [sum(counts)], row by row. With a set they are kept as `append` does.
        """
        some, values = array_of(rows), np.asarray(values, np.uint32)
        self.latest = (rows, values, counts) if isinstance(rows, RowSet) else _NOTHING
        if not self._append_natively(some, values, counts):
            self._write(self.table.append_spans(some, counts), values)

    def extend(self, row: int, values: npt.NDArray[Any]) -> None:
        """Append many positions to one row; values [n]."""
        self.append_spans(np.array([row]), np.array([len(values)]), values)

    def read(self, row: int, start: int, stop: int) -> UInt32s:
        """Positions [start, stop) of `row`, [stop - start]."""
        return self.gather(np.array([row]), np.array([start]), np.array([stop - start]))

    def gather(self, rows: Rows, starts: Int64s, counts: Int64s | None) -> UInt32s:
        """`counts[i]` (None: one) positions of each row from `starts[i]` on, row by row.

        [sum(counts)]. Raises: IndexError for a position outside of the history.
        """
        some = array_of(rows)
        num = len(some) if counts is None else max(0, int(counts.sum()))
        found = np.empty(num, np.uint32)
        pages = self._pages or self._new_pages()
        pages.gather(found, some, starts, counts)
        return found

    def _append_natively(self, rows: Int64s, values: UInt32s, counts: Int64s | None) -> bool:
        """Append in C; False, without effect, if the columns have to grow."""
        pages = self._pages or self._new_pages()
        num_free = pages.append(rows, values, self.table.num_free, counts)
        if num_free >= 0:
            self.table.num_free = num_free
            return True
        self._leave_pages()
        return False

    def _new_pages(self) -> TokenPages:
        table = self.table
        columns = (table.lengths, table.offsets, table.tables, table.free, self.pool.items)
        self._pages = pages = TokenPages(*columns)
        return pages

    def _leave_pages(self) -> None:
        """Allow no further appends by the present view, so that columns may be replaced."""
        if self._pages is not None:
            self._pages.is_current = False
            self._pages = None

    def _write(self, indices: Int64s, values: npt.NDArray[Any]) -> None:
        self.pool.reserve(self.table.num_indices)
        self.pool.write(indices, values)
