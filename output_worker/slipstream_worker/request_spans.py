"""Makes the spans of requests that are over, and exports them by OTLP over HTTP.

The OpenTelemetry SDK is imported when a `RequestSpans` is made, and nowhere else. Its batch
processor exports on a thread of its own, as its OTEL_* variables say.

- A request is one span with a child for each of its phases, all made at its end from the times in
  its `StreamTrace`.
- The ids of spans follow from the stream's id: spans that a second worker makes again are the same.
- A span that finds the queue full, or whose export fails, is lost and counted.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from slipstream_ipc.messages import Fault, TraceContext
from slipstream_ipc.telemetry.logs import of_requests
from slipstream_worker.streams.registration import seed_of
from slipstream_worker.streams.stream import WorkerStream
from slipstream_worker.streams.stream_trace import RequestPhase, StreamTrace, derived_id

logger = logging.getLogger(__name__)

_FLUSH_S = 1.5  # at shutdown, of the 3 s that a process has
_SPAN_ID_BYTES = 8
_SERVICE_NAME = "service.name"
_QUEUE_SIZE_VARIABLE, _QUEUE_SIZE = "OTEL_BSP_MAX_QUEUE_SIZE", 2048  # the SDK's own
_PARAMETERS = ("temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty")


class RequestSpans:
    """The spans of one worker's requests.

    model: the served model's name; set before a request ends.
    """

    def __init__(self, endpoint: str) -> None:
        """endpoint: the URL where a collector takes traces. Raises: ImportError without the SDK."""
        self._api = import_module("opentelemetry.trace")
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
        resources = import_module("opentelemetry.sdk.resources")
        self.model = ""
        self._num_made = self._num_dropped = 0
        self._ids = _StoredIds()
        self._exporter = _CountingExporter(otlp.OTLPSpanExporter(endpoint))
        resource = resources.Resource.create({"service.instance.id": f"worker-{os.getpid()}"})
        if resource.attributes.get(_SERVICE_NAME, "unknown_service").startswith("unknown_service"):
            resource = resource.merge(resources.Resource({_SERVICE_NAME: "slipstream"}))
        self._provider = sdk.TracerProvider(
            id_generator=self._ids, resource=resource, shutdown_on_exit=False
        )
        self._provider.add_span_processor(export.BatchSpanProcessor(self._exporter))
        self._max_pending = _queue_size()
        self._tracer = self._provider.get_tracer("slipstream")

    @property
    def num_exported(self) -> int:
        """Spans that the collector has taken."""
        return self._exporter.num_exported

    @property
    def num_lost(self) -> int:
        """Spans that found the queue full, or whose export failed."""
        return self._num_dropped + self._exporter.num_failed

    @property
    def num_pending(self) -> int:
        """Spans that are not exported yet."""
        return self._num_made - self._exporter.num_exported - self._exporter.num_failed

    def end_sent(self, stream: WorkerStream, now: float) -> None:
        """A stream's end was sent to its reader, perhaps again."""
        trace, admit, reader = stream.trace, stream.registration, stream.reader
        if trace is None or admit is None:
            return
        is_first = reader is not None and reader.matches(admit.begun.owner, admit.begun.handle)
        if trace.is_reported and not is_first:
            stream.trace = None  # the first reader has the end from the worker that made the spans
            return
        self._finish(stream, trace, now)

    def removed(self, stream: WorkerStream) -> None:
        """A stream is forgotten. If its end was never sent, its spans are made now."""
        if stream.trace is not None and not stream.trace.is_reported:
            self._finish(stream, stream.trace, time.monotonic())

    def rejected(self, stream: WorkerStream, fault: Fault) -> None:
        """A stream is rejected."""
        if stream.trace is not None:
            self._finish(stream, stream.trace, time.monotonic(), fault)

    def close(self) -> None:
        """Export what is pending, for a while."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        thread.join(_FLUSH_S)

    def _finish(
        self, stream: WorkerStream, trace: StreamTrace, now: float, fault: Fault | None = None
    ) -> None:
        """Make a request's spans. An error costs them, and not the worker."""
        stream.trace = None
        phases = trace.phases(stream.first_at, now)
        num_spans = len(phases) + 1
        if self.num_pending + num_spans > self._max_pending:
            self._num_dropped += num_spans
            return
        try:
            if self._make(stream, trace, phases, now, fault):
                self._num_made += num_spans
        except Exception:
            logger.exception("no spans were made", extra=of_requests(stream.label))
            self._num_dropped += num_spans

    def _make(
        self,
        stream: WorkerStream,
        trace: StreamTrace,
        phases: Sequence[RequestPhase],
        now: float,
        fault: Fault | None,
    ) -> bool:
        """Hand a request's spans to the batch processor; False if the request is not sampled."""
        offset_ns = time.time_ns() - time.monotonic_ns()

        def ns(at: float) -> int:
            return int(at * 1e9) + offset_ns

        api, origin = self._api, trace.origin
        assert stream.spec is not None
        given = stream.spec.trace
        assert given is not None
        self._ids.trace_id = int.from_bytes(given.trace_id)
        request = self._start(
            stream,
            f"{origin.operation} {self.model}",
            ns(origin.arrived_s),
            self._parent(given),
            kind=api.SpanKind.SERVER,
            attributes=self._attributes(stream, trace, now),
        )
        if not request.is_recording():
            return False
        if origin.is_resubmitted:
            request.add_event("resubmitted by its client", timestamp=ns(origin.arrived_s))
        for event in trace.events:
            took = {} if event.took_s is None else {"slipstream.duration_s": event.took_s}
            request.add_event(event.name, took, ns(event.at))
        context = api.set_span_in_context(request)
        for name, begin, end in phases:
            self._start(stream, name, ns(begin), context).end(ns(end))
        if stream.output is not None and stream.output.end is not None:
            fault = fault or stream.output.end.fault
        if fault is not None:  # without its message, which may quote the prompt
            request.set_attribute("error.type", fault.code)
            request.set_status(api.Status(api.StatusCode.ERROR, fault.code))
        request.end(ns(now))
        return True

    def _start(
        self, stream: WorkerStream, name: str, begin_ns: int, context: Any, **options: Any
    ) -> Any:
        what = name.encode() if not options else b"request"
        self._ids.span_id = int.from_bytes(derived_id(stream.stream_id, what, _SPAN_ID_BYTES))
        return self._tracer.start_span(name, context, start_time=begin_ns, **options)

    def _parent(self, given: TraceContext) -> Any:
        """The context with the caller's span; an empty one if there is none."""
        api = self._api
        parent = api.INVALID_SPAN
        if given.parent_id:
            parent = api.NonRecordingSpan(
                api.SpanContext(
                    int.from_bytes(given.trace_id),
                    int.from_bytes(given.parent_id),
                    is_remote=True,
                    trace_flags=api.TraceFlags(given.flags),
                    trace_state=api.TraceState.from_header([given.state]),
                )
            )
        return api.set_span_in_context(parent)

    def _attributes(self, stream: WorkerStream, trace: StreamTrace, now: float) -> dict[str, Any]:
        """OpenTelemetry's names for generative AI; vLLM's where there is no such name."""
        origin, first = trace.origin, stream.first_at or trace.first_token_at
        found: dict[str, Any] = {
            "gen_ai.operation.name": origin.operation,
            "gen_ai.provider.name": "slipstream",
            "gen_ai.request.model": self.model,
            "gen_ai.response.model": self.model,
            "gen_ai.latency.e2e": now - origin.arrived_s,
        }
        if stream.label:
            found["gen_ai.request.id"] = stream.label
        if trace.scheduled_at:
            found["gen_ai.latency.time_in_queue"] = trace.scheduled_at - origin.rendered_s
        if first:
            found["gen_ai.latency.time_to_first_token"] = first - origin.arrived_s
        admit = stream.registration
        if admit is not None:
            found["gen_ai.request.max_tokens"] = admit.derived.max_tokens
            found["gen_ai.usage.input_tokens"] = len(admit.prompt_ids) // 4
            for name in _PARAMETERS:
                if (value := getattr(admit.spec.params, name)) is not None:
                    found[f"gen_ai.request.{name}"] = value
            if admit.derived.seed != seed_of(admit.stream_id):  # its client has given it
                found["gen_ai.request.seed"] = admit.derived.seed
        if stream.output is not None and (end := stream.output.end) is not None:
            found["gen_ai.usage.output_tokens"] = end.num_tokens
            found["gen_ai.response.finish_reasons"] = (end.reason,)
        return found


class _StoredIds:
    """An id generator of the SDK that gives the ids that are set."""

    trace_id = span_id = 1

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id

    def is_trace_id_random(self) -> bool:
        return False


class _CountingExporter:
    """An exporter of the SDK that counts what another one exports. Used by one thread."""

    def __init__(self, exporter: Any) -> None:
        self._exporter = exporter
        self.num_exported = self.num_failed = 0

    def export(self, spans: Sequence[Any]) -> Any:
        try:
            result = self._exporter.export(spans)
        except BaseException:
            self.num_failed += len(spans)
            raise
        if result.name == "SUCCESS":
            self.num_exported += len(spans)
        else:
            self.num_failed += len(spans)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._exporter.force_flush(timeout_millis))


def _queue_size() -> int:
    try:
        return int(os.environ.get(_QUEUE_SIZE_VARIABLE, _QUEUE_SIZE))
    except ValueError:
        return _QUEUE_SIZE
