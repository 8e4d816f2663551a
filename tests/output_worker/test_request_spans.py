"""Spans that cannot be made or exported: they are counted, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from msgspec import Raw
from tests.helpers.otlp_collector import Collector

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Fault,
    ModelCard,
    RequestSpec,
    RequestTimes,
    SamplingParams,
    Submit,
    TraceContext,
)
from slipstream_worker.request_spans import RequestSpans
from slipstream_worker.streams.registration import register
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.streams.stream_trace import StreamTrace

FAULT = Fault("overloaded", "say plover")


def stream(number: int, context: TraceContext) -> WorkerStream:
    stream_id = number.to_bytes(16, "big")
    submit = Submit(0, stream_id, Raw(b""), text="plover")
    spec = RequestSpec(SamplingParams(), label=f"job {number}", trace=context)
    found = WorkerStream(stream_id, Stage.RENDERING, submit, spec)
    found.trace = StreamTrace(RequestTimes("chat", 1.0))
    return found


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


def test_spans_beyond_the_queue_are_lost(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "7")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "7")
    spans = RequestSpans(f"{collector.endpoint}/v1/traces")
    for number in range(5):
        one = stream(number, TraceContext(bytes([number + 1]) * 16))
        spans.rejected(one, FAULT)
        spans.rejected(one, FAULT)  # it has its spans
    assert (spans.num_pending, spans.num_lost, spans.num_exported) == (6, 4, 0)
    spans.close()
    assert (spans.num_pending, spans.num_lost, spans.num_exported) == (0, 4, 6)
    request, phase = collector.trace("01" * 16)
    assert (request.parent_id, phase.parent_id) == ("", request.span_id)
    assert (request.is_error, request.attributes["error.type"]) == (True, "overloaded")
    assert "plover" not in repr(collector.spans)


@pytest.mark.parametrize("state", ["", "a=1", "nonsense,=,==,a==", "a=1,a=2", "é=ü", "=" * 512])
def test_no_tracestate_costs_a_span(collector: Collector, state: str) -> None:
    spans = RequestSpans(f"{collector.endpoint}/v1/traces")
    context = TraceContext(b"t" * 16, b"p" * 8, 255, state)
    spans.rejected(stream(1, context), FAULT)
    spans.close()
    assert (spans.num_exported, spans.num_lost) == (2, 0)
    assert collector.trace((b"t" * 16).hex())[0].parent_id == (b"p" * 8).hex()


@pytest.mark.parametrize("seed", [None, 7, 0])
def test_a_span_has_the_parameters_that_were_given(collector: Collector, seed: int | None) -> None:
    one = stream(1, TraceContext(b"t" * 16))
    assert one.submit is not None
    params = SamplingParams(seed=seed, top_p=0.5, max_tokens=3)
    spec = RequestSpec(params, trace=TraceContext(b"t" * 16))
    card = ModelCard("m", "p", vocab_size=10, max_model_len=64, eos_token_ids=())
    one.registration = register(
        one.submit, pack_u32([1, 5]), b"c", card, spec=spec, fingerprint=b""
    )
    spans = RequestSpans(f"{collector.endpoint}/v1/traces")
    spans.rejected(one, FAULT)
    spans.close()
    told = collector.trace((b"t" * 16).hex())[0].attributes
    assert told.get("gen_ai.request.seed") == seed
    assert (told["gen_ai.request.top_p"], told["gen_ai.request.max_tokens"]) == (0.5, 3)


def test_an_error_costs_spans_and_is_logged(
    collector: Collector, caplog: pytest.LogCaptureFixture
) -> None:
    spans = RequestSpans(f"{collector.endpoint}/v1/traces")
    broken = stream(1, TraceContext(b"t" * 16, b"p" * 8, 1, 7))  # type: ignore[arg-type]
    spans.rejected(broken, FAULT)
    assert (spans.num_pending, spans.num_lost) == (0, 2)
    (record,) = caplog.records
    assert record.request_ids == ("job 1",)  # type: ignore[attr-defined]
    spans.close()
