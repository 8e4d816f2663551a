"""Builds histograms.

Adding a value takes a fraction of a microsecond; many equal values cost as much as one.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence

from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    NOTHING,
    NOTHING_BRIEF,
    BriefHistogram,
    Histogram,
)

bounds = array("d", BOUNDS_S)


class HistogramBuilder:
    """A mutable histogram with the buckets of BOUNDS_S. buckets, total: i64 values of each bucket,
    and f64 their sum [1], as buffers.
    """

    __slots__ = ("buckets", "total")

    def __init__(self) -> None:
        self.buckets = array("q", [0]) * (len(BOUNDS_S) + 1)
        self.total = array("d", [0.0])

    def add(self, seconds: float, num: int = 1) -> None:
        """Add a duration, `num` times."""
        self.buckets[bisect_left(BOUNDS_S, seconds)] += num
        self.total[0] += seconds * num

    def histogram(self) -> Histogram:
        """The histogram so far."""
        return Histogram(tuple(self.buckets), self.total[0]) if any(self.buckets) else NOTHING


class BriefHistogramBuilder:
    """A mutable histogram with few buckets."""

    def __init__(self, bounds: Sequence[float] = ()) -> None:
        """bounds: BOUNDS_TOKENS, or none for a single bucket."""
        self._bounds = bounds
        self._buckets = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Add a value."""
        self._buckets[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def histogram(self) -> BriefHistogram:
        """The histogram so far."""
        if not any(self._buckets):
            return NOTHING_BRIEF
        return BriefHistogram(tuple(self._buckets), self._sum)
