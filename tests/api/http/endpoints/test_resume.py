"""Streams that go on where their client was: over another connection, and from another front."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import urllib.request
from collections import defaultdict
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.fake_worker import Entry, deltas
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream import Stack
from slipstream.http.answers.event_ids import (
    AnswerId,
    EventId,
    EventIdWriter,
    StreamCursor,
    checksum_of,
    parse_answer_id,
    parse_event_id,
)
from slipstream.http.api_errors import ApiError
from slipstream.http.config import Limits
from slipstream_ipc.messages import Abort, Goodbye, Resume, Submit, UnknownStreams

EVENTS = "Accept: text/event-stream"
SIMULATED = "simulated:step_ms=2,mode=chain"  # each token depends on all before it
COMPLETION = {"prompt": "Once", "max_tokens": 24, "temperature": 0, "stream": True}
CHAT = {
    "messages": [{"role": "user", "content": "What is a list?"}],
    "max_tokens": 24,
    "seed": 5,
    "stream": True,
    "stream_options": {"include_usage": True},
}
ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION),
    "completion, logprobs": ("/v1/completions", {**COMPLETION, "logprobs": 2}),
    "completion, many": (
        "/v1/completions",
        {**COMPLETION, "prompt": ["a", "b"], "n": 2, "seed": 1, "logprobs": 1, "stop": ["e "]},
    ),
    "chat": ("/v1/chat/completions", CHAT),
    "chat, usage so far": (
        "/v1/chat/completions",
        {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat, logprobs": (
        "/v1/chat/completions",
        {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2},
    ),
}


class Event(NamedTuple):
    """As it came."""

    id: str
    data: str


def events_of(body: bytes) -> list[Event]:
    """Of a stream whose events have ids."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        id_line, data_line = block.split("\n")
        assert id_line.startswith("id: ")
        assert data_line.startswith("data: ")
        found.append(Event(id_line.removeprefix("id: "), data_line.removeprefix("data: ")))
    return found


def told_by(events: list[Event]) -> dict[Any, Any]:
    """What events say, however it is divided: for each choice, usage, the end."""
    said: dict[Any, Any] = defaultdict(list)
    for event in events:
        if event.data == "[DONE]":
            said["done"].append(1)
            continue
        chunk = json.loads(event.data)
        said["head"] = [chunk["id"], chunk["created"], chunk["object"], chunk["model"]]
        if chunk.get("usage") and not chunk["choices"]:
            said["usage"].append(chunk["usage"])
        for choice in chunk["choices"]:
            said[choice["index"], "usage"] = chunk.get("usage")
            delta = choice.get("delta", choice)
            for field, value in {**delta, "content": delta.get("text", "")}.items():
                if field in ("text", "role", "content") and value:
                    said[choice["index"], field] += value
            if delta.get("content"):
                said[choice["index"], "text"] += delta["content"]
            if choice["finish_reason"]:
                said[choice["index"], "end"].append(choice["finish_reason"])
            for field, column in (choice["logprobs"] or {}).items():
                said[choice["index"], "logprobs", field] += column or []
    return said


@pytest.fixture(scope="module")
def stack():
    """Its streams are kept for longer than a busy machine takes to start another front, and a core
    may be stopped for as long.
    """
    settings = {"http_port": 0, "grace_s": 600.0, "hang_timeout_s": 600.0}
    with spareless_stack(SIMULATED, **settings) as running:
        yield running


def port_of(stack: Stack) -> int:
    return int(stack.http_address.rpartition(":")[2])


def whole(stack: Stack, ask: str, *headers: str) -> list[Event]:
    path, body = ASKS[ask]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS, *headers)
        answer = raw.read()
    assert answer.status == 200, answer.body
    return events_of(answer.body)


@pytest.mark.process
@pytest.mark.parametrize("ask", ASKS)
def test_last_event_id_gets_the_rest_whichever_event_it_was(stack, ask):
    events = whole(stack, ask)
    expected = told_by(events)
    assert expected["done"] == [1]
    answer_id = expected["head"][0]
    with Raw(port_of(stack)) as raw:
        for at in range(1, len(events) + 1):
            last = f"Last-Event-ID: {events[at - 1].id}"
            rest = events_of(raw.get(f"/v1/streams/{answer_id}", last).body)
            if at < len(events):
                assert told_by(events[:at] + rest) == expected, at
            else:  # and so it says however often it is asked
                assert rest == events[-1:]


@pytest.mark.process
@pytest.mark.parametrize("ask", ASKS)
def test_the_same_request_again_gets_the_rest(stack, ask):
    events = whole(stack, ask)
    middle = len(events) // 2
    rest = whole(stack, ask, f"Last-Event-ID: {events[middle - 1].id}")
    assert told_by(events[:middle] + rest) == told_by(events)


