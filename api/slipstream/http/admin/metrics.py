"""GET /metrics: the latest statistics of all processes, in Prometheus' formats.

The numbers are those of `slipstream_ipc.telemetry.statistics`; every front serves all of them.

- Names are vLLM's where vLLM has the metric. With `--metrics-prefix vllm` its dashboards show
  them.
- The rendered text is cached until newer statistics come, so scrapers cannot load the front. There
  are two formats, so at most two cached texts.
- Ratios are exported as two counters: the share over any period is a division of two rates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from types import UnionType
from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from slipstream.client.placing.replica_status import ReplicaStatus
from slipstream.http.response_encoding import Response
from slipstream_ipc.messages import Load
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_ANSWERS,
    BOUNDS_S,
    BOUNDS_TOKENS,
    BriefHistogram,
    CoreGauges,
    CoreNumbers,
    FrontNumbers,
    Histogram,
    ProcessStatistics,
    Statistics,
    WorkerNumbers,
)

PREFIX = "slipstream:"

_PLAIN = b"text/plain; version=0.0.4; charset=utf-8"
_OPEN = b"application/openmetrics-text; version=1.0.0; charset=utf-8"
_TYPES = {False: _PLAIN, True: _OPEN}
_BUCKET_BOUNDS = (*map(str, BOUNDS_S), "+Inf")
_TOKEN_BOUNDS = (*[str(float(bound)) for bound in BOUNDS_TOKENS], "+Inf")
_ANSWER_BOUNDS = (*[str(float(bound)) for bound in BOUNDS_ANSWERS], "+Inf")
_ONE_BUCKET = ("+Inf",)
_BOUNDS_OF = {
    **dict.fromkeys(("prefill_s", "inference_s", "decode_s", "max_tokens"), _ONE_BUCKET),
    **dict.fromkeys(("prompt_tokens", "generation_tokens"), _TOKEN_BOUNDS),
    "num_answers": _ANSWER_BOUNDS,
}


class _Family(Struct, frozen=True):
    """One metric. value: computed from a process's numbers of type `of`, or from its
    `ProcessStatistics` if `of` is None. labels: in addition to model and process; `value` then
    returns a dict keyed by them, with `names_model` by a model's name before them, or "" for that
    of the process. bounds: of a histogram's buckets.
    """

    kind: Callable[..., Metric]
    name: str
    help: str
    of: type | UnionType | None
    value: Callable[[Any], Any]
    labels: tuple[str, ...] = ()
    names_model: bool = False
    bounds: tuple[str, ...] = _BUCKET_BOUNDS


_Gauge, _Counter, _Histogram = GaugeMetricFamily, CounterMetricFamily, HistogramMetricFamily


def _cache_use(core: CoreNumbers) -> float:
    return core.gauges.num_used_blocks / max(1, core.gauges.num_blocks)


def _tokens_of_steps(core: CoreNumbers) -> BriefHistogram:
    counters = core.counters
    return BriefHistogram((counters.num_steps,), float(counters.num_computed_tokens))


def _by_path(front: FrontNumbers) -> dict[tuple[str, ...], int]:
    """Answers by path and status; they are counted under "STATUS PATH"."""
    pairs = ((kind.partition(" "), num) for kind, num in front.counters.answers.items())
    return {(path, status): num for (status, _, path), num in pairs}


def _by_label(tally: dict[str, int]) -> dict[tuple[str, ...], int]:
    return {(name,): num for name, num in tally.items()}


def _of_loras(gauges: CoreGauges) -> dict[tuple[str, ...], float]:
    if not gauges.max_loras:
        return {}
    names = ",".join(sorted(gauges.running_loras)), ",".join(sorted(gauges.waiting_loras))
    return {(str(gauges.max_loras), *names): 1.0}


def _by_model(tally: dict[str, int]) -> dict[tuple[str, ...], int]:
    """Streams by model and cause; they are counted under "WHY MODEL"."""
    kinds = ((kind.partition(" "), num) for kind, num in tally.items())
    return {(model, why): num for (why, _, model), num in kinds}


def _core_metrics() -> Iterator[_Family]:
    def gauge(name: str, help_: str, value: Callable[[CoreNumbers], float]) -> _Family:
        return _Family(_Gauge, name, help_, CoreNumbers, value)

    def counter(name: str, help_: str, field: str) -> _Family:
        return _Family(_Counter, name, help_, CoreNumbers, lambda n: getattr(n.counters, field))

    yield gauge(
        "num_requests_running", "Requests that are running.", lambda n: n.gauges.num_running
    )
    yield gauge(
        "num_requests_waiting",
        "Requests that wait to be scheduled, preempted ones included.",
        lambda n: n.gauges.num_waiting,
    )
    yield gauge("kv_cache_usage_perc", "Share of the KV cache blocks in use, 0 to 1.", _cache_use)
    yield gauge("num_kv_cache_blocks", "Blocks of the KV cache.", lambda n: n.gauges.num_blocks)
    yield counter("num_preemptions", "Preemptions of requests.", "num_preemptions")
    yield counter(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "num_prefix_queries"
    )
    yield counter(
        "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "num_prefix_hits"
    )
    yield gauge(
        "num_state_snapshots",
        "Snapshots of recurrent states that the prefix cache has room for.",
        lambda n: n.gauges.num_state_snapshots,
    )
    yield gauge(
        "state_snapshot_usage_perc",
        "Share of the snapshots of recurrent states in use, 0 to 1.",
        lambda n: n.gauges.num_used_state_snapshots / max(1, n.gauges.num_state_snapshots),
    )
    yield counter(
        "state_snapshots_loaded",
        "Prefills that began with a snapshot of recurrent states.",
        "num_state_snapshots_loaded",
    )
    yield counter(
        "state_snapshots_evicted",
        "Snapshots of recurrent states that newer ones replaced.",
        "num_state_snapshots_evicted",
    )
    yield counter("spec_decode_num_drafts", "Rows of steps that had drafts.", "num_drafts")
    yield counter("spec_decode_num_draft_tokens", "Tokens drafted.", "num_draft_tokens")
    yield _Family(
        _Counter,
        "spec_decode_num_accepted_tokens",
        "Drafts that were right.",
        CoreNumbers,
        lambda n: sum(n.counters.num_accepted_tokens_per_pos),
    )
    yield _Family(
        _Counter,
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafts that were right, by their place among a row's, from 0 on.",
        CoreNumbers,
        lambda n: {
            (str(at),): num for at, num in enumerate(n.counters.num_accepted_tokens_per_pos)
        },
        ("position",),
    )
    yield counter("draft_seconds", "Time with a step of the draft model in flight.", "draft_s")
    yield counter("generation_tokens", "Tokens sampled for outputs.", "num_sampled_tokens")
    yield counter(
        "computed_tokens",
        "Tokens computed by the model; after a preemption they are computed again.",
        "num_computed_tokens",
    )
    yield counter("engine_steps", "Engine steps.", "num_steps")
    yield counter("device_busy_seconds", "Time in which a step was running.", "device_busy_s")
    yield counter(
        "device_idle_seconds",
        "Time with requests but no running step. Idle share: idle / (busy + idle).",
        "device_idle_s",
    )
    yield _histogram("step_time_seconds", "Duration of an engine step.", CoreNumbers, "step_s")
    yield _histogram(
        "request_queue_time_seconds",
        "Time from a request's admission to its first step.",
        CoreNumbers,
        "queue_s",
    )
    yield _histogram(
        "request_prefill_time_seconds",
        "Time from a request's first step to its first token.",
        CoreNumbers,
        "prefill_s",
    )
    yield _histogram(
        "request_inference_time_seconds",
        "Time from a request's first step to its end.",
        CoreNumbers,
        "inference_s",
    )
    yield _Family(
        _Histogram,
        "iteration_tokens_total",
        "Tokens computed in an engine step.",
        CoreNumbers,
        _tokens_of_steps,
        bounds=_ONE_BUCKET,
    )
    yield _Family(
        _Gauge,
        "cache_config_info",
        "1, with the KV cache's sizes as labels.",
        CoreNumbers,
        lambda n: {(str(n.gauges.block_size), str(n.gauges.num_blocks)): 1.0},
        ("block_size", "num_gpu_blocks"),
    )
    yield _Family(
        _Gauge,
        "lora_requests_info",
        "1, with the names of the adapters that running and waiting requests have (those with the "
        "most), and how many adapters there is room for.",
        CoreNumbers,
        lambda n: _of_loras(n.gauges),
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    yield _Family(
        _Gauge,
        "engine_info",
        "1, with name and version of an engine that is not Slipstream's.",
        CoreNumbers,
        lambda n: {(n.gauges.engine,): 1.0} if n.gauges.engine else {},
        ("engine",),
    )


def _worker_metrics() -> Iterator[_Family]:
    def counter(name: str, help_: str, field: str) -> _Family:
        return _Family(_Counter, name, help_, WorkerNumbers, lambda n: getattr(n.counters, field))

    yield _Family(
        _Gauge,
        "num_streams_kept",
        "Ended streams that are kept for readers that resume.",
        WorkerNumbers,
        lambda n: n.gauges.num_kept_streams,
    )
    yield _Family(
        _Gauge,
        "num_answers_kept",
        "Answers that are kept for later requests.",
        WorkerNumbers,
        lambda n: n.gauges.num_kept_answers,
    )
    yield _Family(
        _Gauge,
        "answers_kept_bytes",
        "Memory of the answers that are kept for later requests.",
        WorkerNumbers,
        lambda n: n.gauges.kept_answer_bytes,
    )
    yield _Family(
        _Gauge,
        "num_clients",
        "Attached clients, HTTP fronts included.",
        WorkerNumbers,
        lambda n: n.gauges.num_clients,
    )
    yield counter("requests_accepted", "Requests accepted by the engine.", "num_accepted")
    yield counter("prompt_tokens", "Prompt tokens of accepted requests.", "num_prompt_tokens")
    yield _Family(
        _Counter,
        "request_success",
        "Ended streams by finish reason.",
        WorkerNumbers,
        lambda n: _by_label(n.counters.finished),
        ("finished_reason",),
    )
    yield _Family(
        _Counter,
        "requests_rejected",
        "Rejected requests by error code.",
        WorkerNumbers,
        lambda n: _by_label(n.counters.rejected),
        ("code",),
    )
    yield counter("client_messages", "Messages with deltas sent to clients.", "num_messages")
    yield counter(
        "deltas",
        "Deltas sent to clients. Coalescing factor: delivered_tokens / deltas.",
        "num_deltas",
    )
    yield counter("delivered_tokens", "Tokens in deltas sent to clients.", "num_delivered_tokens")
    yield _Family(
        _Gauge,
        "trace_spans_pending",
        "Spans of requests that are made and not exported yet.",
        WorkerNumbers,
        lambda n: n.gauges.num_pending_spans,
    )
    yield counter(
        "trace_spans_exported",
        "Spans of requests that an OpenTelemetry collector has taken.",
        "num_exported_spans",
    )
    yield counter(
        "trace_spans_lost",
        "Spans that were not exported: the queue was full, the collector failed, or the process "
        "died.",
        "num_lost_spans",
    )
    for name, help_, field in (
        ("time_to_first_token", "Time from a request's arrival to its first delta.", "ttft_s"),
        ("inter_token_latency", "Time between two deltas of a stream.", "itl_s"),
        (
            "request_time_per_output_token",
            "Mean time per token of a stream, after its first delta.",
            "tpot_s",
        ),
        ("e2e_request_latency", "Time from a request's arrival until its end is sent.", "e2e_s"),
        ("request_decode_time", "Time from a stream's first delta to its end.", "decode_s"),
    ):
        yield _histogram(f"{name}_seconds", help_, WorkerNumbers, field)
    for name, help_, field in (
        ("request_prompt_tokens", "Prompt tokens of an ended stream.", "prompt_tokens"),
        ("request_generation_tokens", "Tokens of an ended stream.", "generation_tokens"),
        (
            "request_max_num_generation_tokens",
            "The same; vLLM has the longest of a request's answers here.",
            "generation_tokens",
        ),
        (
            "request_params_max_tokens",
            "Tokens that an ended stream was allowed to have.",
            "max_tokens",
        ),
        ("request_params_n", "Answers that a request asks for.", "num_answers"),
    ):
        yield _histogram(name, help_, WorkerNumbers, field)


def _front_metrics() -> Iterator[_Family]:
    yield _Family(
        _Counter,
        "http_requests",
        "HTTP responses by path and status; 499: the client disconnected before.",
        FrontNumbers,
        _by_path,
        ("path", "status"),
    )
    yield _Family(
        _Counter,
        "http_stream_chunks",
        "Chunks of streamed HTTP responses.",
        FrontNumbers,
        lambda n: n.counters.num_chunks,
    )
    yield _Family(
        _Gauge,
        "http_open_streams",
        "HTTP responses being streamed.",
        FrontNumbers,
        lambda n: n.gauges.num_open_streams,
    )
    yield _Family(
        _Gauge,
        "http_connections",
        "Open HTTP connections.",
        FrontNumbers,
        lambda n: n.gauges.num_connections,
    )


def _router_metrics() -> Iterator[_Family]:
    yield _Family(
        _Counter,
        "router_requests",
        "Streams placed at a replica, by why it was chosen: home, second, load, last, waited.",
        FrontNumbers,
        lambda n: _by_model(n.counters.placed),
        ("why",),
        names_model=True,
    )
    yield _Family(
        _Counter,
        "router_moves",
        "Streams that went on at another replica, by what became of the one before.",
        FrontNumbers,
        lambda n: _by_model(n.counters.moved),
        ("why",),
        names_model=True,
    )
    yield _Family(
        _Counter,
        "router_choose_seconds",
        "Time spent on choosing replicas.",
        FrontNumbers,
        lambda n: {(): n.counters.choose_s} if n.counters.placed else {},
    )


_REPLICA_STATE = "replica_state"
_REPLICA_INSPECTED = "replica_inspected"


def _cache_share(load: Load) -> float:
    return 1.0 - load.free_blocks / max(1, load.blocks)


_REPLICA_GAUGES: tuple[tuple[str, str, Callable[[Load], float]], ...] = (
    ("replica_requests_running", "Requests that run at the replica.", lambda it: it.running),
    ("replica_requests_waiting", "Requests that wait at the replica.", lambda it: it.waiting),
    (
        "replica_queued_tokens",
        "Prompt tokens that the replica has not computed yet.",
        lambda it: it.queued_tokens,
    ),
    ("replica_kv_cache_usage_perc", "Share of its KV cache in use, 0 to 1.", _cache_share),
)


def _replica_metrics(
    prefix: str, model_name: str, replicas: Sequence[ReplicaStatus]
) -> Iterator[Metric]:
    """The metrics that each replica has reported to this front."""
    state = GaugeMetricFamily(
        f"{prefix}{_REPLICA_STATE}",
        "1 for the state that the replica is in.",
        labels=("model_name", "replica", "state"),
    )
    for replica in replicas:
        state.add_metric([replica.model or model_name, replica.shown_name, replica.condition], 1)
    yield state
    for name, help_, value in _REPLICA_GAUGES:
        gauge = GaugeMetricFamily(f"{prefix}{name}", help_, labels=("model_name", "replica"))
        for replica in replicas:
            if replica.load is not None and replica.condition not in ("away", "refused"):
                labels = [replica.model or model_name, replica.shown_name]
                gauge.add_metric(labels, value(replica.load))
        yield gauge


def _process_metrics() -> Iterator[_Family]:
    yield _Family(
        _Counter,
        "overrun_tokens",
        "Tokens sampled after their request had ended.",
        CoreNumbers | WorkerNumbers,
        lambda n: n.counters.num_overrun_tokens,
    )
    yield _Family(
        _Gauge,
        "process_up",
        "Whether the process is ready and sends heartbeats.",
        None,
        lambda p: float(p.state == "ready"),
    )
    yield _Family(
        _Counter,
        "process_restarts",
        "Restarts of the process.",
        None,
        lambda p: p.num_restarts,
    )
    yield _Family(
        _Counter,
        "process_cpu_seconds",
        "CPU time of the process, of its children and of those it replaced.",
        None,
        lambda p: p.cpu_s,
    )
    yield _Family(
        _Gauge,
        "process_resident_memory_bytes",
        "Resident memory of the process.",
        None,
        lambda p: p.rss_bytes,
    )


def _histogram(name: str, help_: str, of: type, field: str) -> _Family:
    bounds = _BOUNDS_OF.get(field, _BUCKET_BOUNDS)
    value: Callable[[Any], Any] = lambda n: getattr(n.counters, field)  # noqa: E731
    return _Family(_Histogram, name, help_, of, value, bounds=bounds)


_FAMILIES = (
    *_core_metrics(),
    *_worker_metrics(),
    *_front_metrics(),
    *_router_metrics(),
    *_process_metrics(),
)


METRIC_NAMES = (
    *[family.name for family in _FAMILIES],
    _REPLICA_STATE,
    _REPLICA_INSPECTED,
    *[name for name, _, _ in _REPLICA_GAUGES],
)


class Metrics:
    """Renders and caches the metrics. prefix: of their names, with the colon."""

    def __init__(self, prefix: str = PREFIX) -> None:
        self._prefix = prefix
        self._rendered: dict[bytes, bytes] = {}  # of `statistics`, by content type
        self.statistics = Statistics()
        self.about: tuple[str, Sequence[ReplicaStatus]] = ("", ())  # model and replicas

    def response(
        self,
        statistics: Statistics,
        model_name: str,
        accept: str,
        replicas: Sequence[ReplicaStatus] = (),
    ) -> Response:
        """The metrics, as OpenMetrics if `accept`, the request's header, names it; else as text.

        replicas: of a front over several.
        """
        if statistics is not self.statistics or (model_name, replicas) != self.about:
            self.statistics, self.about = statistics, (model_name, replicas)
            self._rendered.clear()
        is_open = _is_open(accept)
        content_type = _TYPES[is_open]
        body = self._rendered.get(content_type)
        if body is None:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(_Collector(statistics, model_name, replicas, prefix=self._prefix))
            body = self._rendered[content_type] = _render(registry, is_open=is_open)
        return Response(200, body, content_type=content_type)


class MetricsOfAll:
    """The metrics of this front's stack and of the replicas', with a label that names the replica.
    Rendered once in each format, for however many requests.
    """

    def __init__(
        self,
        statistics: Statistics,
        model_name: str,
        replicas: Sequence[ReplicaStatus],
        inspected: Mapping[str, Statistics | None],
        *,
        prefix: str = PREFIX,
    ) -> None:
        """inspected: by the names of replicas; None for one that has not told them."""
        self._registry = CollectorRegistry(auto_describe=False)
        collector = _Collector(statistics, model_name, replicas, inspected, prefix=prefix)
        self._registry.register(collector)
        self._rendered: dict[bool, Response] = {}

    def response(self, accept: str) -> Response:
        """The metrics, as OpenMetrics if `accept`, the request's header, names it; else as text."""
        is_open = _is_open(accept)
        found = self._rendered.get(is_open)
        if found is None:
            body = _render(self._registry, is_open=is_open)
            found = self._rendered[is_open] = Response(200, body, content_type=_TYPES[is_open])
        return found


