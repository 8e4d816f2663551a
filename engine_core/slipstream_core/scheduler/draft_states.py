"""The states behind the drafts of a step, of which a row keeps the one that it has come to.

A state cannot be taken back by a token, so a step that computes drafts leaves a row's state behind
each of its tokens: behind the last one in the row's slot, behind those in front of it in places.
Once the step is answered, the state behind the tokens that count is the row's.

- The row's next step reads it from there and leaves its own in the slot: nothing is copied.
- A step with drafts is planned while nothing is in flight, so all places are free that hold no
  row's state. What they hold stays there until the next plan, in front of which marks that the
  step has passed are saved.
"""

from __future__ import annotations

import numpy as np

from slipstream_ipc.arrays import Bools, Int64s

_NONE = -1


class DraftStates:
    """The places of running rows, by the slots of these. A place is a number as of `Alternation`:
    those here are `first` and the `num` - 1 behind it.
    """

    def __init__(self, first: int, num: int, num_slots: int) -> None:
        self._first, self._num = first, num
        self._held = np.full(num_slots, _NONE, np.int64)  # where the state is, if not in the slot
        # of the last step, if it has drafts: tokens in front, drafts, and the first of the places
        self._starts = np.zeros(num_slots, np.int64)
        self._lens = np.zeros(num_slots, np.int64)
        self._firsts = np.zeros(num_slots, np.int64)
        self._places = np.empty(0, np.int64)

    @property
    def num_free(self) -> int:
        """Drafts that the next step may have."""
        return self._num - int(np.count_nonzero(self._held != _NONE))

    @property
    def is_used(self) -> bool:
        """True if some row's state is in a place, or the last step's are still there."""
        return bool(len(self._places)) or self.num_free < self._num

    def give(self, slots: Int64s, starts: Int64s, lens: Int64s) -> Int64s:
        """Places [sum(lens)] for the planned step of the rows in these slots [n], which have
        computed `starts` [n] tokens and have `lens` [n] drafts.
        """
        is_free = np.ones(self._num, np.bool_)
        is_free[self._held[self._held != _NONE] - self._first] = False
        self.forget_last()
        self._places = self._first + np.flatnonzero(is_free)[: int(lens.sum())]
        assert len(self._places) == lens.sum()
        self._starts[slots], self._lens[slots] = starts, lens
        self._firsts[slots] = np.cumsum(lens) - lens
        return self._places

    def settle(self, slots: Int64s, computed: Int64s) -> None:
        """The last step is answered: of the rows in these slots [n] so many tokens are computed."""
        is_behind = self.hold(slots, computed)
        self._held[slots[is_behind]] = self._place(slots[is_behind], computed[is_behind])

    def hold(self, slots: Int64s, lengths: Int64s) -> Bools:
        """True where the state of a slot [n] behind so many tokens is in a place of the last
        step.
        """
        behind = lengths - self._starts[slots]
        return np.asarray((behind > 0) & (behind <= self._lens[slots]))

    def places(self, slots: Int64s, lengths: Int64s) -> Int64s:
        """The places of the states of these slots [n] behind so many tokens: all that are computed,
        or some of the last step. [n], -1: none.
        """
        found = self._held[slots]
        at = np.flatnonzero(self.hold(slots, lengths))
        found[at] = self._place(slots[at], lengths[at])
        return found

    def _place(self, slots: Int64s, lengths: Int64s) -> Int64s:
        at = self._firsts[slots] + lengths - self._starts[slots] - 1
        return np.asarray(self._places[at])

    def take(self, slots: Int64s) -> Int64s:
        """The places from which the planned step of the rows in these slots [n] reads their states,
        [n]; -1: the one without drafts. It leaves them in their slots.
        """
        held = self._held[slots]
        self._held[slots] = _NONE
        return held

    def forget_last(self) -> None:
        """The next step is planned: the last one's places but those that are held are free."""
        self._places = self._places[:0]
        self._lens[:] = 0

    def release(self, slots: Int64s) -> None:
        """The rows of these slots give them back."""
        self._held[slots] = _NONE
        self._lens[slots] = 0
