"""Histories of log-probabilities by row, ragged: each row is as wide as its request asked.

A row has values from its opening on; positions are those of the row's token history.

- A row's `width` is its number of values per token: the token's own and those of its alternatives.
- All rows of one width share a page table and three pools, so that the index of a token's values is
  looked up once.
- Rows wider than MAX_NARROW are not paged (`wide_logprobs`), as a page would take megabytes.
  `append` skips them; `append_wide` takes their values.
- The values appended last are kept as a message has them until something else is read or many have
  gathered (see `token_log`). Then they are written in one call (`logprob_pages.c`), or by numpy
  where pages or pools have to grow.
- Values for rows that are not open are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_ipc._native import write_logprobs
from slipstream_ipc.arrays import Float32s, Int64s, UInt32s
from slipstream_ipc.columns import check_even, f32, pack_f32, pack_u32, u32
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.history.pages import PagePool, PageTable, spans
from slipstream_ipc.history.wide_logprobs import MAX_NARROW, Candidates, WideLogprobLog, joined
from slipstream_ipc.messages import LogprobColumns
from slipstream_ipc.row_set import NO_ROWS, Rows, RowSet, array_of
from slipstream_ipc.row_table import RowTable, column

_MIN_ROWS = 64
_SPARE_BYTES = 2**22  # kept in the pools of a width when no row has it
MAX_DEFERRED = 16  # tokens of each row

_F32 = np.dtype("<f4")  # of columns
_U32 = np.dtype("<u4")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of S tokens: column 0 is the sampled token, then the most likely ones.

    The arrays are as wide as the widest row; a narrower row takes the first columns.
    """

    values: Float32s  # [S, width], natural logarithm, of the raw logits
    ids: UInt32s  # [S, width]
    ranks: UInt32s  # [S] rank of the sampled token, 1 is the most likely


