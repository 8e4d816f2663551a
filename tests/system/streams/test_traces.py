"""Traces of requests, as a collector on loopback gets them from whole stacks."""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
import urllib.request
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.helpers.http_front import Raw
from tests.helpers.otlp_collector import CollectedSpan, Collector
from tests.helpers.patience import Patience
from tests.helpers.stacks import spareless_stack

from slipstream import BadRequestError, Stack
from slipstream.stack.supervisor_events import ProcessRestarted

pytestmark = pytest.mark.process

MODEL = "simulated:step_ms=5,max_model_len=4096"
MARK = "plover"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def stack(collector: Collector) -> Iterator[Stack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        with Stack(
            MODEL,
            http_port=0,
            spare_core=False,
            otlp_traces_endpoint=collector.endpoint,
        ) as stack:
            yield stack


def port_of(stack: Stack) -> int:
    assert stack.http_address is not None
    return int(stack.http_address.rpartition(":")[2])


def new_parent() -> tuple[str, str, str]:
    """A traceparent, its trace id and its parent id."""
    trace_id, parent_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{parent_id}-01", trace_id, parent_id


def metric(stack: Stack, name: str) -> float:
    assert stack.http_address is not None
    with urllib.request.urlopen(f"{stack.http_address}/metrics") as answer:
        text = answer.read().decode()
    found = re.findall(rf"^slipstream:{name}(?:_total)?{{.*}} (\S+)$", text, re.M)
    return sum(map(float, found))


def check_tree(spans: list[CollectedSpan], parent_id: str) -> CollectedSpan:
    """Check that a request's spans are a tree in the order of time; returns the request's."""
    (request, *children) = spans
    assert request.parent_id == parent_id
    assert len({span.span_id for span in spans}) == len(spans), "none is doubled"
    assert all(child.parent_id == request.span_id for child in children)
    assert all(request.begin <= child.begin <= child.end <= request.end for child in children)
    ends = {child.name: child.end for child in children}
    begins = {child.name: child.begin for child in children}
    chain = ("tokenize", "queue", "prefill", "decode")
    for one, other in pairwise(chain):
        assert ends[one] == begins[other], (one, other)
    assert begins["delivery"] >= begins["decode"]
    return request


def test_a_request_over_http_is_a_span_below_its_callers(
    stack: Stack, collector: Collector
) -> None:
    traceparent, trace_id, parent_id = new_parent()
    body = {"messages": [{"role": "user", "content": MARK}], "max_tokens": 7, "temperature": 0.5}
    before, arrived = metric(stack, "trace_spans_exported"), time.time_ns()
    with Raw(port_of(stack)) as raw:
        headers = (f"traceparent: {traceparent}", "tracestate: x=1", "X-Request-Id: mine")
        raw.post("/v1/chat/completions", body, *headers)
        assert raw.read().status == 200
    spans = collector.trace(trace_id)
    request = check_tree(spans, parent_id)
    assert [span.name for span in spans[1:5]] == ["tokenize", "queue", "prefill", "decode"]
    assert arrived <= request.begin <= request.end <= time.time_ns()
    assert request.name == f"chat {MODEL}"
    assert (request.kind, request.trace_state, request.is_error) == (2, "x=1", False)
    assert request.resource["service.name"] == "slipstream"
    told = request.attributes
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == told["gen_ai.response.model"] == MODEL
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (7, 0.5)
    assert told["gen_ai.usage.output_tokens"] == 7
    assert told["gen_ai.usage.input_tokens"] > 0
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.request.id"] == "mine"
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    assert MARK not in repr(spans)
    assert collector.paths == {"/v1/traces"}
    patience = Patience()
    while metric(stack, "trace_spans_exported") < before + len(spans):
        patience.wait()
    assert metric(stack, "trace_spans_lost") == 0


def test_all_answers_are_in_one_trace_whether_or_not_the_caller_has_one(
    stack: Stack, collector: Collector
) -> None:
    traceparent, trace_id, parent_id = new_parent()
    with Raw(port_of(stack)) as raw:
        body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 2}
        raw.post("/v1/completions", body, f"traceparent: {traceparent}")
        assert raw.read().status == 200
        spans = collector.trace(trace_id, 4)
        assert sum(span.parent_id == parent_id for span in spans) == 4
        raw.post("/v1/completions", {**body, "max_tokens": 3}, "traceparent: 00-nonsense-01")
        assert raw.read().status == 200
    patience, trace_ids = Patience(), set[str]()
    while not trace_ids:
        patience.wait()
        trace_ids = {
            span.trace_id
            for span in collector.spans
            if span.attributes.get("gen_ai.request.max_tokens") == 3
        }
    (found,) = trace_ids
    assert all(span.parent_id == "" or span.name.islower() for span in collector.trace(found, 4))


def test_a_python_client_passes_its_trace_on(stack: Stack, collector: Collector) -> None:
    traceparent, trace_id, parent_id = new_parent()
    with stack.client() as client:
        client.generate(
            "once", max_tokens=3, label="job 7", trace_headers={"Traceparent": traceparent}
        )
        with pytest.raises(BadRequestError):
            client.generate("once", max_tokens=3, trace_headers=traceparent)  # type: ignore[arg-type]
    request = check_tree(collector.trace(trace_id), parent_id)
    assert request.attributes["gen_ai.request.id"] == "job 7"


