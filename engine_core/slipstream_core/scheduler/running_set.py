"""Gives slots and blocks to requests, and takes them away: admission, growth, preemption, removal.

- Where a request finds no free block, the last running one in order (see `waiting_queue`) is
  preempted: it gives up all of its blocks, waits in its old position, and computes its tokens anew
  later. A request is never preempted for one behind it.
- A request without room for its log-probabilities is preempted as well, and waits apart from the
  queue until it is given some, so that it does not hold up the requests behind it.
- Removal frees slot and blocks at once. A step in flight may still use them: the device runs steps
  in order, so the next owner writes later.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.scheduler.logprob_budget import LogprobBudget
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import NO_SLOT, RequestTable, SlotTable
from slipstream_core.scheduler.waiting_queue import WaitingQueue
from slipstream_ipc.arrays import Int32s, Int64s
from slipstream_ipc.row_set import RowSet


class RunningSet:
    """The requests of `requests`, each of which either waits or holds a slot."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        *,
        block_size: int,
        logprob_budget: LogprobBudget,
    ) -> None:
        self._requests = requests
        self._logprob_budget = logprob_budget
        self._slots = slots
        self._blocks = blocks
        self._block_size = block_size
        self.waiting = WaitingQueue(requests)
        self.num_preemptions = 0  # times that a request gave up its blocks
        self._started: list[int] = []  # since the last take_started()

    def runs(self, row: int) -> bool:
        """True if a request has a slot."""
        return int(self._requests.slot[row]) != NO_SLOT

    def start(self, row: int, shared: Int32s) -> None:
        """Give a waiting request a slot and blocks; `shared` is from RequestBlocks.find_room."""
        self.waiting.begin(row)
        self._started.append(row)
        self._blocks.admit(row, shared)

    def take_started(self) -> list[int]:
        """The rows that started since the last call, preempted ones again."""
        started, self._started = self._started, []
        return started

    def start_preempting(self, row: int) -> None:
        """Start as `start` does, preempting other requests while there is no room."""
        candidates = self._requests.in_order(self._slots.running().array).tolist()
        while not self._slots.num_free or (shared := self._blocks.find_room(row)) is None:
            self.preempt(candidates.pop())
        self.start(row, shared)

    def extend_tables(self, decoding: RowSet) -> RowSet:
        """Allocate blocks for one more token per row; returns the rows that still run."""
        requests, slots, rows = self._requests, self._slots, decoding.array
        at = requests.slot[rows]
        full = slots.num_blocks[at] * self._block_size == requests.computed[rows]
        asking = at[full]
        if len(asking) > self._blocks.num_free:
            candidates = requests.in_order(slots.running().array).tolist()
            while len(asking) > self._blocks.num_free:
                self.preempt(candidates.pop())
                asking = at[full & (requests.slot[rows] == at)]
            decoding = RowSet(rows[requests.slot[rows] == at])
        if len(asking):
            self._blocks.grow(asking)
        return decoding

    def extend_to_known(self, rows: Int64s) -> bool:
        """Allocate the blocks that running rows lack for their known tokens, as rows do that got
        several tokens in a step. Returns whether requests were preempted for them.
        """
        requests, slots = self._requests, self._slots

        def lacking() -> Int64s:
            running = rows[requests.slot[rows] != NO_SLOT]
            have = slots.num_blocks[requests.slot[running]]
            wanted = -(-requests.known[running] // self._block_size)
            return np.repeat(running, np.maximum(wanted - have, 0))

        asking, before = lacking(), self.num_preemptions
        if len(asking) > self._blocks.num_free:
            candidates = requests.in_order(slots.running().array).tolist()
            while len(asking) > self._blocks.num_free:
                self.preempt(candidates.pop())
                asking = lacking()
        for row in asking.tolist():
            self._blocks.grow(requests.slot[[row]])
        return self.num_preemptions > before

    def preempt(self, row: int) -> None:
        """Take slot and blocks from a running request, which waits in its old position."""
        self._release(np.array([row]))
        self._requests.computed[row] = 0
        if self._requests.lacks_logprob_budget(np.array([row]))[0]:
            self._logprob_budget.waiting.add(row)
        else:
            self.waiting.add(row)
        self.num_preemptions += 1

    def requeue(self, row: int) -> None:
        """A row that waited for room was given some, and waits for a slot again."""
        self._logprob_budget.waiting.remove(row)
        self.waiting.add(row)

    def remove(self, rows: Int64s) -> None:
        """Remove live requests, all different, running or waiting."""
        runs = self._requests.slot[rows] != NO_SLOT
        if runs.any():
            self._release(rows[runs])
        for row in rows[~runs].tolist():
            if row in self._logprob_budget.waiting:
                self._logprob_budget.waiting.remove(row)
            else:
                self.waiting.remove(row)
        self._blocks.close(rows)
        self._requests.remove(rows)

    def _release(self, rows: Int64s) -> None:
        """Free slots and blocks of running requests."""
        self._blocks.release(rows)
        if self._requests.constraints:
            self._requests.constraints.deactivate(rows.tolist())
