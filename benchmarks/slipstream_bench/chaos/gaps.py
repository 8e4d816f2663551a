"""The longest gaps of all streams of a run, by the kind of fault. Pure.

Excluded are slow readers, which pause by themselves, and streams that were computed again from
their beginning, which takes time in proportion to their length.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from slipstream.demo.gaps import GapSpan, longest_gap


class GapSummary(Struct, frozen=True):
    """The longest gaps of all streams at all rounds of a kind, in seconds."""

    kind: str
    num_streams: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None


def summarise(kind: str, gaps: Iterable[float]) -> GapSummary:
    """Percentiles; None without gaps."""
    every = list(gaps)
    if not every:
        return GapSummary(kind, 0, None, None, None)
    p50, p99 = (round(float(value), 4) for value in np.percentile(every, (50, 99)))
    return GapSummary(kind, len(every), p50, p99, round(max(every), 4))


def gaps_by_kind(
    streams: Iterable[Sequence[float]], spans: Sequence[GapSpan]
) -> dict[str, list[float]]:
    """All longest gaps, by the kind of round."""
    found: dict[str, list[float]] = {}
    every = list(streams)
    for span in spans:
        gaps = found.setdefault(span.kind, [])
        gaps += [gap for times in every if (gap := longest_gap(times, span)) is not None]
    return found
