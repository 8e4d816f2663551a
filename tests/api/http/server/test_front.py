"""The front's process over raw sockets, with a worker that says exactly what a test wants."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack
from datetime import datetime

import psutil
import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import JSON, Front, Raw, events_of
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.ports import free_port

from slipstream.http.config import Limits
from slipstream_ipc.messages import (
    Abort,
    End,
    Fault,
    Goodbye,
    LogprobColumns,
    PromptLogprobs,
    Resume,
    Submit,
)
from slipstream_ipc.transport.codec import decode_params

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
ASKS = {"prompt": "hi", "max_tokens": 5}
STREAMS = {**ASKS, "stream": True}
CHATS = {"messages": [{"role": "user", "content": "hi"}]}


def say(played: FakeWorker, handle: int, text: str, chars: int = 0, reason: str | None = None):
    """Some of a stream, and its end where there is a reason."""
    end = None if reason is None else End(reason, chars + len(text))
    played.send(deltas(Entry(handle, text, chars, end=end)))


def begun(played: FakeWorker, raw: Raw, **fields: object) -> int:
    """A stream that has said "a"; its handle."""
    raw.post(COMPLETIONS, {**STREAMS, **fields})
    handle = played.expect_and_accept()
    say(played, handle, "a")
    head = raw.read_until(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nContent-Type: text/event-stream; charset=utf-8\r\n" in head
    assert raw.read_event()["choices"][0]["text"] == "a"
    return handle


# ---- answers -----------------------------------------------------------------------------------


def test_a_stream_comes_piece_by_piece_and_ends_with_done(played, raw):
    handle = begun(played, raw)
    say(played, handle, "b", 1)
    event = raw.read_event()
    assert event["choices"] == [{"index": 0, "text": "b", "logprobs": None, "finish_reason": None}]
    assert (event["object"], event["model"]) == ("text_completion", "fake")
    assert "usage" not in event
    say(played, handle, "c", 2, "length")
    assert raw.read_event()["choices"][0] == {
        "index": 0,
        "text": "c",
        "logprobs": None,
        "finish_reason": "length",
    }
    assert raw.read_event() == "[DONE]"
    assert raw.read_chunk() == b""
    assert raw.get("/health").status == 200  # the connection goes on


def test_a_chat_says_its_role_first_and_its_usage_last(played, raw):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw.post(CHAT, {**CHATS, **options})
    submit = played.expect(Submit)
    assert decode_params(submit.params).max_tokens is None
    handle = played.accept(submit, prompt_ids=[1, 2, 3])
    say(played, handle, "ab")
    raw.read_until(b"\r\n\r\n")
    first, text = raw.read_event(), raw.read_event()
    say(played, handle, "", 2, "stop")
    last, end = raw.read_event(), raw.read_chunk()
    usage, done = events_of(end)
    assert first["object"] == "chat.completion.chunk"
    assert first["id"] == last["id"] == f"chatcmpl-{submit.stream_id.hex()}"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text["choices"][0]["delta"] == {"content": "ab"}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert first["usage"] is text["usage"] is last["usage"] is None
    assert usage["choices"] == []
    assert usage["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert done == "[DONE]"


Told = tuple[list[int], list[int] | None]


def usage_of(event: dict) -> Told:
    """Of a chunk of a stream: its choices, and prompt, output and all tokens."""
    usage = event.get("usage")
    counts = usage and [num for name, num in usage.items() if not name.endswith("_details")]
    return [each["index"] for each in event["choices"]], counts


def usages_of(raw: Raw) -> list[Told]:
    """The same of a whole stream."""
    *events, done = raw.read().events
    assert done == "[DONE]"
    return [usage_of(event) for event in events]


def test_each_chunk_tells_the_usage_of_its_choice_so_far_where_it_is_asked_to(played, raw):
    options = {"include_usage": True, "continuous_usage_stats": True}
    raw.post(COMPLETIONS, {**STREAMS, "prompt": ["x", "y"], "stream_options": options})
    one = played.accept(played.expect(Submit), prompt_ids=[1, 2, 3])
    two = played.accept(played.expect(Submit), prompt_ids=[4])
    played.send(deltas(Entry(one, "ab"), Entry(two, "c")))
    raw.read_until(b"\r\n\r\n")
    # each is read before more is said: a front that is late puts messages together
    assert usage_of(raw.read_event()) == ([0], [3, 2, 5])
    assert usage_of(raw.read_event()) == ([1], [1, 1, 2])
    say(played, one, "de", 2, "stop")
    assert usage_of(raw.read_event()) == ([0], [3, 4, 7])
    say(played, two, "", 1, "stop")
    assert usage_of(raw.read_event()) == ([1], [1, 1, 2])
    last, done = events_of(raw.read_chunk())
    assert (usage_of(last), done) == (([], [4, 5, 9]), "[DONE]")


@pytest.mark.parametrize("is_wanted", [False, True])
def test_a_role_has_taken_the_prompt_alone_and_usage_so_far_goes_with_usage(played, raw, is_wanted):
    options = {"include_usage": is_wanted, "continuous_usage_stats": True}
    raw.post(CHAT, {**CHATS, "stream": True, "stream_options": options})
    say(played, played.expect_and_accept(), "ab", 0, "stop")
    told = usages_of(raw)
    if is_wanted:
        assert told == [([0], [2, 0, 2]), ([0], [2, 2, 4]), ([], [2, 2, 4])]
    else:
        assert told == [([0], None), ([0], None)]


def test_an_answer_at_once(played, raw):
    raw.post(CHAT, CHATS)
    handle = played.expect_and_accept()
    say(played, handle, "ab")
    say(played, handle, "c", 2, "stop")
    answer = raw.read()
    assert answer.headers["content-type"] == "application/json"
    assert answer.json["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "abc", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer.json["usage"]["completion_tokens"] == 3


def test_each_prompt_has_a_choice(played, raw):
    raw.post(COMPLETIONS, {**ASKS, "prompt": ["x", "y"]})
    one, two = played.expect_and_accept(), played.expect_and_accept()
    say(played, two, "second", 0, "stop")
    say(played, one, "first", 0, "length")
    choices = raw.read().json["choices"]
    assert [(each["index"], each["text"]) for each in choices] == [(0, "first"), (1, "second")]


def test_each_prompt_has_its_part_of_a_stream(played, raw):
    handle = begun(played, raw, prompt=["x", "y"])
    other = played.expect_and_accept()
    say(played, other, "b", 0, "stop")
    say(played, handle, "", 1, "length")
    one, two, done = raw.read_event(), raw.read_event(), raw.read_event()
    assert (one["choices"][0]["index"], one["choices"][0]["text"]) == (1, "b")
    assert (two["choices"][0]["index"], two["choices"][0]["finish_reason"]) == (0, "length")
    assert done == "[DONE]"


def test_separators_inside_a_text_break_no_event(played, raw):
    handle = begun(played, raw)
    text = "x\u0085y\u2028z\u2029\x0b\x0c\x1c\x1d\x1e\r\n\x00\x7fé𝄞\ufeff"
    say(played, handle, text, 1)
    assert raw.read_event()["choices"][0]["text"] == text
    say(played, handle, "", 1 + len(text), "stop")
    assert raw.read_event()["choices"][0]["finish_reason"] == "stop"


def test_text_that_is_not_there_yet_makes_no_event(played, raw):
    handle = begun(played, raw)
    played.send(deltas(Entry(handle, "", 1, 1, ids=[7])))
    played.send(deltas(Entry(handle, "é", 1, 2, ids=[8])))
    assert raw.read_event()["choices"][0]["text"] == "é"
    say(played, handle, "", 2, "stop")
    assert raw.read_event()["choices"][0]["finish_reason"] == "stop"


def test_what_a_link_repeats_is_said_once(played, raw):
    handle = begun(played, raw)
    say(played, handle, "ab")
    assert raw.read_event()["choices"][0]["text"] == "b"
    say(played, handle, "", 2, "stop")
    assert raw.read_event()["choices"][0]["finish_reason"] == "stop"


def test_a_worker_that_is_attached_anew_goes_on(played, raw):
    handle = begun(played, raw)
    played.tell_to_attach()
    assert not played.hellos.get(timeout=PATIENCE_S).fresh
    resume = played.expect(Resume)
    assert (resume.num_chars, resume.num_tokens) == (1, 1)
    say(played, resume.handle, "b", 1, "stop")
    assert raw.read_event()["choices"][0]["text"] == "b"
    assert handle == resume.handle


# ---- failures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "status", "code", "param"),
    [
        (Fault("bad_request", "prompt: too long", "prompt"), 400, None, "messages"),
        (Fault("bad_request", "max_tokens: 9", "max_tokens"), 400, None, "max_tokens"),
        (Fault("overloaded", "full"), 503, "overloaded", None),
        (Fault("engine", "broken"), 500, "engine_error", None),
    ],
)
def test_what_the_engine_does_not_take(played, raw, fault, status, code, param):
    for options in ({}, {"stream": True}):
        raw.post(CHAT, {**CHATS, **options})
        played.reject(played.expect(Submit), fault)
        answer = raw.read()
        assert (answer.status, answer.error["code"]) == (status, code)
        assert answer.error["message"] == fault.message.replace("prompt:", "messages:")
        assert answer.error["param"] == param
        kind = "invalid_request_error" if status < 500 else "server_error"
        assert answer.error["type"] == kind
        assert ("retry-after" in answer.headers) == (status == 503)


def test_a_failure_in_the_middle_is_a_streams_last_event(played, raw):
    handle = begun(played, raw)
    end = End("error", 2, fault=Fault("engine", "it broke"))
    played.send(deltas(Entry(handle, "b", 1, end=end)))
    assert raw.read_event()["choices"][0]["text"] == "b"
    error = raw.read_event()["error"]
    assert (error["message"], error["code"]) == ("it broke", "engine_error")
    assert raw.read_chunk() == b""
    assert raw.get("/health").status == 200


def test_a_stream_that_fails_before_its_first_text_has_a_status(played, raw):
    raw.post(COMPLETIONS, STREAMS)
    handle = played.expect_and_accept()
    played.send(deltas(Entry(handle, "", end=End("error", 0, fault=Fault("engine", "no")))))
    assert raw.read().status == 500


def test_what_somebody_aborts_ends_with_what_had_come(played, raw):
    raw.post(COMPLETIONS, ASKS)
    say(played, played.expect_and_accept(), "x", 0, "abort")
    (choice,) = raw.read().json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("x", "abort")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("has_begun", [False, True])
def test_an_abort_before_the_prompts_log_probabilities_is_an_end_and_no_fault(
    played, raw, is_stream, has_begun
):
    raw.post(COMPLETIONS, {**ASKS, "echo": True, "logprobs": 1, "stream": is_stream})
    handle = played.accept(played.expect(Submit), prompt_ids=[300, 301, 302])
    if has_begun:  # one of two is there
        piece = LogprobColumns(2, b"\0" * 8, b"\1\0\0\0\2\0\0\0", b"\1\0\0\0")
        played.send(PromptLogprobs(handle, 0, piece))
    say(played, handle, "", 0, "abort")
    answer = raw.read()
    assert answer.status == 200
    if is_stream:
        *events, done = answer.events
        assert done == "[DONE]"
    else:
        events = [answer.json]
    (choice,) = [choice for event in events for choice in event["choices"]]
    assert (choice["text"], choice["finish_reason"]) == ("hi", "abort")
    assert choice["logprobs"] is None


def test_one_prompt_that_fails_ends_the_others(played, raw):
    handle = begun(played, raw, prompt=["x", "y"])
    other = played.expect(Submit)
    played.reject(other, Fault("overloaded", "full"))
    assert raw.read_event()["error"]["code"] == "overloaded"
    assert raw.read_chunk() == b""
    played.expect(Abort)
    assert handle >= 0


# ---- clients that leave, or do not read --------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("kind", ["stream", "ahead", "whole", "unaccepted"])
def test_who_leaves_has_its_requests_aborted(played, front, how, kind):
    with Raw(front.port) as raw:
        if kind in ("stream", "ahead"):
            raw.post(COMPLETIONS, STREAMS)
            submit = played.expect(Submit)
            played.accept(submit)
            say(played, submit.handle, "a")
            raw.read_until(b"data: ")
            if kind == "ahead":
                raw.post(COMPLETIONS, ASKS)
        else:
            raw.post(COMPLETIONS, ASKS)
            submit = played.expect(Submit)
            if kind == "whole":
                played.accept(submit)
        if how == "half-close":
            raw.socket.shutdown(socket.SHUT_WR)
        elif how == "reset":
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            raw.socket.close()
        else:
            raw.socket.close()
        assert played.expect(Abort).stream_id == submit.stream_id
        if how == "half-close":
            raw.read_to_end()  # the server has ended its half, too


def test_who_leaves_has_all_its_prompts_aborted(played, front):
    with Raw(front.port) as raw:
        raw.post(COMPLETIONS, {**STREAMS, "prompt": ["x", "y", "z"]})
        submits = {played.expect(Submit).stream_id for _ in range(3)}
    assert {played.expect(Abort).stream_id for _ in range(3)} == submits


def test_a_slow_reader_gets_everything_in_fewer_events(played, front):
    """What the kernel and the transport do not take is held, merged, and sent when they do."""
    with Raw(front.port, receive_buffer=4096) as raw, Raw(front.port) as other:
        raw.post(COMPLETIONS, STREAMS)
        handle = played.expect_and_accept()
        num = 400
        piece = "x" * 20_000  # eight megabytes in all: more than the kernel's buffers
        for index in range(num):
            played.send(deltas(Entry(handle, piece, index * len(piece), index, ids=[1])))
        other.post(COMPLETIONS, ASKS)  # it hinders nobody
        say(played, played.expect_and_accept(), "quick", 0, "stop")
        assert other.read().json["choices"][0]["text"] == "quick"
        end = End("stop", num)
        played.send(deltas(Entry(handle, "", num * len(piece), num, ids=[], end=end)))
        events = raw.read().events
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == piece * num
    assert len(texts) < num
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


def test_who_never_reads_is_dropped(played, front):
    with Raw(front.port, receive_buffer=4096) as raw, Raw(front.port) as other:
        raw.post(COMPLETIONS, STREAMS)
        submit = played.expect(Submit)
        played.accept(submit)
        handle = begun(played, other)
        piece = "x" * 500_000
        for index in range(60):  # thirty megabytes; eight may be held
            played.send(deltas(Entry(submit.handle, piece, index * len(piece), index, ids=[1])))
            say(played, handle, "b", 1 + index)
            assert other.read_event()["choices"][0]["text"] == "b"  # the piece has been taken in
        assert played.expect(Abort).stream_id == submit.stream_id
        assert len(raw.read_to_end()) < 60 * len(piece)
        say(played, handle, "", 61, "stop")
        assert other.read_event()["choices"][0]["finish_reason"] == "stop"


def test_who_reads_nothing_for_too_long_is_dropped(worker):
    """Also where the kernel and we could hold all of its answer."""
    front = Front(worker.address, limits=Limits(stall_s=0.2))
    piece = "x" * 500_000
    try:
        with Raw(front.port, receive_buffer=4096) as slow, Raw(front.port) as other:
            slow.post(COMPLETIONS, STREAMS)
            submit = worker.expect(Submit)
            worker.accept(submit)
            handle = begun(worker, other)
            for index in range(14):  # seven megabytes; eight may be held
                worker.send(deltas(Entry(submit.handle, piece, index * len(piece), index, ids=[1])))
            assert worker.expect(Abort).stream_id == submit.stream_id
            say(worker, handle, "b", 1)
            assert other.read_event()["choices"][0]["text"] == "b"
            say(worker, handle, "", 2, "stop")
            assert len(slow.read_to_end()) < 14 * len(piece)
    finally:
        front.stop()


def test_what_is_asked_for_behind_an_answer_that_is_not_read_is_dropped_with_it(worker):
    front = Front(worker.address, limits=Limits(stall_s=0.2, connections=1))
    try:
        with Raw(front.port, receive_buffer=4096) as raw:
            raw.post(COMPLETIONS, ASKS)
            raw.post(COMPLETIONS, STREAMS)
            whole = Entry(worker.expect_and_accept(), "x" * 8_000_000, ids=[1], end=End("stop", 1))
            worker.send(deltas(whole))
            with Raw(front.port) as other:  # is heard when the first has been dropped
                other.post(COMPLETIONS, {**ASKS, "prompt": "other"})
                submit = worker.expect(Submit)
                assert submit.text == "other"
                say(worker, worker.accept(submit), "x", 0, "stop")
                assert other.read().status == 200
            assert len(raw.read_to_end()) < 8_000_000
    finally:
        front.stop()


def whole(worker: FakeWorker, raw: Raw, text: str) -> None:
    """A request that is not streamed, and its answer."""
    raw.post(COMPLETIONS, ASKS)
    end = End("stop", len(text))
    worker.send(deltas(Entry(worker.expect_and_accept(), text, ids=[1], end=end)))


@pytest.mark.process
@pytest.mark.parametrize("reads", ["nothing", "a little"])
def test_who_takes_no_whole_answer_is_dropped_and_hinders_nobody(worker, reads):
    """Also a client that takes a few bytes now and then: the kernel passes on a third of its buffer
    at a time, so these are no progress.
    """
    front = Front(worker.address, limits=Limits(stall_s=0.5, connections=2))
    text = "x" * 8_000_000
    memory = psutil.Process(front.process.pid).memory_info
    try:
        with Raw(front.port) as other:
            handle = begun(worker, other)
            num, most = 1, 0
            for turn in range(6):
                with ExitStack() as stack:
                    slow = stack.enter_context(Raw(front.port, receive_buffer=4096))
                    whole(worker, slow, text)
                    late = stack.enter_context(Raw(front.port))
                    late.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    patience = Patience()
                    # it is heard when the slow one has been dropped
                    while not select.select([late.socket], [], [], 0.02)[0]:
                        patience.check()
                        say(worker, handle, "b", num)
                        assert other.read_event()["choices"][0]["text"] == "b"
                        num += 1
                        if reads == "a little":
                            assert slow.socket.recv(1000)
                    assert late.read().status == 200
                    assert len(slow.read_to_end()) < len(text)
                most = memory().rss if turn == 1 else most
            patience = Patience()
            while memory().rss >= most + 2 * len(text):  # nothing of the others is left
                patience.wait()
            say(worker, handle, "", num, "stop")
            assert other.read_event()["choices"][0]["finish_reason"] == "stop"
    finally:
        front.stop()


# ---- HTTP --------------------------------------------------------------------------------------


def test_health_readiness_and_the_model(raw):
    assert raw.get("/health").json == {"status": "ok"}
    assert raw.get("/ready").json == {"status": "ready", "model": "fake"}
    models = raw.get("/v1/models").json
    assert (models["object"], [each["id"] for each in models["data"]]) == ("list", ["fake"])
    assert (models["first_id"], models["last_id"], models["has_more"]) == ("fake", "fake", False)
    [model] = models["data"]
    assert (model["type"], model["object"], model["display_name"]) == ("model", "model", "fake")
    assert datetime.fromisoformat(model["created_at"]).timestamp() == model["created"]
    assert raw.get("/v1/models/fake?x=y").json == model
    assert raw.get("/v1/models/f%61ke").status == 200
    missing = raw.get("/v1/models/other")
    assert (missing.status, missing.error["code"]) == (404, "model_not_found")


def test_a_head_alone(raw):
    raw.send("HEAD /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert raw.read(with_body=False).headers["content-length"] == "15"
    assert raw.get("/health").status == 200


def test_requests_sent_ahead_are_answered_in_order(played, front):
    with Raw(front.port) as raw:
        raw.post(COMPLETIONS, STREAMS)
        raw.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        raw.post(COMPLETIONS, ASKS)
        raw.send("GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50)
        for path in ("/nowhere", "/health"):
            raw.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n")
        say(played, played.expect_and_accept(), "one", 0, "stop")
        assert raw.read().events[0]["choices"][0]["text"] == "one"
        assert raw.read().json == {"status": "ok"}
        say(played, played.expect_and_accept(), "two", 0, "stop")
        assert raw.read().json["choices"][0]["text"] == "two"
        for _ in range(50):
            assert raw.read().json["object"] == "list"
        refused = raw.read()  # and nothing behind it
        assert (refused.status, refused.headers["connection"]) == (404, "close")
        assert raw.read_to_end() == b""


def test_bodies_may_come_in_chunks_and_late(played, raw):
    raw.send(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n")
    raw.send("Transfer-Encoding: chunked\r\n")
    raw.send('\r\n6\r\n{"prom\r\n')
    raw.send('b\r\npt": "hey"}\r\n0\r\n\r\n')
    submit = played.expect(Submit)
    assert submit.text == "hey"
    say(played, played.accept(submit), "x", 0, "stop")
    assert raw.read().status == 200


def test_who_asks_first_is_told_to_go_on(played, raw):
    raw.send(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 15\r\n")
    raw.send("Expect: 100-continue\r\n\r\n")
    assert raw.read().status == 100
    raw.send('{"prompt": "x"}')
    say(played, played.expect_and_accept(), "x", 0, "stop")
    assert raw.read().status == 200


def test_who_asks_first_may_be_refused(raw):
    raw.send(
        f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\nContent-Length: 100001\r\n"
    )
    raw.send("Expect: 100-continue\r\n\r\n")
    assert raw.read().status == 413


def test_old_http(played, front):
    with Raw(front.port) as raw:
        raw.post(COMPLETIONS, STREAMS, version="1.0")
        handle = played.expect_and_accept()
        say(played, handle, "x", 0, "stop")
        answer = raw.read()  # to the connection's end
        assert "transfer-encoding" not in answer.headers
        assert answer.events[-1] == "[DONE]"
    with Raw(front.port) as raw:
        raw.send("GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n" * 2)
        assert [raw.read().headers["connection"] for _ in range(2)] == ["keep-alive"] * 2


def test_a_connection_ends_when_it_is_asked_to(front):
    with Raw(front.port) as raw:
        raw.send("GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert raw.read().headers["connection"] == "close"
        assert raw.read_to_end() == b""


@pytest.mark.parametrize(
    ("request_line", "body", "status"),
    [
        ("GET /nowhere", b"", 404),
        ("GET /v1/completions", b"", 405),
        ("POST /health", b"{}", 405),
        ("DELETE /v1/models", b"", 405),
        ("POST /v1/completions", b"{", 400),
        ("POST /v1/completions", b'{"prompt": "\xff"}', 400),
        ("POST /v1/completions", b'{"prompt": 7}', 400),
        ("POST /v1/completions", b'{"prompt": "x", "top_k": "nonsense"}', 400),
        ("POST /v1/completions", b'{"prompt": "x", "best_of": 2}', 400),
        ("POST /v1/completions", b'{"prompt": "x", "model": "gpt-4"}', 404),
        ("POST /v1/completions", b'{"prompt": [1, 1000]}', 400),
        ("POST /v1/chat/completions", b'{"messages": "x"}', 400),
        ("POST /v1/completions", b'{"prompt": "' + b"x" * 100_000 + b'"}', 413),
    ],
)
def test_bad_requests(front, request_line, body, status):
    with Raw(front.port) as raw:
        head = f"{request_line} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n"
        raw.send(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = raw.read()
        assert answer.status == status
        assert answer.error["type"] == "invalid_request_error"
        if status == 405:
            assert answer.headers["allow"] in ("GET", "POST")
        if status == 400 and b"nonsense" in body:
            assert answer.error["param"] == "top_k"


def test_a_body_that_is_not_said_to_be_json_is_refused(front):
    with Raw(front.port) as raw:
        raw.send(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n")
        raw.send("Content-Length: 15\r\n\r\n" + '{"prompt": "x"}')
        assert raw.read().status == 415


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("identity", 400)])
def test_a_body_that_is_encoded_is_refused(front, encoding, status):
    body = b'{"prompt": "x", "max_tokens": -1}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += f"Content-Type: application/json\r\nContent-Encoding: {encoding}\r\n\r\n"
    with Raw(front.port) as raw:
        raw.send(head.encode() + body)
        answer = raw.read()
    assert answer.status == status
    if status == 415:
        assert answer.headers["accept-encoding"] == "identity"
        assert "gzip" in answer.error["message"]


def test_a_page_cannot_ask_by_leaving_out_what_the_body_is(front):
    """A browser sends a Blob without a type so, and asks nobody beforehand."""
    body = b'{"prompt": "x"}'
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    with Raw(front.port) as raw:
        raw.send((head + "Origin: https://evil.example\r\n\r\n").encode() + body)
        assert raw.read().status == 415


def test_a_refusal_arrives_however_much_the_client_still_sends(front):
    with Raw(front.port) as raw:
        raw.send(f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n{JSON}\r\n")
        raw.send(b"Content-Length: 90000000\r\n\r\n" + b"x" * 3_000_000)
        assert raw.read().status == 413
        assert raw.read_to_end() == b""


def test_who_is_too_slow_is_not_waited_for(worker):
    front = Front(worker.address, limits=Limits(header_s=0.1, body_s=0.1, linger_s=0.1))
    half = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{"
    try:
        for data in ("", "GET /health HT", half):
            with Raw(front.port) as raw:
                raw.send(data)
                if data:
                    assert raw.read().status == 408
                assert raw.read_to_end() == b""
    finally:
        front.stop()


# ---- keys, and the process's life --------------------------------------------------------------


def test_requests_with_a_key_are_for_their_own_tenant(played):
    front = Front(played.address, api_keys=("right", "also"))
    try:
        found = []
        for key in ("right", "also", "right"):
            with Raw(front.port) as raw:
                raw.post(COMPLETIONS, {"prompt": "x"}, f"Authorization: Bearer {key}")
                submit = played.expect(Submit)
                found.append(submit.tenant)
                played.reject(submit, Fault("overloaded", "no"))
                assert raw.read().status == 503
        assert found[0] == found[2] != found[1]
        assert {len(tenant) for tenant in found} == {16}
    finally:
        front.stop()


def test_keys(worker):
    front = Front(worker.address, api_keys=("right", "also"))
    try:
        with Raw(front.port) as raw:
            for path in ("/health", "/ready"):
                assert raw.get(path).status == 200
            for key in ("right", "also"):
                assert raw.get("/v1/models", f"Authorization: Bearer {key}").status == 200
            assert raw.get("/v1/models", "authorization: bearer right ").status == 200
        for given in ("Bearer wrong", "Bearer ", "Basic right", "right", "Bearer right also", None):
            with Raw(front.port) as raw:
                headers = [] if given is None else [f"Authorization: {given}"]
                answer = raw.get("/v1/models", *headers)
                assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        with Raw(front.port) as raw:  # before the body has come
            raw.send(
                f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n"
            )
            assert raw.read().status == 401
    finally:
        log = front.stop()
    assert "right" not in log


def test_the_end_of_the_process_ends_what_runs(worker):
    front = Front(worker.address)
    with Raw(front.port) as streamed, Raw(front.port) as whole, Raw(front.port) as idle:
        assert idle.get("/health").status == 200
        begun(worker, streamed)
        whole.post(COMPLETIONS, ASKS)
        worker.expect_and_accept()
        log = front.stop()
        error = streamed.read_event()["error"]
        assert error["message"] == "the server is shutting down"
        assert streamed.read_chunk() == b""
        assert whole.read().status == 503
        for each in (streamed, whole, idle):
            assert each.read_to_end() == b""
    worker.expect(Goodbye)
    assert front.process.returncode == 0
    assert "Traceback" not in log


@pytest.mark.parametrize(("is_leaving", "status"), [(True, 503), (False, 500)])
def test_what_a_worker_that_leaves_had_taken_may_be_asked_again(worker, is_leaving, status):
    """As at a planned restart, where the front's own end is a moment away."""
    front = Front(worker.address)
    with Raw(front.port) as streamed, Raw(front.port) as whole:
        begun(worker, streamed)
        whole.post(COMPLETIONS, ASKS)
        worker.expect_and_accept()
        worker.refuse(Fault("engine", "the server is shutting down"), is_leaving=is_leaving)
        answer = whole.read()
        assert (answer.status, answer.error["message"]) == (status, "the server is shutting down")
        assert ("retry-after" in answer.headers) == is_leaving
        assert streamed.read_event()["error"] == answer.error
        assert streamed.read_chunk() == b""
    front.stop()


