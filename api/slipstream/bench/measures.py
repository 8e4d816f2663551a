"""From the times at which tokens came to the numbers that people compare.

Pure: seconds in, rows out. Terms:
- TTFT: from asking to the first token. TPOT: from the first token to the last, by the tokens
  between. ITL: between two deltas of one stream; a delta may hold several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

Row = dict[str, str | int | float | bool | None]


@dataclass(slots=True)
class Timeline:
    """One request: when it was asked for, and when how many tokens came (time.perf_counter)."""

    asked_s: float
    times_s: list[float] = field(default_factory=list)
    num_tokens: list[int] = field(default_factory=list)

    def note(self, time_s: float, num_tokens: int) -> None:
        """Tokens have come."""
        self.times_s.append(time_s)
        self.num_tokens.append(num_tokens)


def summary(timelines: Sequence[Timeline]) -> Row:
    """A flat row over all requests, none of which may be without tokens."""
    begin = min(timeline.asked_s for timeline in timelines)
    duration_s = max(timeline.times_s[-1] for timeline in timelines) - begin
    num_tokens = sum(sum(timeline.num_tokens) for timeline in timelines)
    ttft = [timeline.times_s[0] - timeline.asked_s for timeline in timelines]
    tpot = [
        (timeline.times_s[-1] - timeline.times_s[0]) / (sum(timeline.num_tokens) - first)
        for timeline in timelines
        if sum(timeline.num_tokens) > (first := timeline.num_tokens[0])
    ]
    itl = np.concatenate([np.diff(timeline.times_s) for timeline in timelines])
    return {
        "duration_s": round(duration_s, 4),
        "requests_per_s": round(len(timelines) / duration_s, 3),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / duration_s, 2),
        **_spread("ttft", ttft),
        **_spread("tpot", tpot),
        **_spread("itl", itl.tolist()),
    }


def _spread(name: str, seconds: Sequence[float]) -> Row:
    """Mean, median and 99th percentile in milliseconds; None where there is nothing to measure."""
    if not seconds:
        return {f"{name}_{which}_ms": None for which in ("mean", "median", "p99")}
    values = 1e3 * np.asarray(seconds)
    mean, median, p99 = values.mean(), *np.percentile(values, (50, 99))
    return {
        f"{name}_mean_ms": round(float(mean), 3),
        f"{name}_median_ms": round(float(median), 3),
        f"{name}_p99_ms": round(float(p99), 3),
    }
