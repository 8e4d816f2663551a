"""The last mark of each answer that goes on: a copy of its state, which the next turn begins with.

- A row has a place for it, a snapshot, from the first mark that it reaches until it gives its slot
  back, and each mark takes the place of the one before. So a mark costs a step what its copy does:
  the copy gets its name when the row gives its blocks back, as the blocks of an answer do; until
  then others find neither.
- A mark counts from the launch of the step that saves it. If that step fails, the mark is lost
  (`forget_since`), and with it what the place has held before.
- A step of a row that is dropped (`state_twins`) has saved the state in front of it, which counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from slipstream_core.kvcache.snapshots import Snapshots
from slipstream_ipc.arrays import Int64s

_NONE = -1


@dataclass(frozen=True, slots=True)
class AnswerMark:
    """A place, and the state in it."""

    snapshot: int
    num_blocks: int  # in front of the state; 0: there is none
    step: int  # in which it was saved


class AnswerMarks:
    """The marks of running rows, by the slots of these."""

    def __init__(self, snapshots: Snapshots, num_slots: int) -> None:
        self._snapshots = snapshots
        self._num = 0
        self._place = np.full(num_slots, _NONE, np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self._step = np.zeros(num_slots, np.int64)

    def __len__(self) -> int:
        return self._num

    @property
    def by_slot(self) -> dict[int, AnswerMark]:
        """The marks of all slots that have a place; for tests."""
        slots = np.flatnonzero(self._place != _NONE).tolist()
        return {slot: self._mark(slot) for slot in slots}

    def places(self, slots: Int64s) -> Int64s:
        """The snapshots of these slots [n], -1: none yet."""
        return self._place.take(slots)

    def num_blocks(self, slots: Int64s) -> Int64s:
        """The blocks in front of what is saved of these slots [n], [n]."""
        return self._num_blocks.take(slots)

    def give_places(self, slots: Int64s, most: int) -> Int64s:
        """The snapshots as `places`, where those of these slots that have none were given one while
        there are fewer than `most` in all, and room.
        """
        places = self._place.take(slots)
        for slot in slots[places == _NONE][: max(0, most - self._num)].tolist():
            snapshot = self._snapshots.take()
            if snapshot is None:
                break
            self._place[slot] = snapshot
            self._num += 1
        return self._place.take(slots)

    def save(self, slots: Int64s, num_blocks: Int64s, steps: Int64s | int) -> None:
        """These slots [n], which have places, are saved behind so many blocks, in these steps."""
        self._num_blocks[slots] = num_blocks
        self._step[slots] = steps

    def forget_since(self, step: int) -> None:
        """Forget what was saved in `step` and in those behind it, whose results do not count."""
        self._num_blocks[self._step >= step] = 0

    def take(self, slot: int) -> AnswerMark | None:
        """Take the place of a slot, which its row gives back, to be named or given back."""
        if self._place[slot] == _NONE:
            return None
        mark = self._mark(slot)
        self._place[slot], self._num_blocks[slot], self._step[slot] = _NONE, 0, 0
        self._num -= 1
        return mark

    def _mark(self, slot: int) -> AnswerMark:
        place, num_blocks, step = self._place[slot], self._num_blocks[slot], self._step[slot]
        return AnswerMark(int(place), int(num_blocks), int(step))
