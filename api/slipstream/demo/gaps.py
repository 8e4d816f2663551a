"""Measures how long a stream paused after a fault of its server.

A stream counts if it had a delta before the fault and one after it. Its gap is the longest time
between two deltas, from the last delta before the span to the end of the span: a reader may have
unread deltas when a process dies, and the successor may pause later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct


class GapSpan(Struct, frozen=True):
    """The time from one fault to the next one. kind: the fault."""

    kind: str
    begin_s: float
    end_s: float


def longest_gap(times_s: Sequence[float], span: GapSpan) -> float | None:
    """The longest gap in seconds of a stream with deltas at `times_s`; None if it does not count.

    times_s: ascending, on the clock of `span`.
    """
    first = bisect_right(times_s, span.begin_s)
    if first in (0, len(times_s)):
        return None
    last = bisect_right(times_s, span.end_s)
    around = [*times_s[first - 1 : last], *times_s[last : last + 1]]
    if last > first and last < len(times_s):
        around[-1] = min(around[-1], span.end_s)
    return max(b - a for a, b in pairwise(around))
