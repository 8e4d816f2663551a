"""The chunks of a step: requests that have more than one token to compute, or begin.

Owns: how a step's budget is dealt out among them. Does not know: who decodes, plans.

Rules:
- Those that run already come before those that wait; both by priority, then by arrival.
- Admission takes the blocks of all known tokens at once: a prefill under way never has to preempt,
  and only decoding requests, one block at a time, ask for more.
- A request that was preempted is admitted again only when none of its tokens is in flight.
- Who may not run, as its worker may be stuck, is passed over; who finds no room is waited for.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.scheduler.prompt_logprobs import PromptLogprobRows
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import NO_SLOT, Acked, RequestTable, SlotTable
from slipstream_core.scheduler.running_set import RunningSet
from slipstream_ipc.history.token_log import TokenLog

Int64s = npt.NDArray[np.int64]

Chunk = tuple[int, int]  # a row, and how many of its tokens the step computes


class Prefill:
    """Deals out budgets; every chunk that it returns counts as part of the step."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        places: RunningSet,
        prompts: PromptLogprobRows,
        tokens: TokenLog,
    ) -> None:
        self._requests = requests
        self._slots = slots
        self._blocks = blocks
        self._running_set = places
        self._prompts = prompts
        self._tokens = tokens

    def go_on(self, rows: Int64s, budget: int) -> list[Chunk]:
        """The next chunk of each of `rows` that still runs, while the budget lasts."""
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
        """Let waiting requests run while budget, slots and blocks last; their first chunks."""
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
            self._running_set.enter(row, shared)
            chunk = self.chunk(row, budget)
            assert chunk is not None
            chunks.append(chunk)
            budget -= chunk[1]
        return chunks

    def can_admit(self, acked: Acked, reserved: int) -> bool:
        """Whether `admit` might let somebody run once others have got `reserved` blocks."""
        row = self._running_set.waiting.peek(0)
        if row is None or not self._slots.num_free or self._is_in_flight(row):
            return False
        if not self._requests.may_run(np.array([row]), acked)[0]:
            return True  # then those behind him may
        return self._blocks.find_room(row, reserved=reserved) is not None

    def chunk(self, row: int, budget: int) -> Chunk | None:
        """What the step that is being planned computes of a running row; None for nothing."""
        start = int(self._requests.computed[row])
        known = int(self._requests.known[row])
        count = self._prompts.cut(row, start, min(budget, known - start))
        if count <= 0:
            return None
        self._blocks.fill(row, count)
        return row, count

    def _is_in_flight(self, row: int) -> bool:
        """Whether a request was preempted while its last token was in flight, which it is yet."""
        return int(self._requests.known[row]) > self._tokens.length(row)
