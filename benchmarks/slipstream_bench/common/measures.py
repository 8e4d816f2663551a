"""Computes latency and throughput figures from the arrival times of answers. All times are seconds.

Terms, as in the field's serving benchmarks:
- TTFT: from sending the request to the first chunk with content.
- TPOT: from there to the end of the answer, divided by the tokens after the first.
- ITL: between two chunks with content of one stream; a chunk may hold several tokens.
- E2E: from sending the request to the end of the answer.

Failed requests are counted by reason and excluded from all other figures.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

Row = dict[str, str | int | float | bool | None]
# How tokens are counted. tokens: each was received. usage: reported by the server. requested: not
# reported, but the answer has the requested length. chunks: one token per chunk, as a last resort
Counting = Literal["tokens", "usage", "requested", "chunks"]

FAILED = "failed_"  # prefix of the columns that count failures


@dataclass(slots=True)
class RequestTimeline:
    """One request: when it was sent and when its chunks arrived (time.perf_counter).

    prompt_len: None if the number of tokens of a text prompt is unknown.
    """

    asked_s: float
    prompt_len: int | None = None
    times_s: list[float] = field(default_factory=list)  # arrivals of chunks with content
    num_tokens: int = 0
    ended_s: float = 0.0
    counting: Counting = "tokens"
    failure: str | None = None

    def note(self, time_s: float, num_tokens: int) -> None:
        """A chunk with this many tokens has arrived."""
        self.times_s.append(time_s)
        self.num_tokens += num_tokens
        self.ended_s = time_s


def summary(timelines: Sequence[RequestTimeline], percentiles: Sequence[float] = (99.0,)) -> Row:
    """A flat row over all requests; None where there is nothing to measure."""
    done = [timeline for timeline in timelines if timeline.failure is None]
    reasons = Counter(timeline.failure for timeline in timelines if timeline.failure is not None)
    begin = min((timeline.asked_s for timeline in timelines), default=0.0)
    duration_s = max((timeline.ended_s for timeline in done), default=begin) - begin
    num_tokens = sum(timeline.num_tokens for timeline in done)
    lengths = [timeline.prompt_len for timeline in done if timeline.prompt_len is not None]
    prompt_tokens = sum(lengths) if len(lengths) == len(done) else None
    streamed = [timeline for timeline in done if timeline.times_s]
    gaps = [np.diff(timeline.times_s) for timeline in streamed]
    series = {
        "ttft": [timeline.times_s[0] - timeline.asked_s for timeline in streamed],
        "tpot": [
            (timeline.ended_s - timeline.times_s[0]) / (timeline.num_tokens - 1)
            for timeline in streamed
            if timeline.num_tokens > 1
        ],
        "itl": np.concatenate(gaps).tolist() if gaps else [],
    }

    def rate(number: float | None, digits: int) -> float | None:
        return round(number / duration_s, digits) if number is not None and duration_s else None

    row: Row = {
        "completed_requests": len(done),
        f"{FAILED}requests": len(timelines) - len(done),
        **{f"{FAILED}{reason}": number for reason, number in sorted(reasons.items())},
        "duration_s": round(duration_s, 6),
        "requests_per_s": rate(len(done), 3),
        "prompt_tokens": prompt_tokens,
        "output_tokens": num_tokens,
        "tokens_counted_by": "+".join(sorted({timeline.counting for timeline in done})) or None,
        "output_tokens_per_s": rate(num_tokens, 2),
        "total_tokens_per_s": rate(
            None if prompt_tokens is None else prompt_tokens + num_tokens, 2
        ),
    }
    for name, seconds in series.items():
        row |= _spread(name, seconds, "ms", percentiles)
    row |= _spread(
        "e2e", [timeline.ended_s - timeline.asked_s for timeline in done], "s", percentiles
    )
    num_chunks = sum(len(timeline.times_s) for timeline in streamed)
    row["chunks_per_token"] = round(num_chunks / num_tokens, 4) if streamed and num_tokens else None
    return row


def median_row(rows: Sequence[Row]) -> Row:
    """One row for several runs of the same measurement: the median of each number.

    Failure counts are summed: a median would hide them. Other values are taken from the first run.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    found: Row = {}
    for name in names:
        values = [value for row in rows if (value := row.get(name)) is not None]
        numbers = [value for value in values if isinstance(value, int | float)]
        if not values or len(numbers) < len(values) or isinstance(values[0], bool):
            found[name] = values[0] if values else None
        elif name.startswith(FAILED):
            found[name] = sum(numbers)
        else:
            median = float(np.median(numbers))
            are_whole = all(isinstance(value, int) for value in numbers)
            found[name] = int(median) if are_whole and median.is_integer() else round(median, 6)
    return found


def percentile_name(percentile: float) -> str:
    """The name of a percentile in rows: p99, p99_9."""
    return f"p{percentile:g}".replace(".", "_")


def _spread(name: str, seconds: Sequence[float], unit: str, percentiles: Sequence[float]) -> Row:
    names = ["mean", "median", *map(percentile_name, percentiles)]
    values: list[float | None] = [None] * len(names)
    if seconds:
        scaled = np.asarray(seconds) * (1e3 if unit == "ms" else 1.0)
        measured = [scaled.mean(), *np.percentile(scaled, (50, *percentiles))]
        values = [round(float(value), 3 if unit == "ms" else 6) for value in measured]
    return {f"{name}_{which}_{unit}": value for which, value in zip(names, values, strict=True)}
