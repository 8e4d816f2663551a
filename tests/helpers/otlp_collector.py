"""A collector of OpenTelemetry traces on loopback: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tests.helpers.patience import PATIENCE_S


@dataclass(frozen=True)
class CollectedSpan:
    """One span. begin, end: Unix time, ns. events: names with their attributes."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    begin: int
    end: int
    is_error: bool
    trace_state: str
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    resource: dict[str, Any]


class Collector:
    """The collector, while its `with` block runs. status: what it answers with."""

    def __init__(self) -> None:
        self.status = 200
        self.paths: set[str] = set()
        self._spans: list[CollectedSpan] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if collector.status == 200:
                    collector._take(self.path, body)
                self.send_response(collector.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def spans(self) -> list[CollectedSpan]:
        """All spans so far."""
        with self._changed:
            return list(self._spans)

    def trace(self, trace_id: str, num_requests: int = 1) -> list[CollectedSpan]:
        """The spans of a trace in the order of their begin, a request's ahead of its phases', once
        these many requests are there.
        """

        def found() -> list[CollectedSpan]:
            return [span for span in self._spans if span.trace_id == trace_id]

        def is_whole() -> bool:
            return sum("gen_ai.operation.name" in each.attributes for each in found()) >= (
                num_requests
            )

        with self._changed:
            assert self._changed.wait_for(is_whole, PATIENCE_S), self._spans
            return sorted(found(), key=lambda span: (span.begin, not span.attributes))

    def _take(self, path: str, body: bytes) -> None:
        spans = []
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = _attributes(group.resource.attributes)
            for scope in group.scope_spans:
                spans += [
                    CollectedSpan(
                        span.name,
                        span.trace_id.hex(),
                        span.span_id.hex(),
                        span.parent_span_id.hex(),
                        span.kind,
                        span.start_time_unix_nano,
                        span.end_time_unix_nano,
                        span.status.code == 2,
                        span.trace_state,
                        _attributes(span.attributes),
                        [(event.name, _attributes(event.attributes)) for event in span.events],
                        resource,
                    )
                    for span in scope.spans
                ]
        with self._changed:
            self.paths.add(path)
            self._spans += spans
            self._changed.notify_all()


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
