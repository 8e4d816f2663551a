"""The same requests again, one token each: a step's columns from those of the step before.

Most steps compute one token of every running request, and between two of them nobody comes or
goes. Then nothing has to be gathered anew, and what the next steps are made of is known: positions
go on by one, places in the cache too, or begin a block, and the blocks are those that the pool
would hand out next. So columns are made for some steps at once.

Owns: those columns, as long as the same rows run, and how far they have been used. Does not know:
who is to run, sampling parameters.

Rules:
- Its rows are all that hold a slot, in the order of `SlotColumns.running`, which is another set as
  soon as somebody comes or goes: that is how its end is told.
- What `RequestColumns`, `SlotColumns` and the block pool say of its rows is as old as the last
  `settle`, but for the number of free blocks: whoever reads or writes there, removes one of the
  rows, or takes or frees blocks, calls it before; who does the latter ends the batch.
- It looks ahead one step at first, then twice as many each time: most batches end soon, or last.
- Arrays that left as part of a plan are never written again, but for block tables (see
  `table_copies`); what does not change is shared by all plans of the batch.
- How far a row may be ahead of its worker is looked at when its room of the last look is used up:
  acknowledgements only grow, and of an attach, which moves them back, it is told (`look_again`).
- What it leads to is what `plan_builder.token_columns` makes of the same rows
  (tests/engine_core/test_decode_batch.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.columns import Acked, RequestColumns, SlotColumns, positions
from slipstream_core.plan_builder import TokenColumns
from slipstream_core.request_blocks import RequestBlocks
from slipstream_core.table_copies import TableCopies
from slipstream_ipc.log import PagedLog
from slipstream_ipc.row_set import RowSet

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

_UNBOUNDED = np.iinfo(np.int64).max
_MOST_AHEAD = 8  # steps
_NOBODY: Int64s = np.empty(0, np.int64)


class DecodeBatch:
    """Rows that have all been planned with one token each, and are again."""

    def __init__(
        self,
        requests: RequestColumns,
        slots: SlotColumns,
        blocks: RequestBlocks,
        tokens: PagedLog,
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
        """Whether every row may sample one more; see `RequestColumns.may_run`."""
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

    def settle(self) -> None:
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
