"""Deals a step's token budget out to requests that compute more than one token, or begin.

- Running requests come before waiting ones; both in order of `RequestTable.in_order`.
- Admission allocates the blocks of all known tokens at once, so a running prefill never preempts.
  Only decoding requests ask for more (`running_set`): as a rule one block at a time, and several
  where a step gave them several tokens.
- A preempted request is admitted again only once none of its tokens is in flight.
- A waiting request that may not run, because it is too far ahead of its worker, is passed over; one
  that finds no free blocks holds up those behind it.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.scheduler.prompt_logprobs import PromptLogprobRows
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import NO_SLOT, Acked, RequestTable, SlotTable
from slipstream_core.scheduler.running_set import RunningSet
from slipstream_ipc.arrays import Int64s
from slipstream_ipc.history.token_log import TokenLog

Chunk = tuple[int, int]  # a row, and how many of its tokens the step computes


class Prefill:
    """Deals out budgets; every chunk that it returns counts as part of the step."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        running_set: RunningSet,
        prompts: PromptLogprobRows,
        tokens: TokenLog,
    ) -> None:
        self._requests = requests
        self._slots = slots
        self._blocks = blocks
        self._running_set = running_set
        self._prompts = prompts
        self._tokens = tokens

    def continue_chunks(self, rows: Int64s, budget: int) -> list[Chunk]:
        """The next chunks of those of `rows` that still run, while the budget lasts."""
        if not len(rows):
            return []
        requests = self._requests
        chunks: list[Chunk] = []
        for row in requests.in_order(rows[requests.slot[rows] != NO_SLOT]).tolist():
            chunk = self.chunk(row, budget)
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk[1]
        return chunks

    def admit(self, acked: Acked, budget: int) -> list[Chunk]:
        """Admit waiting requests while budget, slots and blocks last; returns their chunks."""
        chunks: list[Chunk] = []
        num_passed_over = 0
        while budget > 0 and self._slots.num_free:
            row = self._running_set.waiting.peek(num_passed_over)
            if row is None or self._is_in_flight(row):
                break
            if not self._requests.may_run(np.array([row]), acked)[0]:
                num_passed_over += 1
                continue
            shared = self._blocks.find_room(row)
            if shared is None or not self._prompts.has_room(row):
                break
            self._running_set.start(row, shared)
            chunk = self.chunk(row, budget)
            assert chunk is not None
            chunks.append(chunk)
            budget -= chunk[1]
        return chunks

    def can_admit(self, acked: Acked, reserved: int) -> bool:
        """True if `admit` might admit a request once others have taken `reserved` blocks."""
        row = self._running_set.waiting.peek(0)
        if row is None or not self._slots.num_free or self._is_in_flight(row):
            return False
        if not self._requests.may_run(np.array([row]), acked)[0]:
            return True  # those behind it may
        return self._blocks.find_room(row, reserved=reserved) is not None

    def chunk(self, row: int, budget: int) -> Chunk | None:
        """The chunk of a running row in the step that is being planned; None if it has none."""
        start = int(self._requests.computed[row])
        known = int(self._requests.known[row])
        count = self._prompts.cut(row, start, min(budget, known - start))
        if count <= 0:
            return None
        self._blocks.fill(row, count)
        return row, count

    def _is_in_flight(self, row: int) -> bool:
        """True if a token of a waiting, preempted request is still in flight."""
        return int(self._requests.known[row]) > self._tokens.length(row)
