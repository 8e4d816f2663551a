"""GET /live: how the stack does right now, as numbers for a page that asks twice a second.

Owns: rates and percentiles of the last seconds, and the timeline of the last one, out of the
statistics that the supervisor tells (`slipstream_ipc.telemetry.statistics`). Does not know: HTTP,
the page.

Rules:
- Nothing here tells what anybody asked or was answered, so no key is needed, as for /metrics.
- Everything is worked out when statistics come, twice a second: who asks often gets the same bytes.
- null stands for what nobody has told, or what there was none of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct

from slipstream.http.wire import Response, json_response
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    CoreNumbers,
    Histogram,
    Statistics,
    WorkerNumbers,
)
from slipstream_ipc.telemetry.timeline import SPAN_US, Spans, since

_RATE_S = 2.0  # over which tokens a second and the device's time are counted
_LATENCY_S = 10.0  # … and latencies
_FRESH_US = 2_000_000  # a process that has been silent for longer has no lane
_NO_STORE = ((b"cache-control", b"no-store"),)


class Percentiles(Struct, frozen=True):
    """Of `num` values, in seconds; read from histograms, so about right."""

    num: int
    p50: float | None = None
    p99: float | None = None


class Process(Struct, frozen=True):
    """One place of the stack. state: as /health has it."""

    state: str
    restarts: int = 0


class Timeline(Struct, frozen=True):
    """What was done when, in µs on one clock: the last `span_us`.

    steps: begin and end of the engine's steps, and how many requests each was for. work: begin and
    end of what the workers did with what steps had sampled.
    """

    span_us: int = SPAN_US
    steps: list[tuple[int, int, int]] = []
    work: list[tuple[int, int]] = []


class LiveNumbers(Struct, frozen=True):
    """What /live tells. cache_use, device_busy: shares, 0 to 1. tokens_per_s and device_busy are of
    the last 2 seconds, latencies of the last 10.
    """

    model: str | None = None
    running: int | None = None
    waiting: int | None = None
    cache_use: float | None = None
    tokens_per_s: float | None = None
    device_busy: float | None = None
    ttft_s: Percentiles = Percentiles(0)
    itl_s: Percentiles = Percentiles(0)
    processes: dict[str, Process] = {}
    timeline: Timeline = Timeline()


class Live:
    """The newest statistics, and as many before them as rates need."""

    def __init__(self) -> None:
        self._told: deque[Statistics] = deque()  # oldest first
        self._response: Response | None = None
        self._model: str | None = None

    def take(self, statistics: Statistics) -> None:
        """There are new ones."""
        self._told.append(statistics)
        while self._told[0].at_s < statistics.at_s - _LATENCY_S - 1.0:
            self._told.popleft()
        self._response = None

    def response(self, model: str | None, states: dict[str, str]) -> Response:
        """What is told of them; `states` of processes where there are none yet."""
        if self._response is None or self._model != model or not self._told:
            self._model = model
            self._response = json_response(200, self._numbers(model, states), _NO_STORE)
        return self._response

    def _numbers(self, model: str | None, states: dict[str, str]) -> LiveNumbers:
        if not self._told:
            return LiveNumbers(model, processes={name: Process(it) for name, it in states.items()})
        newest = self._told[-1]
        cores, workers = _cores(newest), _workers(newest)
        earlier = self._before(newest.at_s - _LATENCY_S)
        gauges = [core.gauges for core in cores.values()]
        num_blocks = sum(each.num_blocks for each in gauges)
        num_used = sum(each.num_used_blocks for each in gauges)
        lately = self._before(newest.at_s - _RATE_S)
        return LiveNumbers(
            model,
            running=sum(each.num_running for each in gauges) if cores else None,
            waiting=sum(each.num_waiting for each in gauges) if cores else None,
            cache_use=num_used / num_blocks if num_blocks else None,
            tokens_per_s=_rate(_workers(lately), workers),
            device_busy=_busy_share(_cores(lately), cores),
            ttft_s=_percentiles(
                (_histogram(earlier, name, "ttft_s"), worker.counters.ttft_s)
                for name, worker in workers.items()
            ),
            itl_s=_percentiles(
                (_histogram(earlier, name, "itl_s"), worker.counters.itl_s)
                for name, worker in workers.items()
            ),
            processes={
                name: Process(each.state, each.num_restarts)
                for name, each in newest.processes.items()
                if each.state
            },
            timeline=_timeline(newest.at_s, cores.values(), workers.values()),
        )

    def _before(self, at_s: float) -> Statistics:
        """The newest that are as old as that; the oldest where none are."""
        return next((each for each in reversed(self._told) if each.at_s <= at_s), self._told[0])


def _cores(statistics: Statistics) -> dict[str, CoreNumbers]:
    return {
        name: each.numbers
        for name, each in statistics.processes.items()
        if isinstance(each.numbers, CoreNumbers)
    }


def _workers(statistics: Statistics) -> dict[str, WorkerNumbers]:
    return {
        name: each.numbers
        for name, each in statistics.processes.items()
        if isinstance(each.numbers, WorkerNumbers)
    }


def _rate(before: dict[str, WorkerNumbers], now: dict[str, WorkerNumbers]) -> float | None:
    """Tokens a second, each worker's over the time between its own reports; None without any."""
    rates = [
        (worker.counters.num_delivered_tokens - earlier.counters.num_delivered_tokens)
        / (worker.recent.at_us - earlier.recent.at_us)
        * 1e6
        for name, worker in now.items()
        if (earlier := before.get(name)) is not None
        and worker.recent.at_us > earlier.recent.at_us > 0
    ]
    return sum(rates) if rates else None


