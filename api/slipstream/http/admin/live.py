"""GET /live: rates, percentiles and a timeline of the last seconds, for the live page.

They are computed from the statistics (`slipstream_ipc.telemetry.statistics`) that the supervisor
sends twice a second under load, and once at rest.

- Nothing here reveals prompts or outputs, so no key is needed, as for /metrics.
- A response is computed once per report; requests in between get the same bytes.
- null means not reported, or no values in the period.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.http.response_encoding import Response, json_response
from slipstream_ipc.telemetry.spans import SPAN_US, Spans
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    CoreNumbers,
    Histogram,
    Statistics,
    WorkerNumbers,
)
from slipstream_ipc.telemetry.timeline import since

_RATE_S = 2.0  # window of tokens_per_s and device_busy
_LATENCY_S = 10.0  # window of latencies
_FRESH_US = 2_000_000  # a process silent for longer is left out of the timeline
_NO_STORE = ((b"cache-control", b"no-store"),)


class Percentiles(Struct, frozen=True):
    """Percentiles of `num` values, in seconds; interpolated from histograms."""

    num: int
    p50: float | None = None
    p99: float | None = None


class Process(Struct, frozen=True):
    """One process of the stack. state: as in /health. pid: null where there is none."""

    state: str
    restarts: int = 0
    pid: int | None = None


class Timeline(Struct, frozen=True):
    """The events of the last `span_us`, in µs on one clock.

    steps: begin, end and number of requests of each engine step. work: begin and end of the
    workers' processing of sampled tokens.
    """

    span_us: int = SPAN_US
    steps: list[tuple[int, int, int]] = []
    work: list[tuple[int, int]] = []


class Replica(Struct, frozen=True):
    """One replica, as it has told this front. state: as in /health. model: its name, where this
    front serves several.
    """

    state: str
    model: str | None = None
    running: int | None = None
    waiting: int | None = None
    cache_use: float | None = None


class LiveNumbers(Struct, frozen=True):
    """The body of /live. cache_use, device_busy: 0 to 1. tokens_per_s and device_busy are over the
    last 2 seconds, latencies over the last 10. replicas: of a front over several, whose requests
    are the sums of theirs.
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
    replicas: dict[str, Replica] = {}


class LiveStatistics:
    """Recent statistics, and the response computed from them."""

    def __init__(self) -> None:
        self._reports: deque[Statistics] = deque()  # oldest first
        self._response: Response | None = None
        self._about: tuple[str | None, Sequence[ReplicaStatus]] = (None, ())  # model, replicas

    def add(self, statistics: Statistics) -> None:
        """Add a report; drop those older than the windows."""
        self._reports.append(statistics)
        while self._reports[0].at_s < statistics.at_s - _LATENCY_S - 1.0:
            self._reports.popleft()
        self._response = None

    def response(
        self, model: str | None, states: dict[str, str], replicas: Sequence[ReplicaStatus] = ()
    ) -> Response:
        """The response. states: of processes, by name, used until statistics have come."""
        is_same = (model, replicas) == self._about
        if self._response is None or not is_same or not self._reports:
            self._about = (model, replicas)
            numbers = self._numbers(model, states)
            if replicas:
                numbers = _with_replicas(numbers, replicas)
            self._response = json_response(200, numbers, _NO_STORE)
        return self._response

    def _numbers(self, model: str | None, states: dict[str, str]) -> LiveNumbers:
        if not self._reports:
            return LiveNumbers(model, processes={name: Process(it) for name, it in states.items()})
        newest = self._reports[-1]
        cores, workers = _cores(newest), _workers(newest)
        earlier = self._before(newest.at_s - _LATENCY_S)
        gauges = [core.gauges for core in cores.values()]
        num_blocks = sum(each.num_blocks for each in gauges)
        num_used = sum(each.num_used_blocks for each in gauges)
        recent_report = self._before(newest.at_s - _RATE_S)
        return LiveNumbers(
            model,
            running=sum(each.num_running for each in gauges) if cores else None,
            waiting=sum(each.num_waiting for each in gauges) if cores else None,
            cache_use=num_used / num_blocks if num_blocks else None,
            tokens_per_s=_rate(_workers(recent_report), workers),
            device_busy=_busy_share(_cores(recent_report), cores),
            ttft_s=_percentiles(
                (_histogram(earlier, name, "ttft_s"), worker.counters.ttft_s)
                for name, worker in workers.items()
            ),
            itl_s=_percentiles(
                (_histogram(earlier, name, "itl_s"), worker.counters.itl_s)
                for name, worker in workers.items()
            ),
            processes={
                name: Process(each.state, each.num_restarts, each.pid or None)
                for name, each in newest.processes.items()
                if each.state
            },
            timeline=_timeline(newest.at_s, cores.values(), workers.values()),
        )

    def _before(self, at_s: float) -> Statistics:
        """The newest report from `at_s` or before; the oldest if there is none."""
        return next(
            (each for each in reversed(self._reports) if each.at_s <= at_s), self._reports[0]
        )


