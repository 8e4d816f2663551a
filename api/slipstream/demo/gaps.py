"""How long a stream paused because of what was done to its server. Pure.

A stream counts where it had a delta before that and one after it. Its gap is the longest time
between two deltas, from the one before the span begins until the span ends: a reader may have
unread deltas when a process dies, and the process that takes over may pause later than that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct


class GapSpan(Struct, frozen=True):
    """From something done to a server until the next thing. kind: what was done."""

    kind: str
    begin_s: float
    end_s: float


def longest_gap(times_s: Sequence[float], span: GapSpan) -> float | None:
    """The longest gap of a stream whose deltas came at `times_s`; None where it does not count."""
    first = bisect_right(times_s, span.begin_s)
    if first in (0, len(times_s)):
        return None
    last = bisect_right(times_s, span.end_s)
    around = [*times_s[first - 1 : last], *times_s[last : last + 1]]
    if last > first and last < len(times_s):
        around[-1] = min(around[-1], span.end_s)
    return max(b - a for a, b in pairwise(around))
