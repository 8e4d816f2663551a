"""Computes latency and throughput figures from the arrival times of answers, in seconds of
time.perf_counter.

Terms, as in the field's serving benchmarks:
- TTFT: from sending the request to the first chunk with content.
- TPOT: from there to the end of the answer, divided by the tokens after the first.
- ITL: between two chunks with content of one stream; a chunk may hold several tokens.
- E2E: from sending the request to the end of the answer.

Failed requests are counted by reason and excluded from all other figures. `steady` cuts out the
span in which all places of a load were taken: it begins when `concurrency` requests have their
first chunk, and ends when fewer are left, so it has neither the first admissions nor the tail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from slipstream.errors import EngineError
from slipstream_ipc.messages import Fault

Row = dict[str, str | int | float | bool | None]
# How tokens are counted. tokens: each was received. usage: reported by the server. requested: not
# reported, but the answer has the requested length. chunks: one token per chunk, as a last resort
Counting = Literal["tokens", "usage", "requested", "chunks"]

FAILED = "failed_"  # prefix of the columns that count failures


def cannot_measure(why: str) -> EngineError:
    """The error of a benchmark whose measurement failed."""
    return EngineError(Fault("engine", why))


@dataclass(slots=True)
class RequestTimeline:
    """One request: when it was sent and when its chunks arrived (time.perf_counter).

    prompt_len: None if the number of tokens of a text prompt is unknown.
    """

    sent_s: float
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
    begin = min((timeline.sent_s for timeline in timelines), default=0.0)
    duration_s = max((timeline.ended_s for timeline in done), default=begin) - begin
    num_tokens = sum(timeline.num_tokens for timeline in done)
    lengths = [timeline.prompt_len for timeline in done if timeline.prompt_len is not None]
    prompt_tokens = sum(lengths) if len(lengths) == len(done) else None
    streamed = [timeline for timeline in done if timeline.times_s]
    gaps = [np.diff(timeline.times_s) for timeline in streamed]
    series = {
        "ttft": [timeline.times_s[0] - timeline.sent_s for timeline in streamed],
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
        "e2e", [timeline.ended_s - timeline.sent_s for timeline in done], "s", percentiles
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


@dataclass(frozen=True, slots=True)
class Steady:
    """The span of a load in which all of its places were taken."""

    begin_s: float
    end_s: float
    num_tokens: float
    num_chunks: int
    ttfts_ms: list[float]  # of requests sent within the span
    gaps_ms: list[float]  # between consecutive chunks of a stream

    @property
    def tokens_per_s(self) -> float:
        """Output throughput."""
        return self.num_tokens / (self.end_s - self.begin_s)


def steady(timelines: Sequence[RequestTimeline], concurrency: int) -> Steady | None:
    """The steady span of `concurrency` simultaneous requests; None if there is none."""
    done = [one for one in timelines if one.failure is None and one.times_s]
    if len(done) < max(concurrency, 1):
        return None
    begin_s = sorted(one.times_s[0] for one in done)[concurrency - 1]
    end_s = sorted(one.ended_s for one in done)[len(done) - concurrency]
    if end_s <= begin_s:
        return None
    num_tokens = 0.0
    num_chunks = 0
    gaps = [np.empty(0)]
    for one in done:
        times = np.array(one.times_s)
        inside = (begin_s < times) & (times <= end_s)
        num_chunks += int(inside.sum())
        gaps.append(np.diff(times)[inside[1:]])
        if len(times) > 1:
            later = inside[1:].sum() * (one.num_tokens - 1) / (len(times) - 1)
            num_tokens += float(inside[0] + later)
    ttfts = [1e3 * (one.times_s[0] - one.sent_s) for one in done if begin_s <= one.sent_s]
    gaps_ms: list[float] = (1e3 * np.concatenate(gaps)).tolist()
    return Steady(begin_s, end_s, num_tokens, num_chunks, ttfts, gaps_ms)