def test_what_is_not_sampled_or_refused_says_so(stack: Stack, collector: Collector) -> None:
    traceparent, unsampled, _ = new_parent()
    with stack.client() as client:
        client.generate("x", max_tokens=1, trace_headers={"traceparent": traceparent[:-1] + "0"})
        traceparent, trace_id, parent_id = new_parent()
        with pytest.raises(BadRequestError):
            client.generate(
                f"{MARK} " * 9000, max_tokens=1, trace_headers={"traceparent": traceparent}
            )
    request, *_ = collector.trace(trace_id)
    assert (request.parent_id, request.is_error) == (parent_id, True)
    assert request.attributes["error.type"] == "bad_request"
    assert "gen_ai.usage.output_tokens" not in request.attributes
    assert unsampled not in {span.trace_id for span in collector.spans}


@pytest.mark.parametrize("victim", ["worker", "core"])
def test_a_request_outlives_a_process_in_one_trace(
    stack: Stack, collector: Collector, victim: str
) -> None:
    traceparent, trace_id, parent_id = new_parent()
    with stack.client() as client:
        headers = {"traceparent": traceparent}
        with client.stream("x", max_tokens=200, trace_headers=headers) as stream:
            next(iter(stream))
            stack.events()
            os.kill(stack.pids[victim], signal.SIGKILL)
            for _ in stream:
                pass
    restarts = [each for each in stack.events() if isinstance(each, ProcessRestarted)]
    assert [each.name for each in restarts] == [victim]
    spans = collector.trace(trace_id)
    request = check_tree(spans, parent_id)
    ((name, told),) = request.events
    assert name == f"{victim} replaced"
    assert 0 < told["slipstream.duration_s"] < (request.end - request.begin) / 1e9
    assert request.attributes["gen_ai.usage.output_tokens"] == 200


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_stream_that_is_read_again_has_no_second_spans(
    stack: Stack, collector: Collector, is_replaced: bool
) -> None:
    traceparent, trace_id, _ = new_parent()
    last_parent, last_id, _ = new_parent()
    with stack.client() as client:
        given = client.generate("x", max_tokens=3, trace_headers={"traceparent": traceparent})
        before = collector.trace(trace_id)
        if is_replaced:
            os.kill(stack.pids["worker"], signal.SIGKILL)
        for reader in (client, stack.client()):
            assert "".join(delta.text for delta in reader.resume(given.id)) == given.text
        reader.close()
        client.generate("y", max_tokens=1, trace_headers={"traceparent": last_parent})
    collector.trace(last_id)  # made later than any of the first request's
    assert collector.trace(trace_id) == before


@pytest.fixture
def traced(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stack]:
    """A stack that never exports before its end."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
    with spareless_stack(MODEL, http_port=0, otlp_traces_endpoint=collector.endpoint) as stack:
        yield stack


def wait_for_metric(stack: Stack, name: str, value: float) -> None:
    patience = Patience()
    while metric(stack, name) != value:
        patience.wait((name, metric(stack, name)))


def test_spans_that_a_worker_takes_with_it_are_counted(traced: Stack) -> None:
    with traced.client() as client:
        client.generate("x", max_tokens=2)
        wait_for_metric(traced, "trace_spans_pending", 6)
        os.kill(traced.pids["worker"], signal.SIGKILL)
        wait_for_metric(traced, "trace_spans_lost", 6)
        assert client.generate("x", max_tokens=2).num_tokens == 2
        wait_for_metric(traced, "trace_spans_pending", 6)
        assert metric(traced, "trace_spans_exported") == 0


def test_a_stack_that_stops_exports_what_it_has(traced: Stack, collector: Collector) -> None:
    traceparent, trace_id, parent_id = new_parent()
    with traced.client() as client:
        client.generate("x", max_tokens=2, trace_headers={"traceparent": traceparent})
    traced.stop()
    check_tree(collector.trace(trace_id), parent_id)


def test_a_collector_that_fails_costs_spans_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    with Collector() as collector:
        collector.status = 400
        options: dict[str, Any] = {"otlp_traces_endpoint": f"{collector.endpoint}/v1/traces"}
        with spareless_stack(MODEL, http_port=0, **options) as stack, stack.client() as client:
            for _ in range(2):
                assert client.generate("x", max_tokens=2).num_tokens == 2
            wait_for_metric(stack, "trace_spans_lost", 12)
            assert metric(stack, "trace_spans_exported") == 0


@pytest.mark.parametrize("is_on", [False, True])
def test_opentelemetry_is_imported_by_the_worker_where_it_is_on_and_by_nothing_else(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    is_on: bool,
) -> None:
    """With it off, a request that carries a trace is served like any other."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # every process writes what it imports
    options: dict[str, Any] = {"otlp_traces_endpoint": collector.endpoint} if is_on else {}
    with spareless_stack(MODEL, http_port=0, **options) as stack, stack.client() as client:
        headers = {"traceparent": new_parent()[0]}
        assert client.generate("x", max_tokens=2, trace_headers=headers).num_tokens == 2
    lines = capfd.readouterr().err.splitlines()
    assert any("slipstream_worker.request_spans" in line for line in lines)
    num_imports = sum(line.endswith(" opentelemetry.sdk.resources") for line in lines)
    assert num_imports == is_on
    assert any("opentelemetry" in line for line in lines) == is_on
