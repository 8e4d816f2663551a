"""A histogram while it is being filled: a list of counts and a sum.

Owns: into which bucket a value goes. Does not know: what is observed, clocks.

Rules:
- One value costs a fraction of a microsecond; many that are equal cost what one does.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from slipstream_ipc.telemetry.statistics import BOUNDS_S, NOTHING, Histogram

_NUM_BUCKETS = len(BOUNDS_S) + 1
_bounds = np.array(BOUNDS_S)
_FEW = 8  # values that are put in one by one


class HistogramBuilder:
    """How often something took how long, so far."""

    __slots__ = ("_counts", "_sum")

    def __init__(self) -> None:
        self._counts = [0] * _NUM_BUCKETS
        self._sum = 0.0

    def add(self, seconds: float, num: int = 1) -> None:
        """It took so long, `num` times."""
        self._counts[bisect_left(BOUNDS_S, seconds)] += num
        self._sum += seconds * num

    def add_all(self, seconds: npt.NDArray[np.float64]) -> None:
        """It took these times, [n]."""
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
        """As it is now."""
        return Histogram(tuple(self._counts), self._sum) if any(self._counts) else NOTHING
