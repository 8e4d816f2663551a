"""Streams that go on where their client was, over another connection. What the deaths of processes
do to them is in tests/system/streams/test_resumed_streams.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tests.helpers.fake_worker import Entry, deltas
from tests.helpers.http_front import Front, Raw
from tests.helpers.played_responses import port_of
from tests.helpers.resumed_streams import (
    ASKS,
    COMPLETION,
    EVENTS,
    Event,
    events_of,
    read_some,
    told_by,
)

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


def whole(chain_stack: Stack, ask: str, *headers: str) -> list[Event]:
    path, body = ASKS[ask]
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, body, EVENTS, *headers)
        answer = raw.read()
    assert answer.status == 200, answer.body
    return events_of(answer.body)


@pytest.mark.process
@pytest.mark.parametrize("ask", ASKS)
def test_last_event_id_gets_the_rest_whichever_event_it_was(chain_stack, ask):
    events = whole(chain_stack, ask)
    expected = told_by(events)
    assert expected["done"] == [1]
    answer_id = expected["head"][0]
    with Raw(port_of(chain_stack)) as raw:
        for at in range(1, len(events) + 1):
            last = f"Last-Event-ID: {events[at - 1].id}"
            rest = events_of(raw.get(f"/v1/streams/{answer_id}", last).body)
            if at < len(events):
                assert told_by(events[:at] + rest) == expected, at
            else:  # and so it says however often it is asked
                assert rest == events[-1:]


@pytest.mark.process
@pytest.mark.parametrize("ask", ASKS)
def test_the_same_request_again_gets_the_rest(chain_stack, ask):
    events = whole(chain_stack, ask)
    middle = len(events) // 2
    rest = whole(chain_stack, ask, f"Last-Event-ID: {events[middle - 1].id}")
    assert told_by(events[:middle] + rest) == told_by(events)


@pytest.mark.process
@pytest.mark.parametrize("change", [{"seed": 6}, {"max_tokens": 5}, {"n": 2}])
def test_another_body_does_not_get_the_events_stream(chain_stack, change):
    events = whole(chain_stack, "chat")
    path, body = ASKS["chat"]
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, {**body, **change}, EVENTS, f"Last-Event-ID: {events[3].id}")
        refused = raw.read()
    assert (refused.status, refused.error["param"]) == (409, "last-event-id")
    assert "another request" in refused.error["message"]


@pytest.mark.process
def test_the_id_of_an_answer_gets_it_from_the_beginning(chain_stack):
    events = whole(chain_stack, "chat, logprobs")
    expected = told_by(events)
    path = f"/v1/streams/{expected['head'][0]}?logprobs=2&include_usage=true"
    with Raw(port_of(chain_stack)) as raw:
        again = told_by(events_of(raw.get(path).body))
        last = f"/v1/streams/{expected['head'][0]}?last_event_id={events[2].id}"
        rest = events_of(raw.get(last).body)
    again["head"][1] = expected["head"][1]  # when: it is not kept
    assert again == expected
    assert told_by(events[:3] + rest) == expected


@pytest.mark.process
def test_who_does_not_ask_for_events_with_ids_gets_one_line_to_an_event(chain_stack):
    """Benchmark clients take every line for data."""
    path, body = ASKS["completion"]
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, body)
        answer = raw.read()
    assert answer.events[-1] == "[DONE]"
    assert b"id: " not in answer.body


@pytest.mark.process
def test_a_client_that_comes_back_in_the_middle_gets_the_rest(chain_stack):
    path, body = ASKS["completion"]
    body = {**body, "max_tokens": 400, "ignore_eos": True}
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, body, EVENTS)
        expected = told_by(events_of(raw.read().body))
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, body, EVENTS)
        events = events_of(read_some(raw, 5))
    while "done" not in told_by(events):
        with Raw(port_of(chain_stack)) as raw:
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
def test_an_id_of_an_earlier_version_is_refused_and_says_so(chain_stack):
    path, body = ASKS["completion"]
    with Raw(port_of(chain_stack)) as raw:
        raw.post(path, body, EVENTS, f"Last-Event-ID: cmpl-{32 * '1'}/1700000000l2u/12.3.12.")
        answer = raw.read()
    assert answer.status == 400
    assert "earlier version" in answer.error["message"]


def test_a_request_is_known_again_whoever_sends_it_and_whatever_it_is_called():
    submit = Submit(7, bytes(16), b"\x80", text="Once")
    other = {"handle": 1, "stream_id": b"x" * 16, "label": "me", "tenant": b"key"}
    other |= {"adapter_digest": b"version"}
    assert checksum_of([structs.replace(submit, **other)], 1) == checksum_of([submit], 1)
    for changed in ({"text": "Twice"}, {"adapter": "sql"}):
        assert checksum_of([structs.replace(submit, **changed)], 1) != checksum_of([submit], 1)


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
def test_wrong_ids_are_refused(chain_stack, path, headers, status, param):
    with Raw(port_of(chain_stack)) as raw:
        answer = raw.get(f"/v1/streams/{path}", *headers)
    assert (answer.status, answer.error["param"]) == (status, param)


@pytest.mark.process
def test_an_event_of_a_chat_is_none_of_a_completion(chain_stack):
    events = whole(chain_stack, "chat")
    path, body = ASKS["completion"]
    with Raw(port_of(chain_stack)) as raw:
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
