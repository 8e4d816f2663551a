"""A stack that drains says so over HTTP: whole stacks, raw sockets, a stream that runs."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.helpers.http_front import JSON, Raw
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.stack.supervisor_events import ProcessRestarted, StackDraining

pytestmark = pytest.mark.process
COMPLETIONS = "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "b", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "b"}], "max_tokens": 2},
    "/generate": {"text": "b", "sampling_params": {"max_tokens": 2}},
}
LATE_BODY = b'{"prompt": "b", "max_tokens": 2}'
EVENTS = "Accept: text/event-stream"


@dataclass
class Draining:
    """stream: a connection that reads one. idle: one that was there before. late: one that has sent
    a request but for LATE_BODY.
    """

    stack: Stack
    stream: Raw
    idle: Raw
    late: Raw

    def connect(self) -> Raw:
        return Raw(port_of(self.stack))

    def health(self) -> dict[str, Any]:
        """As it is told on a new connection."""
        with self.connect() as raw:
            answer = raw.get("/health")
            assert answer.status == 200
            found: dict[str, Any] = answer.json
            return found


def port_of(stack: Stack) -> int:
    return int(stack.http_address.rpartition(":")[2])


@contextmanager
def draining(num_tokens: int, **settings: Any) -> Iterator[Draining]:
    """A stack that drains, and whose front knows it, while a stream runs."""
    settings = {"http_port": 0, "drain_s": 1e6, **settings}
    with (
        spareless_stack("simulated:step_ms=5,mode=chain", **settings) as stack,
        Raw(port_of(stack)) as stream,
        Raw(port_of(stack)) as idle,
        Raw(port_of(stack)) as late,
    ):
        patience = Patience()
        while (status := idle.get("/health").json["status"]) != "ok":
            patience.wait(status)
        body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
        stream.post(COMPLETIONS, body, EVENTS)
        assert stream.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        late.send(
            f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n"
            f"Content-Length: {len(LATE_BODY)}\r\n\r\n"
        )
        stack.events()
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        while not isinstance(stack.next_event(PATIENCE_S), StackDraining):
            pass
        found = Draining(stack, stream, idle, late)
        patience = Patience()
        while found.health()["status"] != "draining":  # a front hears of it a moment later
            patience.wait()
        yield found


def rest_of(stream: Raw) -> bytes:
    """What comes until the stream's end."""
    said = b""
    while chunk := stream.read_chunk():
        said += chunk
    return said


def ended(stack: Stack) -> int:
    """The supervisor's exit code."""
    return stack._supervisor.wait(PATIENCE_S)


def test_health_is_served_until_the_last_stream_has_ended():
    with draining(1500) as found:
        for raw in (found.idle, found.connect(), found.connect()):
            with raw:
                answer = raw.get("/health")
                assert (answer.status, answer.json["status"]) == (200, "draining")
                assert answer.headers["connection"] == "close"
        with found.connect() as raw:
            answer = raw.get("/ready")
            assert (answer.status, answer.error["code"]) == (503, "draining")
            assert answer.headers["retry-after"]
        metrics, patience = b"", Patience()
        while b"\nslipstream:num_requests_running{" not in metrics:
            patience.wait(metrics)
            with found.connect() as raw:
                answer = raw.get("/metrics")
                assert answer.status == 200
                metrics = answer.body
        said = rest_of(found.stream)
        assert said.endswith(b"data: [DONE]\n\n")
        assert b'"finish_reason":"length"' in said
        assert ended(found.stack) == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port_of(found.stack)))


def test_a_stream_that_is_cut_off_says_that_the_server_drains(tmp_path):
    settings = {"http_port": 0, "drain_s": 0.5, "max_model_len": 200_000}
    model = "simulated:step_ms=5,mode=chain"
    with (
        spareless_stack(model, runtime_dir=tmp_path / "run", **settings) as stack,
        Raw(port_of(stack)) as stream,
    ):
        body = {"prompt": "a", "max_tokens": 100_000, "ignore_eos": True, "stream": True}
        stream.post(COMPLETIONS, body, EVENTS)
        assert stream.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
        os.kill(stack.pids["supervisor"], signal.SIGTERM)
        *_, last = rest_of(stream).decode().strip().split("\n\n")
        error = json.loads(last.rpartition("data: ")[2])["error"]
        assert (error["code"], error["message"]) == ("draining", "the server is shutting down")
        assert ended(stack) == 0


def test_what_would_begin_is_refused_and_the_reason_told():
    with draining(1500) as found:
        for path, body in BODIES.items():
            with found.connect() as raw:
                raw.post(path, body)
                answer = raw.read()
                assert (answer.status, answer.error["code"]) == (503, "draining")
                assert "shutting down" in answer.error["message"]
                assert answer.headers["retry-after"]
        with found.connect() as raw:  # what is asked beside streams needs none
            raw.post("/tokenize", {"prompt": "b"})
            assert raw.read().status == 200
        assert rest_of(found.stream).endswith(b"data: [DONE]\n\n")
        assert ended(found.stack) == 0


def test_a_request_that_had_begun_to_come_is_refused_as_well():
    with draining(1500) as found:
        found.late.send(LATE_BODY)
        answer = found.late.read()
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert rest_of(found.stream).endswith(b"data: [DONE]\n\n")
        assert ended(found.stack) == 0


def test_a_stream_that_runs_can_be_come_back_to():
    with draining(3000) as found:
        event = found.stream.read_until(b"\n\n").decode()
        last = re.search(r"^id: (.*)$", event, re.M)
        assert last is not None, event
        found.stream.socket.close()
        with found.connect() as raw:
            name = last[1].partition("/")[0]
            raw.send(
                f"GET /v1/streams/{name} HTTP/1.1\r\nHost: localhost\r\n"
                f"Last-Event-ID: {last[1]}\r\n\r\n"
            )
            assert raw.read_until(b"\r\n\r\n").startswith(b"HTTP/1.1 200 OK")
            assert b'"finish_reason":"length"' in rest_of(raw)
        assert ended(found.stack) == 0


def test_a_front_that_dies_while_it_drains_has_a_successor_that_says_so():
    with draining(100_000, max_model_len=200_000) as found:
        os.kill(found.stack.pids["http"], signal.SIGKILL)
        while not isinstance(found.stack.next_event(PATIENCE_S), ProcessRestarted):
            pass
        patience = Patience()
        while True:  # until it knows of the others, a front answers 503
            with found.connect() as raw:
                answer = raw.get("/health")
            if (answer.status, answer.json["status"]) == (200, "draining"):
                break
            patience.wait()
        with found.connect() as raw:
            assert raw.get("/ready").status == 503
        os.kill(found.stack.pids["supervisor"], signal.SIGINT)  # it need not wait any longer
        assert ended(found.stack) == 0


def test_an_idle_connection_keeps_no_stack_from_ending():
    with draining(300) as found:
        assert rest_of(found.stream).endswith(b"data: [DONE]\n\n")
        assert ended(found.stack) == 0
        assert found.idle.read_to_end() == b""
