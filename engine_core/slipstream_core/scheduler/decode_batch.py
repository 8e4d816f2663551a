"""The same requests again, one token each: a step's columns from those of the step before.

Most steps compute one token of every running request, and between two of them no request comes or
goes. Then nothing is gathered anew: positions and places in the cache go on by one or begin a
block, and all else stays. Which rows decode together, and their block tables, are kept here too.

Rules:
- A copy that a plan has is written again only when that step is answered: what a row's table names
  behind its tokens must not change under a forward pass, which may read there and mask it (see
  `runner/attention/kv_cache`). So there are as many copies as steps in flight, and one; they take
  turns.
- Copies have room for blocks to come, padded with the null block.
- Which blocks rows get is said some steps ahead (`expect`); a plan's table names none of those that
  begin behind it.
- The rows of a batch are one `RowSet` as long as nothing comes or goes (`SlotTable.running`).
- A life that ends, anybody's, ends the streak. Steps are answered in the order of their launch, so
  a row that lived at the answer of one step, with no life ended since, lives at that of the next.
- Its rows are all that hold a slot, in the order of `SlotTable.running`, which is another set as
  soon as somebody comes or goes: that is how its end is told.
- What `RequestTable`, `SlotTable` and the block pool say of its rows is as old as the last
  `settle`, but for the number of free blocks: whoever reads or writes there, removes one of the
  rows, or takes or frees blocks, calls it before; who does the latter ends the batch.
- It looks ahead one step at first, then twice as many each time: most batches end soon, or last.
- Arrays that left as part of a plan are never written again, but for block tables (see
  `decode_batch`); what does not change is shared by all plans of the batch.
- How far a row may be ahead of its worker is looked at when its room of the last look is used up:
  acknowledgements only grow, and of an attach, which moves them back, it is told (`look_again`).
- What it leads to is what `plan_builder.token_columns` makes of the same rows
  (tests/engine_core/scheduler/test_decode_batch.py).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import Acked, RequestTable, SlotTable, positions
from slipstream_core.scheduler.step_builder import TokenColumns
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import NO_ROWS, RowSet

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

    def __init__(self, slots: SlotTable, at: Int64s) -> None:
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


class DecodeStreak:
    """What is known of the rows that were sampled last. Begins with nobody."""

    def __init__(self) -> None:
        self._rows = NO_ROWS
        self._index: Int64s = np.empty(0, np.int64)
        self._num_ended = 0  # lives
        self._num_left = 0  # tokens to the first limit

    def begin(self, rows: RowSet, index: Int64s, num_ended: int, num_left: int) -> None:
        """All of `rows` live, and each may get `num_left` tokens more; `index` counts them."""
        self._rows, self._index = rows, index
        self._num_ended, self._num_left = num_ended, num_left

    def go_on(self, rows: RowSet, num_ended: int) -> Int64s | None:
        """`rows` get a token each. The index of `begin`, where it is said of these rows, all of
        them live still and none reaches its limit by that token; else None, and the end.

        num_ended: the lives that have ended by now, of whatever row.
        """
        is_same = rows.version == self._rows.version and num_ended == self._num_ended
        if is_same and self._num_left > 1:
            self._num_left -= 1
            return self._index
        self._rows = NO_ROWS
        return None


_UNBOUNDED = np.iinfo(np.int64).max
_MOST_AHEAD = 8  # steps
_NOBODY: Int64s = np.empty(0, np.int64)


class DecodeBatch:
    """Rows that have all been planned with one token each, and are again."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        tokens: TokenLog,
        rows: RowSet,
        columns: TokenColumns,
        *,
        step: int,
        generations: Int64s,
        block_size: int,
    ) -> None:
        """`columns` are those of `step`, which computes one token of each of `rows` and samples it.

        They are counted already: `requests` knows of that token.
        """
        self.rows = rows
        at = rows.array
        self.generations = generations
        self.step = step  # the last one that was planned
        self._requests = requests
        self._blocks = blocks
        self._tokens = tokens
        self._columns = columns
        self._block_size = block_size
        self._prompt_lens = requests.prompt_len.take(at)
        run_ahead = requests.run_ahead.take(at)
        self._is_bounded = bool((run_ahead != _UNBOUNDED).any())
        self._run_ahead = run_ahead - 1  # of what is computed: one token more is known
        self._room = 0  # steps that nobody's worker has to acknowledge anything for
        self._zeros = np.zeros(len(rows), np.int64)
        self._nobody = np.full(len(rows), -1)
        # what is looked ahead at: L steps, of which `_at` are planned
        self._first = columns.positions + 1  # of their tokens: as many were computed before them
        self._num_steps = 0  # that were planned before them
        self._at = self._length = 0
        self._settled = 0
        self._num_given = 0  # of the blocks that they begin
        self._next_length = 1
        self._positions = self._kv_slots = self._first[None]  # [L, R]
        self._kv_lens: Int32s = columns.kv_lens[None]  # [L, R]
        self._beginning = _NOBODY  # indices into `rows`, those of the first step first
        self._bounds = [0]  # of each step's part of them, [L + 1]
        self._tables = TableCopies(slots, columns.slots)
        # by when they begin a block, for the first time; sorted once somebody looks ahead
        self._order: Int64s | None = None
        self._phases = np.empty(0, np.int16)  # [R]
        self._ends: list[int] = []  # of each phase in `_order`, from 0 on, [block_size + 1]
        self._furthest = 0  # position of the first token
        limits = np.minimum(requests.limit.take(at), requests.room.take(at))
        limits -= self._first  # one more is known
        self._num_left = int(limits.min()) - 1  # steps to a limit, or to where room is asked for

    def may_run(self, acked: Acked) -> bool:
        """Whether every row may sample one more; see `RequestTable.may_run`."""
        if self._num_left <= 0:
            return False
        if not self._is_bounded or self._room > 0:
            return True
        ahead = np.maximum(positions(acked).take(self.rows.array), self._prompt_lens)
        np.subtract(self._first + self._at, ahead, out=ahead)
        np.subtract(self._run_ahead, ahead, out=ahead)
        self._room = int(ahead.min())
        return self._room > 0

    def look_again(self) -> None:
        """Acknowledgements may have moved back."""
        self._room = 0

    def num_beginning(self) -> int:
        """How many rows begin a block with their next tokens."""
        if self._at == self._length:
            self._look_ahead()
        return self._bounds[self._at + 1] - self._bounds[self._at]

    def next_columns(self, *, oldest_in_flight: int | None, is_last: bool) -> TokenColumns:
        """The columns of the next step. There are blocks for those that begin one.

        `oldest_in_flight` is the oldest step that was not answered yet, None where all were;
        `is_last`: whether the last step is among them.
        """
        last, at = self._columns, self._at
        tables, num_begun = last.block_tables, self._bounds[at + 1]
        if num_begun > self._bounds[at]:
            self._blocks.take_later(num_begun - self._bounds[at])
            tables = self._tables.with_first(
                num_begun, step=self.step + 1, oldest_in_flight=oldest_in_flight
            )
        if is_last:
            token_ids, gather_slots = self._zeros, last.slots
        else:
            token_ids = self._tokens.last(self.rows).astype(np.int64)
            gather_slots = self._nobody
        self._columns = TokenColumns(
            slots=last.slots,
            token_ids=token_ids,
            gather_slots=gather_slots,
            positions=self._positions[at],
            kv_slots=self._kv_slots[at],
            query_lens=last.query_lens,
            kv_lens=self._kv_lens[at],
            prompt_lens=last.prompt_lens,
            block_tables=tables,
            samples=last.samples,
            sampled=last.sampled,
        )
        return self._columns

    def count(self, step: int) -> None:
        """The step of the last columns is planned: its tokens count as computed, and as known."""
        self.step = step
        self._at += 1
        self._num_left -= 1
        self._room -= 1

    def flush_deferred(self) -> None:
        """Write down what the steps that were planned have changed."""
        if self._settled < self._at:
            self._hand_out()
            computed = self._first + self._at
            self._requests.computed[self.rows.array] = computed
            self._requests.known[self.rows.array] = computed + 1
            self._settled = self._at

    def _hand_out(self) -> None:
        """Give rows the blocks that the steps that were planned begin."""
        num = self._bounds[self._at]
        if num > self._num_given:
            begun = self._beginning[self._num_given : num]
            self._blocks.grow(self._columns.slots.take(begun))
            self._num_given = num

    def _look_ahead(self) -> None:
        """Make the columns of the next steps; of one at least, though blocks may be lacking."""
        self._hand_out()
        size, first = self._block_size, self._first + self._at
        self._num_steps += self._at
        if self._order is None:
            self._phases = (-first.astype(np.int32) % size).astype(np.int16)
            self._order = np.argsort(self._phases, kind="stable")
            firsts = np.searchsorted(self._phases.take(self._order), np.arange(size + 1))
            self._ends = firsts.tolist()
            self._furthest = int(first.max())
        phase = self._num_steps % size
        length = min(self._next_length, size - phase, max(self._num_left, 1))
        self._next_length = min(2 * self._next_length, _MOST_AHEAD)
        begin, *ends = self._ends[phase : phase + length + 1]
        blocks = self._blocks.upcoming(ends[-1] - begin)
        while length > 1 and ends[length - 1] - begin > len(blocks):
            length -= 1
        self._bounds = [end - begin for end in (begin, *ends[:length])]
        beginning = self._order[begin : min(ends[length - 1], begin + len(blocks))]
        blocks = blocks[: len(beginning)]
        steps = np.arange(length)[:, None]
        self._positions = first + steps
        self._kv_lens = (first + 1).astype(np.int32) + steps.astype(np.int32)
        goes_on = self._columns.kv_slots + 1
        self._kv_slots = goes_on + steps
        if len(beginning):
            waits = self._phases.take(beginning) - phase
            jumps = np.zeros(len(first), np.int64)
            jumps[beginning] = blocks.astype(np.int64) * size - waits - goes_on.take(beginning)
            has_begun = steps.astype(np.int16) >= self._phases - np.int16(phase)
            self._kv_slots += np.where(has_begun, jumps, 0)
            widest = (self._furthest + self._num_steps + length - 1) // size + 1
            self._tables.expect(beginning, blocks, widest)
        self._first, self._beginning, self._length = first, beginning, length
        self._at = self._num_given = 0
        self._settled = -1