@pytest.mark.process
@pytest.mark.parametrize("change", [{"seed": 6}, {"max_tokens": 5}, {"n": 2}])
def test_another_body_does_not_get_the_events_stream(stack, change):
    events = whole(stack, "chat")
    path, body = ASKS["chat"]
    with Raw(port_of(stack)) as raw:
        raw.post(path, {**body, **change}, EVENTS, f"Last-Event-ID: {events[3].id}")
        refused = raw.read()
    assert (refused.status, refused.error["param"]) == (409, "last-event-id")
    assert "another request" in refused.error["message"]


@pytest.mark.process
def test_the_id_of_an_answer_gets_it_from_the_beginning(stack):
    events = whole(stack, "chat, logprobs")
    expected = told_by(events)
    path = f"/v1/streams/{expected['head'][0]}?logprobs=2&include_usage=true"
    with Raw(port_of(stack)) as raw:
        again = told_by(events_of(raw.get(path).body))
        last = f"/v1/streams/{expected['head'][0]}?last_event_id={events[2].id}"
        rest = events_of(raw.get(last).body)
    again["head"][1] = expected["head"][1]  # when: it is not kept
    assert again == expected
    assert told_by(events[:3] + rest) == expected


@pytest.mark.process
def test_who_does_not_ask_for_events_with_ids_gets_one_line_to_an_event(stack):
    """Benchmark clients take every line for data."""
    path, body = ASKS["completion"]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body)
        answer = raw.read()
    assert answer.events[-1] == "[DONE]"
    assert b"id: " not in answer.body


def read_some(raw: Raw, num: int) -> bytes:
    """The first events of a stream, as they came."""
    raw.read_until(b"\r\n\r\n")
    body = b""
    while body.count(b"\n\n") < num:
        body += raw.read_chunk()
    return body


@pytest.mark.process
def test_a_client_that_comes_back_in_the_middle_gets_the_rest(stack):
    path, body = ASKS["completion"]
    body = {**body, "max_tokens": 400, "ignore_eos": True}
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        expected = told_by(events_of(raw.read().body))
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS)
        events = events_of(read_some(raw, 5))
    while "done" not in told_by(events):
        with Raw(port_of(stack)) as raw:
            raw.send(
                f"GET /v1/streams/{told_by(events)['head'][0]} HTTP/1.1\r\nHost: localhost\r\n"
                f"Last-Event-ID: {events[-1].id}\r\n\r\n"
            )
            raw.read_until(b"\r\n\r\n")
            for _ in range(40):
                chunk = raw.read_chunk()
                events += events_of(chunk)
                if not chunk or "data: [DONE]" in chunk.decode():
                    break
    said = told_by(events)
    assert said[0, "text"] == expected[0, "text"]
    assert said[0, "end"] == ["length"]


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


@pytest.mark.process
def test_an_id_of_an_earlier_version_is_refused_and_says_so(stack):
    path, body = ASKS["completion"]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS, f"Last-Event-ID: cmpl-{32 * '1'}/1700000000l2u/12.3.12.")
        answer = raw.read()
    assert answer.status == 400
    assert "earlier version" in answer.error["message"]


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


def test_a_request_is_known_again_whoever_sends_it_and_whatever_it_is_called():
    submit = Submit(7, bytes(16), b"\x80", text="Once")
    other = {"handle": 1, "stream_id": b"x" * 16, "label": "me", "tenant": b"key"}
    assert checksum_of([structs.replace(submit, **other)], 1) == checksum_of([submit], 1)
    assert checksum_of([structs.replace(submit, text="Twice")], 1) != checksum_of([submit], 1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("path", "headers", "status", "param"),
    [
        ("nonsense", (), 400, "id"),
        ("cmpl-" + 32 * "0", ("Last-Event-ID: nonsense",), 400, "last-event-id"),
        ("cmpl-" + 32 * "0", (f"Last-Event-ID: cmpl-{32 * '1'}/1//0.0.0",), 400, "last-event-id"),
        ("cmpl-" + 32 * "0" + ".9999x9999", (), 400, "id"),
        ("cmpl-" + 32 * "0" + "?logprobs=many", (), 400, "logprobs"),
        ("cmpl-" + 32 * "0" + "?include_usage=1", (), 400, "include_usage"),
        ("cmpl-" + 32 * "0" + "?continuous_usage_stats=", (), 400, "continuous_usage_stats"),
        ("cmpl-" + 32 * "0" + "?what=1", (), 400, "what"),
        ("cmpl-" + 32 * "0", (), 404, None),
    ],
)
def test_wrong_ids_are_refused(stack, path, headers, status, param):
    with Raw(port_of(stack)) as raw:
        answer = raw.get(f"/v1/streams/{path}", *headers)
    assert (answer.status, answer.error["param"]) == (status, param)


