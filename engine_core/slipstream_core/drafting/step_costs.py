"""The time of a step by its number of decode rows, and how many drafts are worth theirs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream_ipc.arrays import Float64s, Int64s

# What a step that is planned behind the one before, not beside it, costs besides (seconds): the
# core appends, plans and launches while the device waits.
SYNC_S = 0.0003
# A small model's steps on a CPU, where nothing was measured: seconds by rows.
_USUAL = ((1, 0.005), (5, 0.010), (9, 0.0125), (16, 0.0165), (40, 0.0325), (64, 0.053))
LEAST_GAIN = 1.02  # of tokens a second; below it estimates are no better than none


class StepCosts:
    """Seconds of decode steps."""

    def __init__(self, measured: Sequence[tuple[int, float]] = (), share: float = 1.0) -> None:
        """measured: (rows, seconds), by ascending rows; empty: `share` of what small models usually
        take.

        Between them seconds are interpolated, behind the last they go on as between the last two.
        """
        rows, seconds = zip(*(measured or [(num, share * s) for num, s in _USUAL]), strict=True)
        self._rows = np.array(rows, np.float64)
        # a step of fewer rows takes no longer: what says so was disturbed, as by another process
        least = np.minimum.accumulate(np.array(seconds, np.float64)[::-1])
        self._seconds = least[::-1]

    def seconds(self, rows: Float64s | Int64s) -> Float64s:
        """The time of steps of so many rows each."""
        found = np.interp(rows, self._rows, self._seconds)
        if len(self._rows) > 1:
            slope = np.diff(self._seconds[-2:]) / np.diff(self._rows[-2:])
            found = found + np.maximum(rows - self._rows[-1], 0) * slope
        else:
            found = found * np.maximum(rows / self._rows[0], 1)
        return np.asarray(found, np.float64)

    def num_within(self, seconds: float, most: int) -> int:
        """The most rows, at most `most`, that a step computes in these seconds."""
        taken = self.seconds(np.arange(1, most + 1))
        return int(np.searchsorted(taken, seconds, side="right"))

    def num_worthwhile(self, num_rows: int, values: Float64s, num_beside: int = 0) -> int:
        """The number of drafts that gives most tokens a second to a step of `num_rows` rows.

        values: the probability that each draft is kept, descending. num_beside: tokens of prompts
        that the step computes besides, which take as long as rows. 0 where none pay.
        """
        if not len(values):
            return 0
        alone = num_rows / float(self.seconds(np.array([num_rows + num_beside]))[0])
        tokens = num_rows + np.cumsum(values)
        rows = num_rows + num_beside + np.arange(1, 1 + len(values))
        rates = tokens / (self.seconds(rows) + SYNC_S)
        best = int(np.argmax(rates))
        return best + 1 if rates[best] > LEAST_GAIN * alone else 0
