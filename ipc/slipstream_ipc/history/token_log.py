"""Histories of streams' tokens as paged numpy columns, and digests of them.

A row is a small integer that the caller assigns; a position counts the values of a row since its
start.

- A row is opened before it is written and dropped when its stream is forgotten.
- Positions never move, and a written value never changes.
- The values appended last are kept as they came until something else is read, or many have
  gathered. Places are scattered over memory: writing a thousand of them takes longer than making a
  message with just those values, so a sender sends first and writes later (`flush_deferred`).
- A caller that appends to the same rows again passes the same `RowSet`. Then no row is looked up:
  the values are put aside and written sixteen positions at a time.
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

_MOST_PUT_ASIDE = 16  # positions of each row


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
    """Growing columns of one dtype, with `width` values per position.

    The arrays that it returns must not be written to.
    """

    def __init__(self, dtype: npt.DTypeLike, width: int = 1, *, rows: int = 64) -> None:
        self._table = PageTable(rows)
        self._pool = Pool(dtype, width)
        self._rows = NO_ROWS  # the rows that were appended to last
        self._is_again = False  # the append before was to the same rows
        self._aside: list[npt.NDArray[Any]] = []  # appended to `_rows`, not written yet
        self._places: Int64s | None = None  # of the first of `_aside`, if the table has it

    @property
    def width(self) -> int:
        """Values per position."""
        return self._pool.width

    @property
    def num_pages_used(self) -> int:
        """Pages that hold values of a row."""
        self._write_aside()
        return self._table.num_pages_used

    def lengths(self, rows: Rows) -> Int64s:
        """How many positions each of `rows` holds, [len(rows)]."""
        num = self._num_uncounted
        if num:
            if isinstance(rows, RowSet) and rows.version == self._rows.version:
                return self._table.lengths(rows.array) + num
            self._write_aside()
        return self._table.lengths(array_of(rows))

    def length(self, row: int) -> int:
        """How many positions `row` holds."""
        if self._num_uncounted:
            self._write_aside()
        return self._table.length(row)

    def lengths_few(self, rows: Sequence[int]) -> list[int]:
        """As `lengths`, for a few rows."""
        self._write_aside()
        return self._table.lengths_few(rows)

    def open(self, row: int) -> None:
        """Make `row` an empty history."""
        self._write_aside()
        self._table.open(row)

    def drop(self, row: int) -> None:
        """Free all that `row` holds. Dropping an empty row does nothing."""
        self._write_aside()
        self._table.drop(row)

    def append(self, rows: RowSet, values: npt.NDArray[Any]) -> None:
        """Append a position to each of `rows`, all different.

        The values, [n] or [n, width], are kept as they are and must not be written to afterwards.
        """
        self._is_again = rows.version == self._rows.version
        if not self._is_again:
            self._write_aside()
            self._rows, self._places = rows, self._table.append(rows.array)
        elif len(self._aside) >= _MOST_PUT_ASIDE:
            self._write_aside()
        self._aside.append(values)

    def append_few(self, rows: Sequence[int], values: Sequence[int]) -> list[int]:
        """As `append`, for a few rows and integers, width 1, without numpy's fixed costs.

        Returns the new lengths of the rows.
        """
        self._write_aside()
        places, lengths = self._table.append_few(rows)
        self._pool.reserve(self._table.num_places)
        self._pool.write_few(places, values)
        return lengths

    def flush_deferred(self) -> None:
        """Write what was put aside, unless more for the same rows is to be expected.

        To be called when the loop has time for it.
        """
        if not self._is_again or len(self._aside) >= _MOST_PUT_ASIDE:
            self._write_aside()

    def last(self, rows: Rows) -> npt.NDArray[Any]:
        """The last position of each of `rows`: [n] if width is 1, else [n, width].

        Raises: IndexError for an empty row.
        """
        if self._aside and isinstance(rows, RowSet) and rows.version == self._rows.version:
            return self._aside[-1].astype(self._pool.dtype, copy=False)
        return self.gather(rows, self.lengths(rows) - 1, None)

    def append_spans(self, rows: Int64s, counts: Int64s, values: npt.NDArray[Any]) -> None:
        """Append `counts[i]` positions to each of `rows`, all different.

        values: [sum(counts)] or [sum(counts), width], row by row.
        """
        self._write_aside()
        self._write(self._table.append_spans(rows, counts), values)

    def extend(self, row: int, values: npt.NDArray[Any]) -> None:
        """Append many positions to one row; values [n] or [n, width]."""
        num = values.size // self.width
        self.append_spans(np.array([row]), np.array([num]), values)

    def read(self, row: int, start: int, stop: int) -> npt.NDArray[Any]:
        """Positions [start, stop) of `row`: [n] if width is 1, else [n, width]."""
        return self.gather(np.array([row]), np.array([start]), np.array([stop - start]))

    def read_few(self, spans: Sequence[tuple[int, int, int]]) -> list[int]:
        """As `gather`, for a few spans (row, start, count) of integers, width 1.

        Cheap if each is only the last position of its row.
        """
        self._write_aside()
        values: list[int] = []
        for row, start, count in spans:
            place = self._table.last_place(row, start) if count == 1 else None
            if place is not None:
                values.append(self._pool.read_one(place))
            elif count:
                values += self.read(row, start, start + count).tolist()
        return values

    def gather(self, rows: Rows, starts: Int64s, counts: Int64s | None) -> npt.NDArray[Any]:
        """`counts[i]` (None: one) positions of each row from `starts[i]` on, row by row.

        [sum(counts)] if width is 1, else [sum(counts), width]. Raises: IndexError for a position
        outside of the history.
        """
        if self._aside:
            is_same = isinstance(rows, RowSet) and rows.version == self._rows.version
            if is_same and counts is None and self._are_last(starts):
                return self.last(rows)
            self._write_aside()
        return self._pool.read(self._table.find(array_of(rows), starts, counts))

    def _are_last(self, starts: Int64s) -> bool:
        """Whether these are the last positions of `self._rows`."""
        lengths = self._table.lengths(self._rows.array)
        return bool((lengths + (self._num_uncounted - 1) == starts).all())

    @property
    def _num_uncounted(self) -> int:
        """Positions put aside that the table does not count yet."""
        return len(self._aside) - (self._places is not None)

    def _write_aside(self) -> None:
        """Write everything that was put aside to its places."""
        rows, aside, places = self._rows.array, self._aside, self._places
        if not aside:
            return
        self._aside, self._places = [], None
        if places is not None:
            self._write(places, aside.pop(0))
        if len(aside) == 1:
            self._write(self._table.append(rows), aside[0])
        elif aside and len(rows):
            values = np.stack(aside, 1).reshape(-1, self.width)
            self._write(self._table.append_spans(rows, np.full(len(rows), len(aside))), values)

    def _write(self, places: Int64s, values: npt.NDArray[Any]) -> None:
        self._pool.reserve(self._table.num_places)
        self._pool.write(places, values)