def test_a_port_that_is_taken_is_named(address):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        front = Front(address, wait=False, port=port)
        error = front.status().error
        assert error.startswith(f"cannot listen at http://127.0.0.1:{port}: ")
        assert "http_port" in error
        front.process.wait(PATIENCE_S)
        front.stop()
    assert front.process.returncode == 1


def test_without_a_worker_it_lives_but_is_not_ready(address):
    port = free_port()
    front = Front(address, wait=False, port=port)
    try:
        patience = Patience()
        while True:
            patience.check("it listens nowhere")
            try:
                raw = Raw(port)
                break
            except ConnectionRefusedError:
                assert front.process.poll() is None
        with raw:
            assert raw.get("/health").status == 200
            not_ready = raw.get("/ready")
            assert (not_ready.status, not_ready.error["code"]) == (503, "not_ready")
            assert not_ready.headers["retry-after"]
            raw.post(COMPLETIONS, ASKS)
            assert raw.read().status == 503
            worker = FakeWorker(address)
            assert front.status().ready
            assert raw.get("/ready").status == 200
            worker.stop()
    finally:
        front.stop()


def test_more_connections_than_there_may_be_wait_for_one_to_end(worker):
    """They would take the last descriptors, and libzmq ends a process that has none."""
    front = Front(worker.address, limits=Limits(connections=3))
    busy = [Raw(front.port) for _ in range(3)]
    handles = [begun(worker, one) for one in busy]
    with Raw(front.port) as late:
        late.send("GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for at in range(5):
            for one, handle in zip(busy, handles, strict=True):
                say(worker, handle, "b", 1 + at)
                assert one.read_event()["choices"][0]["text"] == "b"
        assert not select.select([late.socket], [], [], 0)[0]
        busy.pop().socket.close()
        assert late.read().status == 200
    for one in busy:
        one.socket.close()
    assert "the limit of connections is reached" in front.stop()
