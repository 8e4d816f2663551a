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

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_core.step.plan import Alternation

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class _Twin:
    """A row's second place. step: the one that has last read from the other place, until it is
    taken back.
    """

    snapshot: int
    holds_state: bool = False  # else the row's slot does
    step: int | None = None


class StateTwins:
    """The second places of running rows."""

    def __init__(self, snapshots: Snapshots, num_slots: int) -> None:
        self._snapshots = snapshots
        self._num_slots = num_slots
        self._of: dict[int, _Twin] = {}  # by row

    def __len__(self) -> int:
        return len(self._of)

    @property
    def snapshots(self) -> list[int]:
        """The snapshots that are second places."""
        return [each.snapshot for each in self._of.values()]

    def place(self, row: int, slot: int) -> int:
        """The place of a row's state: its slot, or the number of slots and its snapshot's."""
        twin = self._of.get(row)
        return self._num_slots + twin.snapshot if twin is not None and twin.holds_state else slot

    def alternate(
        self, step: int, rows: Int64s, slots: Int64s, watched: Bools, *, most: int
    ) -> Alternation | None:
        """Return where the planned `step` of these rows [R] reads and writes the states of those
        that alternate; None if none does. most: second places, at most.
        """
        given = watched.copy()
        if self._of:
            given |= np.isin(rows, np.fromiter(self._of, np.int64, len(self._of)))
        found, reads, writes = [], [], []
        for at in np.flatnonzero(given).tolist():
            row, slot = int(rows[at]), int(slots[at])
            twin = self._of.get(row)
            if twin is None:
                snapshot = self._snapshots.take() if len(self._of) < most else None
                if snapshot is None:
                    continue
                twin = self._of[row] = _Twin(snapshot)
            elif not watched[at] and not twin.holds_state:
                self.release(row)
                continue
            places = slot, self._num_slots + twin.snapshot
            if twin.holds_state:
                places = places[::-1]
            found.append(at)
            reads.append(places[0])
            writes.append(places[1])
            twin.holds_state, twin.step = not twin.holds_state, step
            if not watched[at]:
                self.release(row)  # its state is in its slot behind this step
        if not found:
            return None
        return Alternation(*(np.array(each, np.int64) for each in (found, reads, writes)))

    def take_back(self, row: int, step: int) -> bool:
        """Take back a launched step, the only one of this row that is in flight; False if the
        state in front of it is not there.
        """
        twin = self._of.get(row)
        if twin is None or twin.step != step:
            return False
        twin.holds_state, twin.step = not twin.holds_state, None
        return True

    def release(self, row: int) -> None:
        """The row needs its second place no more, if it has one."""
        twin = self._of.pop(row, None)
        if twin is not None:
            self._snapshots.give_back(twin.snapshot)
