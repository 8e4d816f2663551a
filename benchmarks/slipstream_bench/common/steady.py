"""Throughput, latencies and CPU time of the span in which all places of a load were taken. The
clock is time.perf_counter.

- The span begins when `concurrency` requests have their first chunk, and ends when fewer are left,
  so it excludes the first admissions and the tail.
- A timeline has arrival times of chunks and a total number of tokens: the first chunk counts as one
  token, and the rest are divided evenly among the later chunks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream_bench.common.measures import RequestTimeline
from slipstream_bench.common.process_cpu import process_cpu_s

_SAMPLE_S = 0.05


class CpuSamples:
    """A context manager that samples the CPU time of each of `pids`, by name."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids = dict(pids)
        self._times: list[float] = []
        self._used: dict[str, list[float]] = {name: [] for name in pids}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cpu-samples", daemon=True)

    def __enter__(self) -> CpuSamples:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def between(self, begin_s: float, end_s: float) -> dict[str, float]:
        """Seconds of CPU time that each process used between the two times."""
        return {
            name: float(np.diff(np.interp([begin_s, end_s], self._times, used))[0])
            for name, used in self._used.items()
        }

    def _run(self) -> None:
        is_over = False
        while not is_over:  # one more sample after the end
            is_over = self._is_over.wait(_SAMPLE_S)
            self._times.append(time.perf_counter())
            for name, pid in self._pids.items():
                self._used[name].append(process_cpu_s(pid))


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
    ttfts = [1e3 * (one.times_s[0] - one.asked_s) for one in done if begin_s <= one.asked_s]
    gaps_ms: list[float] = (1e3 * np.concatenate(gaps)).tolist()
    return Steady(begin_s, end_s, num_tokens, num_chunks, ttfts, gaps_ms)