class _Width:
    """All rows of one width."""

    def __init__(self, width: int) -> None:
        self._table = PageTable()
        self._values = PagePool(np.float32, width)
        self._ids = PagePool(np.uint32, width)
        self._ranks = PagePool(np.uint32)
        self._rows = NO_ROWS  # the rows that were appended to last
        self._is_same_rows = False  # the append before was to the same rows
        self._deferred: list[LogprobColumns] = []  # a token for each of `_rows`, not written yet
        self._num_rows = 0  # open rows

    @property
    def num_pages_used(self) -> int:
        self._write_deferred()
        return self._table.num_pages_used

    @property
    def is_spent(self) -> bool:
        """True if no row is open and the pools hold enough memory to be worth freeing."""
        return not self._num_rows and len(self._values) * self._values.width * 8 > _SPARE_BYTES

    def open(self, row: int) -> None:
        self._table.open(row)  # it was dropped before, so no deferred value belongs to it
        self._num_rows += 1

    def drop(self, row: int) -> None:
        self._write_deferred()
        self._table.drop(row)
        self._num_rows -= 1

    def length(self, row: int) -> int:
        self._write_deferred()
        return self._table.length(row)

    def append(self, rows: RowSet, columns: LogprobColumns) -> None:
        """Append a token to each of `rows`; its columns fit, and are of this width."""
        self._is_same_rows = rows.version == self._rows.version
        if not self._is_same_rows or len(self._deferred) >= MAX_DEFERRED:
            self._write_deferred()
            self._rows = rows
        self._deferred.append(columns)

    def append_spans(
        self, rows: Int64s, counts: Int64s, values: Float32s, ids: UInt32s, ranks: UInt32s
    ) -> None:
        self._write_deferred()
        self._write(self._table.append_spans(rows, counts), values, ids, ranks)

    def flush_deferred(self) -> None:
        """Write what was appended last, unless more for the same rows is to be expected."""
        if not self._is_same_rows or len(self._deferred) >= MAX_DEFERRED:
            self._write_deferred()

    def deferred_of(self, rows: RowSet) -> list[LogprobColumns] | None:
        """See `LogprobLog`."""
        is_same = self._is_same_rows and rows.version == self._rows.version
        return self._deferred if is_same else None

    def last(self, rows: RowSet, position: int) -> LogprobColumns | None:
        """The columns of the last token of each of `rows`, if they were the last to be appended to;
        position: of the first row's.
        """
        deferred = self._deferred
        if not deferred or rows.version != self._rows.version:
            return None
        length = self._table.length(rows.array.item(0)) + len(deferred)
        return deferred[-1] if position == length - 1 else None

    def are_last(self, rows: Rows, positions: Int64s) -> bool:
        """True if these rows were the last to be appended to, and these are their last tokens."""
        if not (isinstance(rows, RowSet) and len(rows)):
            return False
        if self.last(rows, int(positions[0])) is None:
            return False
        return self._table.are_next(rows.array, positions - (len(self._deferred) - 1))

    def find(
        self, rows: Rows, positions: Int64s, counts: Int64s | None
    ) -> tuple[Float32s, UInt32s, UInt32s]:
        """Values [n, width], ids [n, width] and ranks [n] at these positions."""
        self._write_deferred()
        indices = self._table.find(array_of(rows), positions, counts)
        return self._values.read(indices), self._ids.read(indices), self._ranks.read(indices)

    def _write_deferred(self) -> None:
        """Write what was appended last, if it is not written yet."""
        deferred = self._deferred.copy()
        self._deferred.clear()  # the same list as ever, see `deferred_of`
        num, rows = len(deferred), self._rows.array
        if not num or not len(rows):
            return
        if self._write_in_place(deferred):
            return
        if num == 1:
            self._write(self._table.append(rows), *_arrays_of(deferred[0], len(rows)))
            return
        shape = num, len(rows), self._values.width
        values = f32(b"".join([each.values for each in deferred])).reshape(shape).swapaxes(0, 1)
        ids = u32(b"".join([each.ids for each in deferred])).reshape(shape).swapaxes(0, 1)
        ranks = u32(b"".join([each.ranks for each in deferred])).reshape(shape[:2]).T
        indices = self._table.append_spans(rows, np.full(len(rows), num))
        self._write(
            indices,
            values.reshape(len(indices), -1),
            ids.reshape(len(indices), -1),
            ranks.reshape(-1),
        )

    def _write_in_place(self, deferred: list[LogprobColumns]) -> bool:
        """Write the deferred columns; return False, without effect, if the table has to grow
        first.
        """
        table, pools = self._table, (self._values, self._ids, self._ranks)
        for pool in pools:
            pool.reserve(table.num_indices)
        num_free = write_logprobs(
            deferred,
            self._values.width,
            table.num_free,
            self._rows.array,
            table.lengths,
            table.offsets,
            table.tables,
            table.free,
            *[pool.values for pool in pools],
        )
        if num_free >= 0:
            table.num_free = num_free
        return num_free >= 0

    def _write(self, indices: Int64s, values: Float32s, ids: UInt32s, ranks: UInt32s) -> None:
        for pool, found in ((self._values, values), (self._ids, ids), (self._ranks, ranks)):
            pool.reserve(self._table.num_indices)
            pool.write(indices, found)


class _Wide:
    """All rows of one width above MAX_NARROW, with the interface of `_Width`."""

    def __init__(self, rows: WideLogprobLog, width: int) -> None:
        self._rows = rows
        self._width = width

    @property
    def num_pages_used(self) -> int:
        return 0

    @property
    def is_spent(self) -> bool:
        return not self._rows.has_width(self._width)

    def open(self, row: int) -> None:
        self._rows.open(row, self._width)

    def drop(self, row: int) -> None:
        self._rows.drop(row)

    def length(self, row: int) -> int:
        return self._rows.length(row)

    def append(self, rows: RowSet, columns: LogprobColumns) -> None:
        counts = np.ones(len(rows), np.int64)
        self.append_spans(rows.array, counts, *_arrays_of(columns, len(rows)))

    def append_spans(
        self, rows: Int64s, counts: Int64s, values: Float32s, ids: UInt32s, ranks: UInt32s
    ) -> None:
        ends = np.cumsum(counts)
        for row, begin, end in zip(
            rows.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True
        ):
            # copies: a view would keep the whole message in memory, other rows' values included
            piece = Candidates(
                values[begin:end].copy(), ids[begin:end].copy(), ranks[begin:end].copy()
            )
            self._rows.append(row, piece)

    def flush_deferred(self) -> None:
        """Do nothing: nothing is deferred."""

    def deferred_of(self, _rows: RowSet) -> None:
        """Do nothing: nothing is deferred."""

    def last(self, _rows: RowSet, _position: int) -> None:
        """Return None: nothing is deferred."""

    def are_last(self, _rows: Rows, _positions: Int64s) -> bool:
        """Return False: nothing is deferred."""
        return False

    def find(
        self, rows: Rows, positions: Int64s, counts: Int64s | None
    ) -> tuple[Float32s, UInt32s, UInt32s]:
        """Find entries as `_Width.find` does."""
        sizes = [1] * len(rows) if counts is None else counts.tolist()
        found = [
            self._rows.read(row, start, start + size)
            for row, start, size in zip(rows.tolist(), positions.tolist(), sizes, strict=True)
        ]
        whole = joined(found, self._width)
        return whole.values, whole.ids, whole.ranks