@pytest.mark.process
def test_an_event_of_a_chat_is_none_of_a_completion(stack):
    events = whole(stack, "chat")
    path, body = ASKS["completion"]
    with Raw(port_of(stack)) as raw:
        raw.post(path, body, EVENTS, f"Last-Event-ID: {events[0].id}")
        assert raw.read().error["param"] == "last-event-id"
        raw.send(
            f"HEAD /v1/streams/{told_by(events)['head'][0]} HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        assert raw.read(with_body=False).status == 405


# ---- who left ----------------------------------------------------------------------------------


def begun(played: Any, front: Front) -> tuple[bytes, str]:
    """A stream whose client has read "a" and left: its id, and the event's."""
    with Raw(front.port) as raw:
        raw.post("/v1/completions", COMPLETION, EVENTS)
        handle = played.expect_and_accept()
        played.send(deltas(Entry(handle, "a", ids=[7])))
        (event,) = events_of(read_some(raw, 1))
    return parse_event_id(event.id).answer.first, event.id


@pytest.mark.process
def test_who_left_is_waited_for_and_then_its_streams_end(played):
    front = Front(played.address, limits=Limits(resume_s=0.05))
    try:
        stream_id, _ = begun(played, front)
        assert played.expect(Abort).stream_id == stream_id
    finally:
        front.stop()
    played.expect(Goodbye)


@pytest.mark.process
def test_who_comes_back_in_time_finds_its_streams_running(played):
    front = Front(played.address, limits=Limits(resume_s=1000.0))
    try:
        stream_id, event_id = begun(played, front)
        with Raw(front.port) as raw:
            raw.send(f"GET /v1/streams/{event_id.split('/')[0]} HTTP/1.1\r\nHost: localhost\r\n")
            raw.send(f"Last-Event-ID: {event_id}\r\n\r\n")
            resume = played.expect(Resume)
        assert (resume.stream_id, resume.num_chars, resume.num_tokens) == (stream_id, 1, 1)
    finally:
        front.stop()
    played.expect(Goodbye)


@pytest.mark.process
def test_a_get_whose_stream_is_lost_before_it_goes_on_is_one_of_an_unknown_stream(played):
    """As worker and core die behind another front than the one that the request was sent to."""
    before = Front(played.address, limits=Limits(resume_s=1000.0))
    try:
        stream_id, event_id = begun(played, before)
    finally:
        before.stop()
    played.expect(Goodbye)
    front = Front(played.address)
    try:
        with Raw(front.port) as raw:
            raw.send(f"GET /v1/streams/{event_id.split('/')[0]} HTTP/1.1\r\nHost: localhost\r\n")
            raw.send(f"Last-Event-ID: {event_id}\r\n\r\n")
            resume = played.expect(Resume)
            assert resume.stream_id == stream_id
            played.accept(resume)
            played.send(UnknownStreams((resume.handle,)))
            refused = raw.read()
        assert (refused.status, refused.error["code"]) == (404, "unknown_stream")
        assert "POST the same request" in refused.error["message"]
    finally:
        front.stop()
    played.expect(Goodbye)


# ---- ids ---------------------------------------------------------------------------------------

numbers = st.integers(0, 2**32 - 1)
cursors = st.just(StreamCursor(has_begun=False)) | st.builds(
    StreamCursor,
    *(numbers, numbers, numbers, numbers, st.binary(max_size=3), st.booleans()),
    has_called=st.booleans(),
)


@st.composite
def ids_of_events(draw: st.DrawFn) -> EventId:
    answer = AnswerId(
        draw(st.sampled_from(["cmpl", "chatcmpl"])),
        draw(st.binary(min_size=16, max_size=16)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
    )
    num_logprobs = draw(st.none() | st.integers(0, 9_999_999))
    found = draw(st.lists(cursors, min_size=answer.num_streams, max_size=answer.num_streams))
    if num_logprobs is None:
        found = [replace(cursor, text_offset=0, pending=b"") for cursor in found]
    with_usage = draw(st.booleans())
    is_told = with_usage and draw(st.booleans())
    usage = (with_usage, with_usage and draw(st.booleans()))
    request = draw(st.none() | numbers)
    has_all = num_logprobs is not None and draw(st.booleans())
    told = (tuple(found), is_told, request, has_all)
    return EventId(answer, draw(numbers), num_logprobs, *usage, *told)


@given(ids_of_events())
def test_an_events_id_says_all_there_is(event_id):
    line = EventIdWriter(event_id).line()
    assert line.startswith(b"id: ")
    assert line.isascii()
    assert parse_event_id(line.decode()[4:-1]) == event_id
    assert parse_answer_id(str(event_id.answer)) == event_id.answer
    ids = event_id.answer.stream_ids()
    assert len(set(ids)) == len(ids) == event_id.answer.num_streams
    assert ids[0] == event_id.answer.first.hex()


@given(st.text(max_size=80) | st.from_regex(r"(cmpl|chatcmpl)-[0-9a-f./xlucU,e]{0,60}"))
def test_what_is_no_events_id_is_refused(text):
    event_id = None
    with contextlib.suppress(ApiError):
        event_id = parse_event_id(text)
    if event_id is not None:
        assert EventIdWriter(event_id).line().decode() == f"id: {text}\n"
