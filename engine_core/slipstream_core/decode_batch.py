"""The same requests again, one token each: a step's columns from those of the step before.

Most steps compute one token of every running request, and between two of them nobody comes or
goes. Then no column has to be gathered anew: positions are those of the last step's ends, places in
the cache go on by one, or begin a block.

Owns: the columns of the last such step, as long as the same rows run. Does not know: who is to
run, where blocks come from, sampling parameters.

Rules:
- Its rows are all that hold a slot, in the order of `SlotColumns.running`; that array is another
  one as soon as somebody comes or goes, which is how its end is told.
- Arrays that left as part of a plan are never written again; what does not change is shared by all
  plans of the batch.
- What it leads to is what `plan_builder.token_columns` makes of the same rows
  (tests/engine_core/test_decode_batch.py).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.columns import RequestColumns, SlotColumns
from slipstream_core.plan_builder import TokenColumns
from slipstream_ipc.log import PagedLog

Int64s = npt.NDArray[np.int64]

_UNBOUNDED = np.iinfo(np.int64).max


class DecodeBatch:
    """Rows that have all been planned with one token each, and are again."""

    def __init__(
        self,
        requests: RequestColumns,
        slots: SlotColumns,
        tokens: PagedLog,
        rows: Int64s,
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
        self.generations = generations
        self.step = step  # the last one that was planned
        self._requests = requests
        self._slots = slots
        self._tokens = tokens
        self._columns = columns
        self._block_size = block_size
        num = len(rows)
        self._known = requests.known.take(rows)
        self._prompt_lens = requests.prompt_len.take(rows)
        self._run_ahead = requests.run_ahead.take(rows)
        self._is_bounded = bool((self._run_ahead != _UNBOUNDED).any())
        self._num_left = int((requests.limit.take(rows) - self._known).min())  # steps to a limit
        self._positions = columns.positions + 1  # of the next token
        self._offsets = (self._positions % block_size).astype(np.int16)  # in their blocks
        self._zeros = np.zeros(num, np.int64)
        self._nobody = np.full(num, -1)
        self._slots_in_order = bool(np.array_equal(columns.slots, np.arange(num)))

    def may_run(self, acked: Int64s) -> bool:
        """Whether every row may sample one more; see `Scheduler._may_run`."""
        if self._num_left <= 0:
            return False
        if not self._is_bounded:
            return True
        ahead = np.maximum(acked.take(self.rows), self._prompt_lens)
        np.subtract(self._known, ahead, out=ahead)
        return bool((ahead < self._run_ahead).all())

    def beginning(self) -> Int64s:
        """Which rows' next tokens begin a block, as indices into `rows`."""
        return np.flatnonzero(self._offsets == 0)

    def next_columns(self, beginning: Int64s, *, is_last_in_flight: bool) -> TokenColumns:
        """The columns of the next step; those that begin a block have got one.

        `is_last_in_flight`: whether the last step has not been completed yet.
        """
        last, size = self._columns, self._block_size
        positions = self._positions
        kv_slots = last.kv_slots + 1
        tables = last.block_tables
        if len(beginning):
            at = last.slots[beginning]
            blocks = self._slots.tables[at, positions[beginning] // size]
            kv_slots[beginning] = blocks.astype(np.int64) * size
            widest = max(tables.shape[1], int(positions[beginning].max()) // size + 1)
            if self._slots_in_order:
                tables = self._slots.tables[: len(self.rows), :widest].copy()
            else:
                tables = self._slots.tables[last.slots, :widest]
        if is_last_in_flight:
            token_ids, gather_slots = self._zeros, last.slots
        else:
            token_ids = self._tokens.last(self.rows).astype(np.int64)
            gather_slots = self._nobody
        ends = positions + 1
        self._columns = TokenColumns(
            slots=last.slots,
            token_ids=token_ids,
            gather_slots=gather_slots,
            positions=positions,
            kv_slots=kv_slots,
            query_lens=last.query_lens,
            kv_lens=last.kv_lens + 1,
            prompt_lens=last.prompt_lens,
            block_tables=tables,
            samples=last.samples,
            sampled=last.sampled,
        )
        self._positions = ends
        return self._columns

    def count(self, step: int) -> None:
        """The step of the last columns is planned: its tokens count as computed, and as known."""
        self.step = step
        self._num_left -= 1
        self._known += 1
        self._offsets += 1
        self._offsets[self._offsets == self._block_size] = 0
        self._requests.computed[self.rows] = self._positions
        self._requests.known[self.rows] = self._known
