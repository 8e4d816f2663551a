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
import numpy.typing as npt

from slipstream_core.logprob_budget import LogprobBudget
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import NO_SLOT, RequestTable, SlotTable
from slipstream_core.scheduler.waiting_queue import WaitingQueue
from slipstream_ipc.row_set import RowSet

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


class RunningSet:
    """The requests of `requests`, each of which either waits or holds a slot."""

    def __init__(
        self,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        *,
        block_size: int,
        room: LogprobBudget,
    ) -> None:
        self._requests = requests
        self._room = room
        self._slots = slots
        self._blocks = blocks
        self._block_size = block_size
        self.waiting = WaitingQueue(requests)
        self.num_preemptions = 0  # times that a request gave up its blocks
        self._entered: list[int] = []  # since the last take_entered()

    def runs(self, row: int) -> bool:
        """Whether a request has a slot."""
        return int(self._requests.slot[row]) != NO_SLOT

    def enter(self, row: int, shared: Int32s) -> None:
        """Give a waiting request a slot and blocks; `shared` is from RequestBlocks.find_room."""
        self.waiting.begin(row)
        self._entered.append(row)
        self._blocks.admit(row, shared)

    def take_entered(self) -> list[int]:
        """The rows that entered since the last call, preempted ones again."""
        entered, self._entered = self._entered, []
        return entered

    def enter_by_force(self, row: int) -> None:
        """As `enter`, preempting other requests while there is no room."""
        candidates = self._requests.in_order(self._slots.running().array).tolist()
        while not self._slots.num_free or (shared := self._blocks.find_room(row)) is None:
            self.preempt(candidates.pop())
        self.enter(row, shared)

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

    def preempt(self, row: int) -> None:
        """Take slot and blocks from a running request, which waits in its old position."""
        self._release(np.array([row]))
        self._requests.computed[row] = 0
        if self._requests.lacks_room(np.array([row]))[0]:
            self._room.waiting.add(row)
        else:
            self.waiting.add(row)
        self.num_preemptions += 1

    def has_room(self, row: int) -> None:
        """A row that waited for room was given some, and waits for a slot again."""
        self._room.waiting.remove(row)
        self.waiting.add(row)

    def remove(self, rows: Int64s) -> None:
        """Remove live requests, all different, running or waiting."""
        runs = self._requests.slot[rows] != NO_SLOT
        if runs.any():
            self._release(rows[runs])
        for row in rows[~runs].tolist():
            if row in self._room.waiting:
                self._room.waiting.remove(row)
            else:
                self.waiting.remove(row)
        self._blocks.close(rows)
        self._requests.remove(rows)

    def _release(self, rows: Int64s) -> None:
        """Free slots and blocks of running requests."""
        self._blocks.release(rows)
        if self._requests.rules:
            self._requests.rules.leave(rows.tolist())