class LogprobLog(RowTable):
    """Log-probabilities of every token since a row was opened."""

    _widths: Int64s = column(np.int64)  # 0: not open
    _bases: Int64s = column(np.int64)  # position of the first value in the row's token history

    def __init__(self) -> None:
        super().__init__(_MIN_ROWS)
        self._by_width: dict[int, _Width | _Wide] = {}
        self._wide = WideLogprobLog()
        self._asked: tuple[RowSet, int] | None = None  # the rows asked for last, and their width
        # the rows that `append` was called for again and last, their width, and `deferred_of` them
        self._again: tuple[RowSet, int, list[LogprobColumns]] | None = None

    def open(self, row: int, num_logprobs: int, position: int) -> None:
        """Keep the sampled token's and `num_logprobs` more values for tokens from `position` on."""
        if row >= self.num_rows:
            self.grow(row + 1)
        self.drop(row)
        self._asked = self._again = None
        width = 1 + num_logprobs
        if width not in self._by_width:
            is_narrow = width <= MAX_NARROW
            self._by_width[width] = _Width(width) if is_narrow else _Wide(self._wide, width)
        self._by_width[width].open(row)
        self._widths[row] = width
        self._bases[row] = position

    def drop(self, row: int) -> None:
        """Free what `row` holds, if it is open."""
        if row < len(self._widths) and self._widths[row]:
            self._asked = self._again = None
            width = int(self._widths[row])
            self._by_width[width].drop(row)
            if self._by_width[width].is_spent:
                del self._by_width[width]  # else every width ever used would keep its largest pools
            self._widths[row] = self._bases[row] = 0

    @property
    def num_pages_used(self) -> int:
        """Pages that hold values of a row."""
        return sum(of_width.num_pages_used for of_width in self._by_width.values())

    @property
    def has_wide(self) -> bool:
        """True if any row is wide."""
        return bool(self._wide)

    def widest(self, rows: Int64s) -> int:
        """The width of the widest of `rows`."""
        return int(self._width_of(rows).max(initial=0))

    def is_wide(self, rows: Int64s) -> npt.NDArray[np.bool_]:
        """True for wide rows, which `append` skips, bool [n]."""
        return self._width_of(rows) > MAX_NARROW

    def append_wide(self, row: int, piece: Candidates) -> None:
        """Append tokens of one row, at least as wide as the row; ignored if it is not open."""
        width = self.width(row)
        if width:
            assert width > MAX_NARROW
            self._wide.append(
                row, Candidates(piece.values[:, :width], piece.ids[:, :width], piece.ranks)
            )

    def width(self, row: int) -> int:
        """Values per token of `row`; 0 if it is not open."""
        return int(self._widths[row]) if row < len(self._widths) else 0

    def shared_width(self, rows: Rows) -> int | None:
        """Values per token of all of `rows`, 0 if none is open; None if their widths differ."""
        row_set = rows if isinstance(rows, RowSet) else None
        asked = self._asked
        if asked is not None and row_set is not None and asked[0].version == row_set.version:
            return asked[1]
        if not len(rows):
            return 0
        widths = self._width_of(array_of(rows))
        first = int(widths[0])
        if not (widths == first).all():
            return None
        if row_set is not None:
            self._asked = row_set, first
        return first

    def end(self, row: int) -> int:
        """The position after the last one of an open row."""
        return int(self._bases[row]) + self._by_width[self.width(row)].length(row)

    def append(self, rows: RowSet, logprobs: Logprobs, index: Int64s) -> None:
        """Append a token to each of `rows`, all different, with the values at `index[i]`.

        Wide rows are skipped (`append_wide`). `index` ascends. The arrays must not be written to
        afterwards.
        """
        values, ids, ranks = logprobs.values, logprobs.ids, logprobs.ranks
        again = self._again
        if again is not None and again[0] is rows and len(index) == len(ranks):
            _, num_values, deferred = again
            is_packed = values.dtype is _F32 and ids.dtype is _U32 and ranks.dtype is _U32
            if is_packed and values.shape[1] == num_values and len(deferred) < MAX_DEFERRED:
                deferred.append(
                    LogprobColumns(num_values, values.tobytes(), ids.tobytes(), ranks.tobytes())
                )
                return
        self._again = None
        width = self.shared_width(rows)
        if width is None:
            own = self._width_of(rows.array)
            for each in np.unique(own[(own > 0) & (own <= MAX_NARROW)]).tolist():
                some = np.flatnonzero(own == each)
                at = index[some]
                columns = _columns_of(each, values[at, :each], ids[at, :each], ranks[at])
                self._by_width[each].append(RowSet(rows.array[some]), columns)
        elif 0 < width <= MAX_NARROW:
            if len(index) < len(ranks):
                values, ids, ranks = values.take(index, 0), ids.take(index, 0), ranks.take(index)
            columns = _columns_of(width, values[:, :width], ids[:, :width], ranks)
            of_width = self._by_width[width]
            of_width.append(rows, columns)
            gathering = of_width.deferred_of(rows)
            if gathering is not None:
                self._again = rows, width, gathering

    def append_several(
        self, rows: RowSet, counts: Int64s, logprobs: Logprobs, index: Int64s
    ) -> None:
        """Append as `append` does, with `counts[i]` tokens of each row; `index` [sum(counts)], row
        by row.
        """
        self._again = None
        own = self._width_of(rows.array)
        for each in np.unique(own[(own > 0) & (own <= MAX_NARROW)]).tolist():
            some = own == each
            at = index[np.repeat(some, counts)]
            self._by_width[each].append_spans(
                rows.array[some],
                counts[some],
                logprobs.values[at, :each],
                logprobs.ids[at, :each],
                logprobs.ranks[at],
            )

    def flush_deferred(self) -> None:
        """Write what was appended last, unless more for the same rows is to be expected."""
        for of_width in self._by_width.values():
            of_width.flush_deferred()

    def deferred_of(self, rows: RowSet) -> list[LogprobColumns] | None:
        """A list to which the columns of one more token of each of `rows` may be appended, while it
        has fewer than MAX_DEFERRED; None if others were appended to last, or widths differ. It
        stays the same until a row is opened or dropped.
        """
        width = self.shared_width(rows)
        return self._by_width[width].deferred_of(rows) if width else None

    def append_columns(
        self, row_set: RowSet, counts: Int64s | None, columns: LogprobColumns
    ) -> None:
        """Append what a message carries: `counts[i]` tokens (None: one) for each of these rows.

        Raises: ProtocolError if the columns do not fit each other, or an entry has another width
        than its row.
        """
        self._again = None
        if not columns.widths and self.shared_width(row_set) == columns.width:
            if columns.width:
                self._append_even(row_set, counts, columns)
            return
        rows = row_set.array
        own = self._width_of(rows)
        if not columns.widths:
            widths = np.full(len(rows), columns.width)
        else:
            widths = u32(columns.widths, "logprobs.widths", len(rows)).astype(np.int64)
        if counts is None:
            counts = np.ones(len(rows), np.int64)
        wrong = np.flatnonzero((own != 0) & (own != widths))
        if len(wrong):
            first = int(wrong[0])
            raise ProtocolError(
                f"logprobs: {int(widths[first])} values to a token for row {int(rows[first])}, "
                f"which has {int(own[first])}"
            )
        at = _Entries(widths, counts)
        values = f32(columns.values, "logprobs.values", at.num_values)
        ids = u32(columns.ids, "logprobs.ids", at.num_values)
        ranks = u32(columns.ranks, "logprobs.ranks", at.num_ranks)
        for width in np.unique(own[own > 0]).tolist():
            some = np.flatnonzero(own == width)
            of_values, of_ranks = at.of(some)
            self._by_width[width].append_spans(
                rows[some],
                counts[some],
                values[of_values].reshape(-1, width),
                ids[of_values].reshape(-1, width),
                ranks[of_ranks],
            )

    def read(self, row: int, start: int, stop: int) -> LogprobColumns | None:
        """Positions [start, stop) of `row`, as the columns of one entry; None if it is not open."""
        return self.columns(np.array([row]), np.array([start]), np.array([stop - start]))

    def columns(
        self, row_set: Rows, starts: Int64s, counts: Int64s | None
    ) -> LogprobColumns | None:
        """The columns of `counts[i]` (None: one) tokens from `starts[i]` on of each row.

        None if none of the rows is open. Raises: IndexError for a position that a row does not
        hold.
        """
        width = self.shared_width(row_set)
        if width == 0:
            return None
        rows = array_of(row_set)
        if width is not None:
            positions = starts - self._bases.take(rows)
            of_width = self._by_width[width]
            if counts is None and of_width.are_last(row_set, positions):
                last = of_width.last(row_set, int(positions[0]))  # type: ignore[arg-type]
                assert last is not None
                return last
            return _columns_of(width, *of_width.find(row_set, positions, counts))
        widths = self._width_of(rows)
        if counts is None:
            counts = np.ones(len(rows), np.int64)
        at = _Entries(widths, counts)
        flat_values = np.empty(at.num_values, np.float32)
        flat_ids = np.empty(at.num_values, np.uint32)
        flat_ranks = np.empty(at.num_ranks, np.uint32)
        for width in np.unique(widths[widths > 0]).tolist():
            some = np.flatnonzero(widths == width)
            positions = starts[some] - self._bases[rows[some]]
            values, ids, ranks = self._by_width[width].find(rows[some], positions, counts[some])
            of_values, of_ranks = at.of(some)
            flat_values[of_values] = values.reshape(-1)
            flat_ids[of_values] = ids.reshape(-1)
            flat_ranks[of_ranks] = ranks
        return LogprobColumns(
            0, pack_f32(flat_values), pack_u32(flat_ids), pack_u32(flat_ranks), pack_u32(widths)
        )

    def last(self, rows: RowSet, end: int) -> LogprobColumns | None:
        """The columns of the last token of each of `rows`; None if they were not the last to be
        appended to, or their widths differ. end: the position after the first row's last token.
        """
        width = self.shared_width(rows)
        if not width:
            return None
        base = self._bases.item(rows.array.item(0))
        return self._by_width[width].last(rows, end - base - 1)

    def _append_even(self, rows: RowSet, counts: Int64s | None, columns: LogprobColumns) -> None:
        """Append columns of one width, which is that of all `rows`."""
        num = len(rows) if counts is None else int(counts.sum())
        check_even(columns, num)
        if counts is None:
            self._by_width[columns.width].append(rows, columns)
        else:
            arrays = _arrays_of(columns, num)
            self._by_width[columns.width].append_spans(rows.array, counts, *arrays)

    def _width_of(self, rows: Int64s) -> Int64s:
        if len(rows) and int(rows.max()) >= len(self._widths):
            return np.where(rows < len(self._widths), self._widths.take(rows, mode="clip"), 0)
        return self._widths.take(rows)