def _with_replicas(numbers: LiveNumbers, replicas: Sequence[ReplicaStatus]) -> LiveNumbers:
    shown: dict[str, Replica] = {}
    has_several = len({each.model for each in replicas if each.model}) > 1
    for each in replicas:
        model = each.model if has_several else None
        load = None if each.condition in ("away", "refused") else each.load
        shown[each.shown_name] = (
            Replica(each.condition, model)
            if load is None
            else Replica(
                each.condition,
                model,
                load.running,
                load.waiting,
                1.0 - load.free_blocks / load.blocks if load.blocks else None,
            )
        )
    there = [each for each in shown.values() if each.running is not None]
    used = [each.cache_use for each in there if each.cache_use is not None]
    return replace(
        numbers,
        replicas=shown,
        running=sum(each.running or 0 for each in there) if there else None,
        waiting=sum(each.waiting or 0 for each in there) if there else None,
        cache_use=sum(used) / len(used) if used else None,
    )


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
    """Tokens per second, summed over workers; None if no worker has two reports."""
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
    """The share of time with a step running, averaged over cores; None if not known."""
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
    """Percentiles of the values added between the two histograms of each pair, pooled."""
    counts = [0] * (len(BOUNDS_S) + 1)
    for before, now in pairs:
        for bucket, num in enumerate(now.counts):
            counts[bucket] += num - (before.counts[bucket] if before.counts else 0)
    if sum(counts) <= 0:
        return Percentiles(0)
    return Percentiles(sum(counts), percentile(counts, 0.5), percentile(counts, 0.99))


def percentile(counts: Sequence[int], share: float) -> float:
    """The value, in seconds, below which a share of all values lies, by linear interpolation within
    the buckets of BOUNDS_S. Values above the last bound count as the bound.
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
    """The last second that all reporting processes have covered."""
    oldest_us = at_s * 1e6 - _FRESH_US
    engine = [core.recent for core in cores if core.recent.at_us >= oldest_us]
    text = [worker.recent for worker in workers if worker.recent.at_us >= oldest_us]
    if not engine and not text:
        return Timeline()
    origin_us = min(spans.at_us for spans in (*engine, *text)) - SPAN_US
    return Timeline(
        steps=_clipped_spans(engine, origin_us),
        work=[(begin, end) for begin, end, _ in _clipped_spans(text, origin_us)],
    )


def _clipped_spans(reports: Iterable[Spans], origin_us: int) -> list[tuple[int, int, int]]:
    """Spans that begin within `SPAN_US` after `origin_us`, in order; their ends are clipped."""
    spans = sorted(span for each in reports for span in since(each, origin_us))
    return [(begin, min(end, SPAN_US), num) for begin, end, num in spans if begin < SPAN_US]
