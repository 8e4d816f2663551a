"""The block tables of rows that decode together, step after step, as plans get them.

Owns: copies of their tables, and how far each of them is. From one step to the next one row in
`block_size` begins a block, so a copy is brought up to date by those, where making it anew would
touch all blocks of everybody. Does not know: who runs, which step is next, where blocks come from.

Rules:
- A copy that a plan has is written again only when that step is answered: what a row's table names
  behind its tokens must not change under a forward pass, which may read there and mask it (see
  `runner/kv_cache`). So there are as many copies as steps in flight, and one; they take turns.
- Copies have room for blocks to come, padded with the null block.
- Which blocks rows get is said some steps ahead (`expect`); a plan's table names none of those that
  begin behind it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream_core.columns import SlotColumns

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_SPARE_BLOCKS = 8  # of a row, in a new copy


@dataclass(slots=True, eq=False)
class _Copy:
    table: Int32s  # [rows, width]
    items: Int32s  # the same, flat
    last_step: int = 0  # that has it, as long as it is not the one in use
    num_done: int = 0  # of what is expected
    lacks: list[tuple[Int64s, Int32s]] = field(default_factory=list)  # places in `items`, blocks


class TableCopies:
    """Tables of the rows in `at`, [R] slots; begins with no copy."""

    def __init__(self, slots: SlotColumns, at: Int64s) -> None:
        self._slots = slots
        self._at = at
        self._are_first = bool(np.array_equal(at, np.arange(len(at))))
        self._width = 0
        self._copies: deque[_Copy] = deque()  # the one in use is the last
        self._places: Int64s = np.empty(0, np.int64)  # in a copy, of the blocks that are expected
        self._blocks: Int32s = np.empty(0, np.int32)

    def expect(self, rows: Int64s, blocks: Int32s, widest: int) -> None:
        """Rows will get blocks, in this order: `rows` [n], indices into `at`, all different, get
        `blocks` [n]; none has more than `widest` then. The slots know of all that they have by now.
        """
        if widest > self._width:
            self._width = max(min(widest + _SPARE_BLOCKS, self._slots.tables.shape[1]), widest)
            self._copies.clear()
        numbers = self._slots.num_blocks.take(self._at.take(rows))
        for copy in self._copies:
            if copy.num_done < len(self._blocks):
                copy.lacks.append((self._places[copy.num_done :], self._blocks[copy.num_done :]))
            copy.num_done = 0
        self._places, self._blocks = rows * self._width + numbers, blocks

    def with_first(self, num: int, *, step: int, oldest_in_flight: int | None) -> Int32s:
        """The tables in which the first `num` blocks that are expected are there, [R, at least the
        widest]: those of `step`, and of the steps behind it until more blocks begin.

        `oldest_in_flight` is the oldest step that is not answered, None where all are.
        """
        copies = self._copies
        if copies:
            copies[-1].last_step = step - 1
        if copies and (oldest_in_flight is None or copies[0].last_step < oldest_in_flight):
            copy = copies.popleft()
        else:
            table = self._made()
            copy = _Copy(table, table.reshape(-1))
        copies.append(copy)
        if copy.lacks:
            for places, blocks in copy.lacks:
                copy.items[places] = blocks
            copy.lacks.clear()
        some = slice(copy.num_done, num)
        copy.items[self._places[some]] = self._blocks[some]
        copy.num_done = num
        return copy.table

    def _made(self) -> Int32s:
        tables = self._slots.tables
        if self._are_first:  # low slots are handed out first
            return tables[: len(self._at), : self._width].copy()
        return tables[:, : self._width].take(self._at, 0)
