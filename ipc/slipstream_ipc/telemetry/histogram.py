"""Builds histograms of durations.

Adding a value takes a fraction of a microsecond; many equal values cost as much as one.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from slipstream_ipc.telemetry.statistics import BOUNDS_S, NOTHING, Histogram

_NUM_BUCKETS = len(BOUNDS_S) + 1
_bounds = np.array(BOUNDS_S)
_FEW = 8  # values up to which `add_all` adds them one by one


class HistogramBuilder:
    """A mutable histogram with the buckets of BOUNDS_S."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._sum = 0.0

    def add(self, seconds: float, num: int = 1) -> None:
        """Add a duration, `num` times."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += num
        self._sum += seconds * num

    def add_all(self, seconds: npt.NDArray[np.float64]) -> None:
        """Add these durations, [n]."""
        num = len(seconds)
        if not num:
            return
        first = seconds.item(0)
        if num <= _FEW:
            for one in seconds.tolist():
                self.add(one)
        elif (seconds == first).all():
            self.add(first, num)
        else:
            at = np.bincount(_bounds.searchsorted(seconds), minlength=_NUM_BUCKETS)
            for bucket in np.flatnonzero(at).tolist():
                self._counts[bucket] += at.item(bucket)
            self._sum += float(seconds.sum())

    def histogram(self) -> Histogram:
        """The histogram so far."""
        return Histogram(tuple(self._counts), self._sum) if any(self._counts) else NOTHING