def _is_open(accept: str) -> bool:
    return _OPEN.partition(b";")[0].decode() in accept


def _render(registry: CollectorRegistry, *, is_open: bool) -> bytes:
    if is_open:
        # other escapings replace the colons in names (prometheus_client 0.26)
        render: Callable[..., bytes] = openmetrics.generate_latest
        return render(registry, openmetrics.ALLOWUTF8, "1.0.0")
    return generate_latest(registry)


class _Collector(Collector):
    """The statistics as metrics of Prometheus' client library."""

    def __init__(
        self,
        statistics: Statistics,
        model_name: str,
        replicas: Sequence[ReplicaStatus],
        inspected: Mapping[str, Statistics | None] | None = None,
        *,
        prefix: str,
    ) -> None:
        """inspected: by the names of replicas; None: they are not asked for."""
        self._prefix = prefix
        self._model_name = model_name
        self._replicas = replicas
        self._inspected = inspected
        self._labels: tuple[str, ...] = ("model_name", "process")
        self._rows = [([model_name, name], each) for name, each in statistics.processes.items()]
        if inspected is not None:
            self._labels = ("model_name", "replica", "process")
            stacks = {"": statistics, **inspected}
            self._rows = [
                ([self._model_of(replica), replica, name], each)
                for replica, stack in stacks.items()
                if stack is not None
                for name, each in stack.processes.items()
            ]

    def _model_of(self, replica: str) -> str:
        """The name of the model that a replica serves, or that of this front's where not known."""
        found = [each.model for each in self._replicas if each.shown_name == replica]
        return (found and found[0]) or self._model_name

    def collect(self) -> Iterator[Metric]:
        """Every metric, with or without samples."""
        for family in _FAMILIES:
            labels = (*self._labels, *family.labels)
            metric: Any = family.kind(f"{self._prefix}{family.name}", family.help, labels=labels)
            for values, process in self._rows:
                _add_sample(metric, family, values, process)
            yield metric
        yield from _replica_metrics(self._prefix, self._model_name, self._replicas)
        inspected = GaugeMetricFamily(
            f"{self._prefix}{_REPLICA_INSPECTED}",
            "Whether the statistics of the replica are among these (?replicas=all).",
            labels=("model_name", "replica"),
        )
        for replica, stack in (self._inspected or {}).items():
            inspected.add_metric([self._model_of(replica), replica], float(stack is not None))
        yield inspected


def _add_sample(
    metric: Any, family: _Family, labels: list[str], process: ProcessStatistics
) -> None:
    if family.of is None:
        metric.add_metric(labels, family.value(process))
        return
    if not isinstance(process.numbers, family.of):
        return
    value = family.value(process.numbers)
    if isinstance(value, Histogram | BriefHistogram):
        given = value.counts
        if len(given) != len(family.bounds):  # there are none yet
            given = (*(0,) * (len(family.bounds) - 1), sum(given))
        counts = accumulate(given)
        metric.add_metric(labels, list(zip(family.bounds, counts, strict=True)), value.sum)
    elif isinstance(value, dict):
        sums: dict[tuple[str, ...], float] = {}  # another model's may have the front's own name
        for more, num in value.items():
            named = tuple(labels)
            if family.names_model:
                named, more = (more[0] or labels[0], *labels[1:]), more[1:]
            sums[*named, *more] = sums.get((*named, *more), 0) + num
        for each, num in sums.items():
            metric.add_metric(each, num)
    else:
        metric.add_metric(labels, value)