def _busy_share(before: dict[str, CoreNumbers], now: dict[str, CoreNumbers]) -> float | None:
    """For how much of the time a step was under way; None where nothing is known."""
    shares = []
    for name, core in now.items():
        earlier = before.get(name)
        if earlier is not None and core.recent.at_us > earlier.recent.at_us > 0:
            passed_s = (core.recent.at_us - earlier.recent.at_us) * 1e-6
            busy_s = core.counters.device_busy_s - earlier.counters.device_busy_s
            shares.append(min(1.0, max(0.0, busy_s / passed_s)))
    return sum(shares) / len(shares) if shares else None


def _histogram(statistics: Statistics, name: str, field: str) -> Histogram:
    worker = _workers(statistics).get(name)
    found: Histogram = getattr(worker.counters, field) if worker is not None else Histogram()
    return found


def _percentiles(pairs: Iterable[tuple[Histogram, Histogram]]) -> Percentiles:
    """Of the values that lie between the two histograms of each pair, all together."""
    counts = [0] * (len(BOUNDS_S) + 1)
    for before, now in pairs:
        for bucket, num in enumerate(now.counts):
            counts[bucket] += num - (before.counts[bucket] if before.counts else 0)
    if sum(counts) <= 0:
        return Percentiles(0)
    return Percentiles(sum(counts), percentile(counts, 0.5), percentile(counts, 0.99))


def percentile(counts: Sequence[int], share: float) -> float:
    """Below which a share of the values lie, in seconds, as if they lay evenly in each bucket of
    BOUNDS_S. Values behind the last bound count as that.
    """
    wanted = share * sum(counts)
    for bucket, num in enumerate(counts[:-1]):
        if num and wanted <= num:
            lower = BOUNDS_S[bucket - 1] if bucket else 0.0
            return lower + (BOUNDS_S[bucket] - lower) * wanted / num
        wanted -= num
    return BOUNDS_S[-1]


def _timeline(
    at_s: float, cores: Iterable[CoreNumbers], workers: Iterable[WorkerNumbers]
) -> Timeline:
    """The last second that everybody has told of who tells anything."""
    oldest_us = at_s * 1e6 - _FRESH_US
    engine = [core.recent for core in cores if core.recent.at_us >= oldest_us]
    text = [worker.recent for worker in workers if worker.recent.at_us >= oldest_us]
    if not engine and not text:
        return Timeline()
    origin_us = min(spans.at_us for spans in (*engine, *text)) - SPAN_US
    return Timeline(
        steps=_lane(engine, origin_us),
        work=[(begin, end) for begin, end, _ in _lane(text, origin_us)],
    )


def _lane(told: Iterable[Spans], origin_us: int) -> list[tuple[int, int, int]]:
    """What lies within the second behind `origin_us`, in order; what ends behind it is cut."""
    spans = sorted(span for each in told for span in since(each, origin_us))
    return [(begin, min(end, SPAN_US), num) for begin, end, num in spans if begin < SPAN_US]
