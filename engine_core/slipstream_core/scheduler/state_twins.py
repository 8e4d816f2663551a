"""Second places for the states of rows whose launched step may be dropped.

A state cannot be taken back by a token. A row whose next token may show that the step in flight
lacked a mask therefore has two places: each of its steps reads the state from one and leaves it in
the other. Where a step is dropped, the row reads from the place that this step has read, which
nothing has written since.

- The second place is a snapshot, taken from those of the prefix cache. Where none is left, a row
  has none, and begins behind its last snapshot.
- A row has it from the first step in which it is watched until it is no longer, and its state is
  back in its slot; or until it gives its slot back.
- Steps run in order, so a place that has been given away may be written once more by the step in
  flight: its next owner's step comes later.
"""

from __future__ import annotations

import numpy as np

from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.step.plan import Alternation
from slipstream_ipc.arrays import Bools, Int64s

_NONE = -1


class StateTwins:
    """The second places of running rows, by the slots of these."""

    def __init__(self, snapshots: Snapshots, num_slots: int) -> None:
        self._snapshots = snapshots
        self._num = 0
        self._place = np.full(num_slots, _NONE, np.int64)
        self._holds_state = np.zeros(num_slots, np.bool_)  # else the slot itself does
        # the last step that read from one place and wrote to the other, unless it was taken back
        self._step = np.full(num_slots, _NONE, np.int64)

    def __len__(self) -> int:
        return self._num

    @property
    def snapshots(self) -> list[int]:
        """The snapshots that are second places."""
        places: list[int] = self._place[self._place != _NONE].tolist()
        return [place - len(self._place) for place in places]

    def place(self, slot: int) -> int:
        """The place of a slot's state: the slot, or the number of slots and its snapshot's."""
        return int(self._place[slot]) if self._holds_state[slot] else slot

    def alternate(
        self, step: int, slots: Int64s, watched: Bools, *, most: int
    ) -> Alternation | None:
        """Return where the planned `step` of the rows in these slots [R] reads and writes the
        states of those that alternate; None if none does. most: second places, at most.
        """
        if self._num < most:
            self._give_places(slots[watched & (self._place[slots] == _NONE)], most)
        has_place, holds_state = self._place[slots] != _NONE, self._holds_state[slots]
        ends = has_place & ~watched
        alternates = np.flatnonzero(has_place & (watched | holds_state))
        found = None
        if len(alternates):
            own = slots[alternates]
            there, is_there = self._place[own], self._holds_state[own]
            reads, writes = np.where(is_there, (there, own), (own, there)).astype(np.int64)
            found = Alternation(alternates, reads, writes)
            self._holds_state[own] = ~is_there
            self._step[own] = step
        for slot in slots[ends].tolist() if ends.any() else ():
            self.release(slot)  # its state is in its slot, at least behind this step
        return found

    def _give_places(self, slots: Int64s, most: int) -> None:
        for slot in slots[: most - self._num].tolist():
            snapshot = self._snapshots.take()
            if snapshot is None:
                return
            self._place[slot] = len(self._place) + snapshot
            self._num += 1

    def take_back(self, slot: int, step: int) -> bool:
        """Take back a launched step, the only one of this slot's row that is in flight; False if
        the state in front of it is not there.
        """
        if self._place[slot] == _NONE or self._step[slot] != step:
            return False
        self._holds_state[slot] = not self._holds_state[slot]
        self._step[slot] = _NONE
        return True

    def release(self, slot: int) -> None:
        """The slot's row needs its second place no more, if it has one."""
        if self._place[slot] != _NONE:
            self._snapshots.give_back(int(self._place[slot]) - len(self._place))
            self._place[slot] = self._step[slot] = _NONE
            self._holds_state[slot] = False
            self._num -= 1
