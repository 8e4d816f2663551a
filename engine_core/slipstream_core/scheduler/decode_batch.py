"""The next step of an unchanged decode batch, derived from the columns of the step before.

Most steps compute one token for each running request, and between two of them no request comes or
goes. Then nothing is gathered anew: positions and cache slots advance by one or begin a block, and
the rest stays. The result equals that of `step_builder.token_columns` for the same rows
(tests/engine_core/scheduler/test_decode_batch.py).

Answers (`SteadyDecode`):

- Any increment of a generation, of any row, ends that. Steps are answered in launch order, so
  a row that was alive when one step was answered, with no increment since, is alive at the next.

The batch (`DecodeBatch`):

- Its rows are all that hold a slot, as the `RowSet` of `SlotTable.running`. A request that comes or
  goes replaces that set, which ends the batch.
- What `RequestTable`, `SlotTable` and the block pool hold of its rows is as old as the last
  `flush_deferred`, except the number of free blocks. Call it before reading or writing there,
  before removing one of the rows, and before taking or freeing blocks; the last two end the batch.
- It looks ahead one step at first, then twice as far each time up to 8: most batches either end
  soon or last.
- Arrays that left as part of a plan are never written again; unchanged arrays are shared by all
  plans of the batch.
- Of the answers whose states are saved in front of these steps, what `AnswerMarks` knows is as old
  as that, too, where all of them have their places when the look-ahead is made.
- How far a row may be ahead of its worker is checked only when the allowance of the last check is
  used up: acknowledgements only grow, except on an attach, which calls `recheck_acks`.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import Acked, RequestTable, SlotTable, positions
from slipstream_core.scheduler.step_builder import TokenColumns
from slipstream_core.step.plan import FrontSaves
from slipstream_ipc._native import RowAppender
from slipstream_ipc.arrays import Int32s, Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import NO_ROWS, RowSet

_UNBOUNDED = np.iinfo(np.int64).max
_MAX_AHEAD = 8  # steps
_NO_ROWS: Int64s = np.empty(0, np.int64)


class SteadyDecode:
    """The rows sampled last, if all of them were alive and below their limits. Empty at first.

    They still are, and none reaches its limit by its next token, while `num_ended` is that of the
    `RequestTable` and `num_left` is above 1; every token counts it down.
    """

    def __init__(self) -> None:
        self.rows = NO_ROWS
        self.index: Int64s = _NO_ROWS
        self.num_ended = 0
        self.num_left = 0
        self.appender: RowAppender | None = None  # of the rows, once they have gone on

    def begin(self, rows: RowSet, index: Int64s, num_ended: int, num_left: int) -> None:
        """`rows` are alive, and each may get `num_left` more tokens; `index`: see Sampled."""
        self.rows, self.index = rows, index
        self.num_ended, self.num_left = num_ended, num_left
        self.appender = None

    def end(self) -> None:
        """Count nothing more; the next `begin` starts anew."""
        self.rows = NO_ROWS
        self.num_left = 0
        self.appender = None


class DecodeBatch:
    """Rows that all decode one token per step."""

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
        """`columns` are those of `step`, which computes and samples one token of each of `rows`;
        they are already counted in `requests`.
        """
        self.rows = rows
        at = rows.array
        self.generations = generations
        self.step = step  # the last step planned
        self._requests = requests
        self._slots = slots
        self._blocks = blocks
        self._tokens = tokens
        self._columns = columns
        self._block_size = block_size
        self._prompt_lens = requests.prompt_len.take(at)
        run_ahead = requests.run_ahead.take(at)
        self._is_bounded = bool((run_ahead != _UNBOUNDED).any())
        self._run_ahead = run_ahead - 1  # relative to computed tokens: one more is known
        self._steps_to_ack_check = 0  # steps until acknowledgements have to be checked
        self._zeros = np.zeros(len(rows), np.int64)
        self._no_gather = np.full(len(rows), -1)
        # the L steps of the look-ahead, of which `_at` are planned
        self._first = columns.positions + 1  # [R] positions of their first tokens
        self._num_steps = 0  # steps planned before them
        self._at = self._length = 0
        self._num_written = 0
        self._num_given = 0  # of the blocks that they begin, those given to slots
        self._next_length = 1
        self._positions = self._kv_slots = self._first[None]  # [L, R]
        self._kv_lens: Int32s = columns.kv_lens[None]  # [L, R]
        # of the states that are saved in front of them, in order: slots, blocks in front, places
        self._mark_slots = self._mark_blocks = self._mark_places = _NO_ROWS
        self._mark_waits: list[int] = []  # the steps, from 0 on
        self._mark_bounds: list[int] = []  # bounds of each step's part, [L + 1]; empty: no marks
        self._has_places = True  # all marks have them
        self._num_marked = 0  # of the marks, those that are written to `AnswerMarks`
        self._beginning = _NO_ROWS  # indices into `rows`, in order of the steps
        self._bounds = [0]  # bounds of each step's part of `_beginning`, [L + 1]
        # by entry of `_beginning`: the new entries of block tables
        self._table_slots = self._table_numbers = _NO_ROWS
        self._table_blocks: Int32s = np.empty(0, np.int32)
        # rows by the step in which they first begin a block; sorted at the first look-ahead
        self._order: Int64s | None = None
        self._phases = np.empty(0, np.int16)  # [R]
        self._ends: list[int] = []  # of each phase in `_order`, from 0 on, [block_size + 1]
        limits = np.minimum(requests.limit.take(at), requests.logprob_limit.take(at))
        limits -= self._first  # known is one more than computed
        self._num_left = int(limits.min()) - 1  # steps until a limit, or until room is asked for

    def may_run(self, acked: Acked) -> bool:
        """True if every row may sample one more token; see `RequestTable.may_run`."""
        if self._num_left <= 0:
            return False
        if not self._is_bounded or self._steps_to_ack_check > 0:
            return True
        ahead = np.maximum(positions(acked).take(self.rows.array), self._prompt_lens)
        np.subtract(self._first + self._at, ahead, out=ahead)
        np.subtract(self._run_ahead, ahead, out=ahead)
        self._steps_to_ack_check = int(ahead.min())
        return self._steps_to_ack_check > 0

    def recheck_acks(self) -> None:
        """Check acknowledgements at the next step; they may have moved back."""
        self._steps_to_ack_check = 0

    def num_beginning(self) -> int:
        """The number of rows that begin a block in the next step."""
        if self._at == self._length:
            self._look_ahead()
        return self._bounds[self._at + 1] - self._bounds[self._at]

    def front_saves(self) -> FrontSaves | None:
        """The states that are saved in front of the next step; None if there are none. Call it
        once, behind num_beginning().
        """
        bounds = self._mark_bounds
        if not bounds or (begin := bounds[self._at]) == (end := bounds[self._at + 1]):
            return None
        slots = self._mark_slots[begin:end]
        if self._has_places:
            return slots, self._mark_places[begin:end]
        return self._blocks.mark_answers(self.step + 1, slots, self._mark_blocks[begin:end])

    def next_columns(self, *, is_last: bool) -> TokenColumns:
        """The columns of the next step; there have to be blocks for num_beginning().

        `is_last`: whether the batch's last step is still in flight.
        """
        last, at = self._columns, self._at
        begun = slice(self._bounds[at], self._bounds[at + 1])
        if begun.stop > begun.start:
            self._blocks.count_upcoming(begun.stop - begun.start)
        if is_last:
            token_ids, gather_slots = self._zeros, last.slots
        else:
            token_ids = self._tokens.last(self.rows).astype(np.int64)
            gather_slots = self._no_gather
        self._columns = TokenColumns(
            token_ids=token_ids,
            gather_slots=gather_slots,
            positions=self._positions[at],
            kv_slots=self._kv_slots[at],
            kv_lens=self._kv_lens[at],
            table_slots=self._table_slots[begun],
            table_numbers=self._table_numbers[begun],
            table_blocks=self._table_blocks[begun],
            by_row=last.by_row,
            sampled=last.sampled,
        )
        return self._columns

    def count(self, step: int) -> None:
        """The step of the latest columns is planned: its tokens count as computed and as known."""
        self.step = step
        self._at += 1
        self._num_left -= 1
        self._steps_to_ack_check -= 1

    def flush_deferred(self) -> None:
        """Write what the planned steps have changed to the request and slot tables."""
        if self._num_written < self._at:
            self._assign_blocks()
            self._save_marks()
            computed = self._first + self._at
            self._requests.computed[self.rows.array] = computed
            self._requests.known[self.rows.array] = computed + 1
            self._num_written = self._at

    def _assign_blocks(self) -> None:
        """Give slots the blocks that the planned steps begin."""
        num = self._bounds[self._at]
        if num > self._num_given:
            begun = self._beginning[self._num_given : num]
            self._blocks.grow(self._columns.slots.take(begun))
            self._num_given = num

    def _save_marks(self) -> None:
        """Note the states that were saved in front of the planned steps."""
        if not self._mark_bounds or not self._has_places:
            return
        new = slice(self._num_marked, self._mark_bounds[self._at])
        if new.stop > new.start:
            first = self.step - self._at + 1
            steps = np.array([first + wait for wait in self._mark_waits[new]], np.int64)
            self._blocks.marks.save(self._mark_slots[new], self._mark_blocks[new], steps)
            self._num_marked = new.stop

    def _look_ahead(self) -> None:
        """Compute the columns of the next steps: one at least, even if it lacks blocks."""
        self._assign_blocks()
        self._save_marks()
        size, first = self._block_size, self._first + self._at
        self._num_steps += self._at
        if self._order is None:
            self._phases = (-first.astype(np.int32) % size).astype(np.int16)
            self._order = np.argsort(self._phases, kind="stable")
            firsts = np.searchsorted(self._phases.take(self._order), np.arange(size + 1))
            self._ends = firsts.tolist()
        phase = self._num_steps % size
        length = min(self._next_length, size - phase, max(self._num_left, 1))
        self._next_length = min(2 * self._next_length, _MAX_AHEAD)
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
            self._table_slots = self._columns.slots.take(beginning)
            self._table_numbers = self._slots.num_blocks.take(self._table_slots)
            self._table_blocks = blocks
        self._mark_bounds = []
        if len(beginning) and self._blocks.has_snapshots:
            self._look_for_marks(waits, length)
        self._first, self._beginning, self._length = first, beginning, length
        self._at = self._num_given = 0
        self._num_written = -1

    def _look_for_marks(self, waits: npt.NDArray[np.int16], length: int) -> None:
        """Find the states to be saved in front of the `length` next steps: of the rows whose
        entries of block tables are new, each after so many steps.
        """
        slots, num_blocks = self._table_slots, self._table_numbers
        found = self._blocks.find_answer_marks(slots, num_blocks)
        if not len(found):
            return
        self._mark_slots = slots.take(found)
        self._mark_blocks = num_blocks.take(found)
        self._mark_waits = after = waits.take(found).tolist()
        self._mark_places = self._blocks.marks.places(self._mark_slots)
        self._has_places = bool((self._mark_places >= 0).all())
        self._mark_bounds = [bisect_left(after, step) for step in range(length + 1)]
        self._num_marked = 0