def _arrays_of(columns: LogprobColumns, num: int) -> tuple[Float32s, UInt32s, UInt32s]:
    """Values [num, width], ids [num, width] and ranks [num] of even columns that fit."""
    shape = (num, columns.width)
    return f32(columns.values).reshape(shape), u32(columns.ids).reshape(shape), u32(columns.ranks)


def _columns_of(width: int, values: Float32s, ids: UInt32s, ranks: UInt32s) -> LogprobColumns:
    """The even columns of values [n, width], ids [n, width] and ranks [n]."""
    return LogprobColumns(width, pack_f32(values), pack_u32(ids), pack_u32(ranks))


class _Entries:
    """The positions of a ragged message's entries in its columns."""

    def __init__(self, widths: Int64s, counts: Int64s) -> None:
        self._sizes = counts * widths
        self._ranked = np.where(widths, counts, 0)
        self._value_starts = np.cumsum(self._sizes) - self._sizes
        self._rank_starts = np.cumsum(self._ranked) - self._ranked
        self.num_values = int(self._sizes.sum())
        self.num_ranks = int(self._ranked.sum())

    def of(self, some: Int64s) -> tuple[Int64s, Int64s]:
        """The indices of some entries' values (and ids), and of their ranks."""
        return (
            spans(self._value_starts[some], self._sizes[some]),
            spans(self._rank_starts[some], self._ranked[some]),
        )
