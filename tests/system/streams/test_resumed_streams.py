"""Streams of HTTP whose processes are killed, and whose clients come back to them."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from tests.helpers.http_front import Raw
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.played_responses import port_of
from tests.helpers.resumed_streams import (
    ASKS,
    CHAT,
    COMPLETION,
    EVENTS,
    Event,
    events_of,
    read_some,
    told_by,
)
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.http.answers.event_ids import EventIdWriter, parse_event_id

SIMULATED = "simulated:step_ms=2,mode=chain"  # each token depends on all before it


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Its streams are kept for longer than a busy machine takes to start another front, and a core
    may be stopped for as long.
    """
    settings: dict[str, Any] = {"http_port": 0, "grace_s": 600.0, "hang_timeout_s": 600.0}
    with spareless_stack(SIMULATED, **settings) as running:
        yield running


def wait_until_another_answers(stack: Stack, before: int) -> None:
    """Until it takes requests, which it does once it knows the model: while the core is stopped,
    /ready is 503 as soon as the core counts as silent.
    """
    patience = Patience()
    while True:
        patience.wait("no front came")
        try:
            models = f"{stack.http_address}/v1/models"
            with urllib.request.urlopen(models, timeout=PATIENCE_S) as answer:
                if answer.status == 200 and stack.pids.get("http") != before:
                    return
        except OSError:
            continue


@pytest.mark.process
def test_streams_go_on_from_a_front_that_never_heard_of_them(stack):
    path, body = ASKS["chat, logprobs"]
    body = {**body, "max_tokens": 600, "ignore_eos": True}
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        expected = told_by(events_of(raw.read().body))
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        events = events_of(read_some(raw, 10))
        front = stack.pids["http"]
        os.kill(front, signal.SIGKILL)
    wait_until_another_answers(stack, front)
    with Raw(port_of(stack)) as raw:
        last = f"Last-Event-ID: {events[-1].id}"
        raw.post(path, body, EVENTS, last)
        events += events_of(raw.read().body)
    said = told_by(events)
    del said["head"], expected["head"]
    assert said == expected


DEATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion, no seed": (
        "/v1/completions",
        {**COMPLETION, "max_tokens": 900, "temperature": 1, "ignore_eos": True},
    ),
    "completion, many": (
        "/v1/completions",
        {
            **COMPLETION,
            "prompt": ["a", "b"],
            "n": 2,
            "temperature": 1,
            "max_tokens": 900,
            "logprobs": 1,
            "ignore_eos": True,
        },
    ),
    "chat": ("/v1/chat/completions", {**CHAT, "max_tokens": 900, "ignore_eos": True}),
    "generate": (
        "/generate",
        {
            "text": "Once",
            "sampling_params": {"max_tokens": 900, "temperature": 1, "ignore_eos": True},
            "stream": True,
        },
    ),
}


def kill(stack: Stack, *names: str) -> None:
    for pid in [stack.pids[name] for name in names]:
        os.kill(pid, signal.SIGKILL)


def after(last: Event) -> str:
    return f"Last-Event-ID: {last.id}"


@pytest.mark.process
@pytest.mark.parametrize(
    "ask",
    DEATHS,
)
def test_a_lost_stream_is_computed_again_for_the_same_request(stack, ask):
    """Its seed follows from its streams' ids, which the event names."""
    path, body = DEATHS[ask]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        events = events_of(read_some(raw, 30))
        front = stack.pids["http"]
        kill(stack, "http", "worker", "core")
    wait_until_another_answers(stack, front)
    answer_id = told_by(events)["head"][0]
    with Raw(port_of(stack)) as raw:
        refused = raw.get(f"/v1/streams/{answer_id}", after(events[-1]))
        assert refused.status == 404
        assert "POST the same request" in refused.error["message"]
        raw.post(path, {**body, "priority": 1}, after(events[-1]))  # another request
        assert raw.read().status == 409
        raw.post(path, {**body, "priority": 2**31}, after(events[-1]))
        refused = raw.read()
        assert refused.status == 404
        assert "the body is no valid request" in refused.error["message"]
        raw.post(path, body, after(events[-1]))
        answer = raw.read()
        assert answer.status == 200, answer.body
        events += events_of(answer.body)
        has = "include_usage=true&" if ask == "chat" else ""
        has += "logprobs=1" if ask == "completion, many" else ""
        again = told_by(events_of(raw.get(f"/v1/streams/{answer_id}?{has}").body))
    said = told_by(events)
    del said["head"], again["head"]
    assert said == again


@pytest.mark.process
def test_another_text_is_never_put_behind_the_one_that_was_read(stack):
    path, body = DEATHS["chat"]
    body = {**body, "max_tokens": 1800}
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        last = events_of(read_some(raw, 30))[-1]
        front = stack.pids["http"]
        kill(stack, "http", "worker", "core")
    wait_until_another_answers(stack, front)
    event_id = parse_event_id(last.id)
    (cursor,) = event_id.cursors
    other = replace(event_id, cursors=(replace(cursor, checksum=cursor.checksum ^ 1),))
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, f"Last-Event-ID: {EventIdWriter(other).line().decode()[4:-1]}")
        answer = raw.read()
        assert (answer.status, answer.error["code"]) == (409, "diverged")
        computed = told_by(events_of(raw.get(f"/v1/streams/{event_id.answer}").body))
        assert computed[0, "end"] == ["abort"]  # it does not run to its end for nobody
        lacks = replace(event_id, answer=replace(event_id.answer, first=bytes(16)))
        raw.post(
            path,
            {**body, "seed": 6},
            f"Last-Event-ID: {EventIdWriter(lacks).line().decode()[4:-1]}",
        )
        refused = raw.read()
    assert refused.status == 409
    assert "another request" in refused.error["message"]


@pytest.mark.process
@pytest.mark.parametrize("method", ["GET", "POST", "POST at another front"])
def test_a_stream_that_was_come_back_to_outlives_worker_and_core(stack, method):
    """Its front submits it again; of a GET it knows the request from the one that began it."""
    path, body = DEATHS["chat"]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        expected = told_by(events_of(raw.read().body))
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        events = events_of(read_some(raw, 10))
        if method == "POST at another front":
            front = stack.pids["http"]
            os.kill(stack.pids["core"], signal.SIGSTOP)  # or the stream may have ended by then
            kill(stack, "http")
            wait_until_another_answers(stack, front)
            os.kill(stack.pids["core"], signal.SIGCONT)
    with Raw(port_of(stack)) as raw:
        if method != "GET":
            raw.post(path, body, after(events[-1]))
        else:
            raw.send(
                f"GET /v1/streams/{told_by(events)['head'][0]} HTTP/1.1\r\nHost: localhost\r\n"
            )
            raw.send(after(events[-1]) + "\r\n\r\n")
        events += events_of(read_some(raw, 10))
        kill(stack, "worker", "core")
        while "done" not in told_by(events):
            events += events_of(raw.read_chunk())
    said = told_by(events)
    del said["head"], expected["head"]
    assert said == expected
