"""How long streams paused because of what was done to their server. Pure.

Owns: which streams count, and what of their times. Does not know: who wrote the times down.

Rules:
- A stream counts for a round where it had a delta before it and one after it.
- Its gap is the longest time between two deltas from the one around the round's first blow until
  the next round: a reader may have unread deltas when the blow falls, and a process that took over
  may pause later than the one before it did. What goes on when the next round begins is counted
  here up to then.
- Slow readers do not count: they pause by themselves. Nor do streams that were computed again from
  their beginning: how long that takes is a matter of their length.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from msgspec import Struct


class Span(Struct, frozen=True):
    """A round, until the next one. kind: what was done."""

    kind: str
    begin_s: float
    end_s: float


class GapSummary(Struct, frozen=True):
    """Of the longest gaps of all streams at all rounds of a kind, in seconds."""

    kind: str
    num_streams: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


def longest_gap(times_s: Sequence[float], span: Span) -> float | None:
    """The longest gap of a stream whose deltas came at `times_s`; None where it does not count."""
    first = bisect_right(times_s, span.begin_s)
    if first in (0, len(times_s)):
        return None
    last = bisect_right(times_s, span.end_s)
    around = [*times_s[first - 1 : last], *times_s[last : last + 1]]
    if last > first and last < len(times_s):
        around[-1] = min(around[-1], span.end_s)
    return max(b - a for a, b in pairwise(around))


def summarise(kind: str, gaps: Iterable[float]) -> GapSummary:
    """Percentiles; None where there are none."""
    every = list(gaps)
    if not every:
        return GapSummary(kind, 0, None, None, None)
    p50, p99 = (round(float(value), 4) for value in np.percentile(every, (50, 99)))
    return GapSummary(kind, len(every), p50, p99, round(max(every), 4))


def gaps_by_kind(
    streams: Iterable[Sequence[float]], spans: Sequence[Span]
) -> dict[str, list[float]]:
    """All longest gaps, by the kind of round."""
    found: dict[str, list[float]] = {}
    every = list(streams)
    for span in spans:
        gaps = found.setdefault(span.kind, [])
        gaps += [gap for times in every if (gap := longest_gap(times, span)) is not None]
    return found
