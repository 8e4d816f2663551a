"""The blocking client against a worker that the test plays."""

from __future__ import annotations

import gc
import os
import random
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.fake_worker import Entry, FakeWorker, deltas, end_of
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.played_answers import answer

from slipstream import (
    BadRequestError,
    Client,
    ClosedError,
    ConflictError,
    ConnectionLostError,
    Delta,
    EngineError,
    OverloadedError,
    RequestError,
    SamplingParams,
    SlipstreamError,
    Stream,
    StreamLostError,
    SupersededError,
    UnknownStreamError,
)
from slipstream.client.endpoints import LOCK_NAME
from slipstream.client.server_presence import why_absent
from slipstream_ipc import messages
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.history.token_log import history_digest
from slipstream_ipc.messages import (
    Abort,
    Accepted,
    ChatMessage,
    Deltas,
    End,
    Fault,
    Goodbye,
    Rejected,
    Resume,
    Submit,
    Superseded,
    UnknownStreams,
)
from slipstream_ipc.transport.codec import client_codec, decode_params


@pytest.fixture
def client(worker: FakeWorker) -> Any:
    with Client(worker.address) as found:
        yield found


def start(client: Client, worker: FakeWorker, **options: Any) -> tuple[Stream, int]:
    """A stream that was accepted, and its handle."""
    stream = client.stream("once", **options)
    return stream, worker.expect_and_accept()


# ---- what a stream yields ------------------------------------------------------------------


def test_stream_yields_deltas_in_order(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    assert stream.finish_reason is None
    worker.send(deltas(Entry(handle, "a")), deltas(Entry(handle, "bc", 1)))
    worker.send(deltas(Entry(handle, "d", 3, end=end_of("abcd", stop_reason="x"))))
    found = list(stream)
    assert [delta.text for delta in found] == ["a", "bc", "d"]
    assert [delta.token_ids for delta in found] == [[97], [98, 99], [100]]
    assert [delta.num_tokens for delta in found] == [1, 2, 1]
    assert [delta.finish_reason for delta in found] == [None, None, "stop"]
    assert [delta.stop_reason for delta in found] == [None, None, "x"]
    assert (stream.text, stream.finish_reason) == ("abcd", "stop")
    assert stream.prompt_token_ids == [1, 2]
    assert next(stream, None) is None


def test_delta_is_yielded_before_the_next_one_is_there(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    for index, char in enumerate("abc"):
        worker.send(deltas(Entry(handle, char, index)))
        assert next(stream).text == char


def test_cumulative_and_final_outputs(client: Client, worker: FakeWorker) -> None:
    for kind, texts in (("cumulative", ["a", "abc", "abc"]), ("final", ["abc"])):
        stream, handle = start(client, worker, output_kind=kind)
        worker.send(deltas(Entry(handle, "a")), deltas(Entry(handle, "bc", 1)))
        worker.send(deltas(Entry(handle, "", 3, ids=(), end=end_of("abc", "length"))))
        found = list(stream)
        assert [delta.text for delta in found] == texts
        assert found[-1].token_ids == [97, 98, 99]
        assert found[-1].finish_reason == stream.finish_reason == "length"
        assert stream.text == "abc"


def test_generate_returns_the_whole(client: Client, worker: FakeWorker) -> None:
    worker.script = lambda worker, body: answer(worker, body, "hello there")
    completion = client.generate("once", label="mine", max_tokens=3)
    assert completion.text == "hello there"
    assert completion.token_ids == [ord(char) for char in "hello there"]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert completion.prompt_token_ids == [1, 2]
    assert (completion.label, len(completion.id)) == ("mine", 32)
    assert completion.logprobs is None


def test_generate_many_keeps_the_order_of_prompts(client: Client, worker: FakeWorker) -> None:
    submits = []

    def script(worker: FakeWorker, body: Any) -> None:
        submits.append(body)
        if len(submits) == 3:
            for submit in reversed(submits):
                answer(worker, submit, submit.text * 2)

    worker.script = script
    done: list[str] = []
    found = client.generate_many(
        ["one", "two", "six"],
        [SamplingParams(max_tokens=n) for n in (4, 5, 6)],
        on_done=lambda completion: done.append(completion.text),
    )
    assert [completion.text for completion in found] == ["oneone", "twotwo", "sixsix"]
    assert sorted(done) == ["oneone", "sixsix", "twotwo"]
    assert [decode_params(submit.params).max_tokens for submit in submits] == [4, 5, 6]
    assert client.generate_many([]) == []
    with pytest.raises(BadRequestError, match="2 for 2 prompts"):
        client.generate_many(["a", "b"], [SamplingParams()])


def test_more_prompts_than_may_be_in_flight(
    client: Client, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.client.client.MAX_IN_FLIGHT", 3)
    worker.script = lambda worker, body: answer(worker, body, body.text)
    prompts = [f"prompt {index}" for index in range(50)]
    assert [found.text for found in client.generate_many(prompts)] == prompts


def test_first_failure_of_generate_many_aborts_the_rest(client: Client, worker: FakeWorker) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate_many, ["a", "b"])
        first, second = worker.expect(Submit), worker.expect(Submit)
        worker.reject(first, Fault("overloaded", "full"))
        assert worker.expect(Abort).stream_id == second.stream_id
        with pytest.raises(OverloadedError, match="full"):
            running.result(PATIENCE_S)


def test_slow_reader_loses_nothing(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    for position in range(200):
        worker.send(deltas(Entry(handle, "x", position)))
    worker.send(deltas(Entry(handle, "", 200, ids=(), end=end_of("x" * 200))))
    other, handle = start(client, worker)  # so the first has arrived as a whole
    worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
    assert "".join(delta.text for delta in other) == "y"
    assert "".join(delta.text for delta in stream) == "x" * 200


def test_many_streams_from_many_threads(client: Client, worker: FakeWorker) -> None:
    live: list[Submit] = []

    def script(worker: FakeWorker, body: Any) -> None:
        worker.accept_from_script(body)
        live.append(body)
        if len(live) < 32:
            return
        for position in range(20):
            end = end_of("x" * 20) if position == 19 else None
            worker.post(
                deltas(
                    *(
                        Entry(each.handle, each.text or "", position, ids=[position], end=end)
                        for each in live
                    )
                )
            )

    worker.script = script
    with ThreadPoolExecutor(32) as pool:
        texts = list(pool.map(lambda n: read(client.stream(chr(97 + n % 26))), range(32)))
    assert texts == [chr(97 + n % 26) * 20 for n in range(32)]


def read(stream: Stream) -> str:
    return "".join(delta.text for delta in stream)


# ---- acceptance ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["delta", "cumulative", "final"])
def test_accepted_waits_for_the_server(client: Client, worker: FakeWorker, kind: Any) -> None:
    stream = client.stream("x", output_kind=kind)
    submit = worker.expect(Submit)
    with pytest.raises(TimeoutError, match=r"in 0\.01 s"):
        stream.accepted(timeout_s=0.01)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stream.accepted)
        patience = Patience()
        while stream._state.wakeup is None:
            patience.wait("it does not wait")
        handle = worker.accept(submit)
        waiting.result(PATIENCE_S)
    stream.accepted(timeout_s=0)
    assert stream.prompt_token_ids == [1, 2]
    worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
    assert [delta.text for delta in stream] == ["y"]
    stream.accepted()


def test_accepted_raises_what_the_server_refuses_with(client: Client, worker: FakeWorker) -> None:
    stream = client.stream("x")
    worker.reject(worker.expect(Submit), Fault("overloaded", "full"))
    for wait in (stream.accepted, stream.accepted, stream.__next__):
        with pytest.raises(OverloadedError, match="full"):
            wait()
    unknown = client.resume("ab" * 16)
    worker.send(UnknownStreams((worker.expect(Resume).handle,)))
    with pytest.raises(UnknownStreamError):
        unknown.accepted()
    failed, handle = start(client, worker)
    end = end_of("", "error", fault=Fault("engine", "broken"))
    worker.send(deltas(Entry(handle, "", end=end)))
    failed.accepted()  # it was, and failed later
    with pytest.raises(EngineError, match="broken"):
        next(failed)


def test_what_was_closed_is_not_accepted(client: Client, worker: FakeWorker) -> None:
    stream = client.stream("x")
    worker.expect(Submit)
    stream.close()
    with pytest.raises(ClosedError, match="before it was accepted"):
        stream.accepted()


def test_acceptance_wakes_no_other_reader(client: Client, worker: FakeWorker) -> None:
    with ThreadPoolExecutor(1) as pool:
        many = pool.submit(client.generate_many, ["a", "b"])
        handles = [worker.expect(Submit).handle for _ in "ab"]
        for handle in handles:
            worker.send(Accepted(handle, b""))
        for handle in handles:
            worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
        assert [each.text for each in many.result(PATIENCE_S)] == ["y", "y"]


# ---- prompts and parameters ----------------------------------------------------------------


def test_prompt_kinds_travel_as_they_are(client: Client, worker: FakeWorker) -> None:
    with client.stream("text"):
        assert worker.expect(Submit).text == "text"
    worker.expect(Abort)
    with client.stream([5, 6, 7]):
        assert worker.expect(Submit).token_ids == pack_u32([5, 6, 7])
    worker.expect(Abort)
    messages = [{"role": "user", "content": "hi"}, ChatMessage("assistant", "ho")]
    with client.stream(messages):
        expected = (ChatMessage("user", "hi"), ChatMessage("assistant", "ho"))
        assert worker.expect(Submit).messages == expected


def test_params_label_priority_and_salt_travel(client: Client, worker: FakeWorker) -> None:
    options = {"label": "mine", "priority": -3, "cache_salt": "tenant"}
    stream = client.stream("x", **options, temperature=0, stop=["a", "b"])
    submit = worker.expect(Submit)
    assert (submit.label, submit.priority) == (stream.label, -3) == ("mine", -3)
    assert submit.cache_salt == "tenant"
    assert submit.stream_id.hex() == stream.id
    assert decode_params(submit.params) == messages.SamplingParams(temperature=0, stop=("a", "b"))


def test_bad_requests_fail_before_anything_is_sent(client: Client, worker: FakeWorker) -> None:
    for prompt, options, field in (
        ("x", {"max_token": 3}, "max_token"),
        ("x", {"temperature": "hot"}, "temperature"),
        ("x", {"top_p": 2.0}, "top_p"),
        ("x", {"sampling_params": SamplingParams(), "top_p": 0.5}, "sampling_params"),
        ("x", {"tools": [{}]}, "tools"),
        ("x", {"chat_template_kwargs": {}}, "prompt"),
        ("x", {"prompt_cache_key": 3}, "prompt_cache_key"),
        ("x", {"prompt_cache_key": "k" * 1025}, "prompt_cache_key"),
        ("x", {"prompt_cache_key": "\ud800"}, "prompt_cache_key"),
        ([], {}, "prompt"),
        ([5, 1000], {}, "prompt_token_ids"),
        ([1] * 2048, {}, "prompt"),
        ("x", {"output_kind": "whole"}, "output_kind"),
    ):
        with pytest.raises(BadRequestError) as caught:
            client.stream(prompt, **options)  # type: ignore[arg-type]
        assert caught.value.field == field
    with client.stream("good"):
        assert worker.expect(Submit).text == "good"


# ---- ends ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("bad_request", BadRequestError),
        ("conflict", ConflictError),
        ("unknown_stream", UnknownStreamError),
        ("superseded", SupersededError),
        ("overloaded", OverloadedError),
        ("diverged", StreamLostError),
        ("engine", EngineError),
    ],
)
def test_rejection_is_the_error_of_its_code(
    client: Client, worker: FakeWorker, code: Any, kind: type[SlipstreamError]
) -> None:
    stream = client.stream("x")
    worker.reject(worker.expect(Submit), Fault(code, "because", "stop"))
    with pytest.raises(kind, match="because") as caught:
        next(stream)
    assert type(caught.value) is kind
    assert caught.value.fault == Fault(code, "because", "stop")
    assert stream.finish_reason == "error"
    assert next(stream, None) is None  # one end, once


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_error_end_comes_after_the_remaining_deltas(
    client: Client, worker: FakeWorker, kind: Any
) -> None:
    stream, handle = start(client, worker, output_kind=kind)
    end = end_of("abc", "error", fault=Fault("engine", "boom"))
    worker.send(deltas(Entry(handle, "a")), deltas(Entry(handle, "bc", 1)))
    worker.send(deltas(Entry(handle, "", 3, ids=(), end=end)))
    assert [next(stream).text[-1], next(stream).text[-1]] == ["a", "c"]
    with pytest.raises(EngineError, match="boom") as caught:
        next(stream)
    assert (caught.value.text, stream.text) == ("abc", "abc")


def test_error_end_with_text_delivers_it_first(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    end = end_of("ab", "error", fault=Fault("engine", "boom"))
    worker.send(deltas(Entry(handle, "ab", end=end)))
    assert next(stream).text == "ab"
    with pytest.raises(EngineError):
        next(stream)


def test_generate_raises_with_the_text_so_far(client: Client, worker: FakeWorker) -> None:
    def script(worker: FakeWorker, body: Any) -> None:
        worker.accept_from_script(body)
        end = end_of("ab", "error", fault=Fault("engine", "boom"))
        worker.post(deltas(Entry(body.handle, "ab", end=end)))

    worker.script = script
    with pytest.raises(EngineError) as caught:
        client.generate("x")
    assert caught.value.text == "ab"


def test_abort_ends_the_iteration(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")))
    assert next(stream).text == "a"
    stream.abort()
    assert worker.expect(Abort).stream_id.hex() == stream.id
    worker.send(deltas(Entry(handle, "b", 1, end=end_of("ab", "abort"))))
    assert [delta.text for delta in stream] == ["b"]
    assert stream.finish_reason == "abort"


def test_leaving_a_with_block_aborts(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    with stream:
        worker.send(deltas(Entry(handle, "a")))
        for _ in stream:
            break
    assert worker.expect(Abort).stream_id.hex() == stream.id
    assert next(stream, None) is None
    assert stream.finish_reason == "abort"


def test_breaking_out_of_a_loop_aborts(client: Client, worker: FakeWorker) -> None:
    def script(worker: FakeWorker, body: Any) -> None:
        if isinstance(body, Submit):
            worker.accept_from_script(body)
            worker.post(deltas(Entry(body.handle, "a")))
        else:
            aborted.set()

    worker.script = script
    aborted = threading.Event()
    for _ in client.stream("x"):
        break
    gc.collect()
    assert aborted.wait(PATIENCE_S)


def test_deltas_of_a_closed_stream_are_dropped_and_its_end_is_no_news(
    client: Client, worker: FakeWorker
) -> None:
    stream, handle = start(client, worker)
    stream.close()
    stream.close()
    worker.expect(Abort)
    worker.send(
        deltas(Entry(handle, "late")), deltas(Entry(handle, "", 4, ids=(), end=End("abort", 4)))
    )
    other, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
    assert read(other) == "y"
    with pytest.raises(ClosedError, match="this stream is closed: read it before"):
        list(stream)


def test_a_stream_that_was_read_is_at_its_end_after_its_block(
    client: Client, worker: FakeWorker
) -> None:
    stream, handle = start(client, worker)
    with stream:
        worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
        assert next(stream).text == "y"
    assert list(stream) == []
    with client.stream("x") as late:
        pass
    with pytest.raises(ClosedError, match="within its `with` block"):
        list(late)


def test_closing_a_stream_ends_the_loop_that_reads_it(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")), deltas(Entry(handle, "b", 1)))
    for _ in stream:
        stream.close()
    assert stream.text == "a"


def test_abort_before_the_server_was_told_is_the_end(client: Client, worker: FakeWorker) -> None:
    worker.is_silent = True
    worker.tell_to_attach()
    worker.hellos.get(timeout=PATIENCE_S)
    with ThreadPoolExecutor(1) as pool:
        stream = client.stream("x")
        reading = pool.submit(list, stream)
        stream.abort()
        assert reading.result(PATIENCE_S) == []
    assert stream.finish_reason == "abort"


def test_abort_before_the_server_took_it_is_the_end(client: Client, worker: FakeWorker) -> None:
    stream = client.stream("x")
    handle = worker.expect(Submit).handle
    stream.abort()
    assert worker.expect(Abort).stream_id.hex() == stream.id
    worker.send(Rejected(handle, Fault("bad_request", "aborted before it was accepted")))
    assert list(stream) == []
    assert stream.finish_reason == "abort"


# ---- attaching anew ------------------------------------------------------------------------


def test_reattach_resumes_from_what_was_received(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "aé", ids=[7, 8, 9])))
    assert next(stream).text == "aé"
    worker.tell_to_attach()
    resume = worker.expect(Resume)
    assert (resume.handle, resume.num_chars, resume.num_tokens) == (handle, 2, 3)
    assert resume.stream_id.hex() == stream.id
    worker.send(deltas(Entry(handle, "b", 2, 3, end=End("stop", 4))))
    assert [delta.text for delta in stream] == ["b"]
    assert stream.text == "aéb"


def test_reattach_submits_again_what_was_not_accepted(client: Client, worker: FakeWorker) -> None:
    stream = client.stream("once")
    first = worker.expect(Submit)
    worker.tell_to_attach()
    second = worker.expect(Submit)
    assert (second.stream_id, second.handle) == (first.stream_id, first.handle)
    worker.accept(second)
    worker.accept(second)
    worker.send(deltas(Entry(second.handle, "ok", end=end_of("ok"))))
    assert read(stream) == "ok"


def test_reattach_repeats_an_abort(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    stream.abort()
    worker.expect(Abort)
    worker.tell_to_attach()
    assert worker.expect(Resume).handle == handle
    assert worker.expect(Abort).stream_id.hex() == stream.id


def test_duplicates_after_a_resume_are_cut(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "abc")))
    assert next(stream).text == "abc"
    worker.send(deltas(Entry(handle, "bc", 1)))  # all of it known
    worker.send(deltas(Entry(handle, "bcde", 1)))
    worker.send(deltas(Entry(handle, "abcde", 0, end=end_of("abcde"))))
    found = list(stream)
    assert [delta.text for delta in found] == ["de", ""]
    assert [delta.token_ids for delta in found] == [[100, 101], []]
    assert stream.text == "abcde"


def test_gap_makes_the_client_attach_anew(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    other, other_handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")))
    worker.send(deltas(Entry(handle, "d", 3), Entry(other_handle, "xy")))
    resumes = [worker.expect(Resume), worker.expect(Resume)]
    assert [(each.num_chars, each.num_tokens) for each in resumes] == [(1, 1), (2, 2)]
    worker.send(deltas(Entry(handle, "bcd", 1, end=end_of("abcd"))))
    worker.send(deltas(Entry(other_handle, "z", 2, end=end_of("xyz"))))
    assert read(stream) == "abcd"
    assert read(other) == "xyz"


def test_gap_that_stays_ends_the_stream_alone(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    other, other_handle = start(client, worker)
    for num_resumed in (2, 2, 1):
        worker.send(deltas(Entry(handle, "d", 3)))
        last = [worker.expect(Resume) for _ in range(num_resumed)]
    assert [each.handle for each in last] == [other_handle]
    assert worker.expect(Abort).stream_id.hex() == stream.id
    with pytest.raises(StreamLostError, match="lost a part"):
        next(stream)
    worker.send(deltas(Entry(other_handle, "z", end=end_of("z"))))
    assert read(other) == "z"


def test_what_the_server_has_lost_is_asked_for_again(client: Client, worker: FakeWorker) -> None:
    """Core and worker died at once: nobody but the client has the stream."""
    stream = client.stream("once", max_tokens=9, label="mine")
    first = worker.expect(Submit)
    handle = worker.accept(first)
    worker.send(deltas(Entry(handle, "aé", ids=[7, 8, 9])))
    assert next(stream).text == "aé"
    worker.tell_to_attach()
    resume = worker.expect(Resume)
    assert resume.digest == history_digest(np.array([7, 8, 9], np.uint32))
    worker.send(UnknownStreams((handle, 999)))
    again = worker.expect(Submit)
    assert again == replace(first, was_accepted=True, output_ids=pack_u32([7, 8, 9]), num_chars=2)
    worker.accept(again)
    worker.send(deltas(Entry(handle, "b", 2, 3, end=End("stop", 4))))
    assert read(stream) == "b"
    assert stream.text == "aéb"


def test_what_is_lost_twice_over_one_attach_ends(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")))
    worker.send(UnknownStreams((handle,)))
    worker.expect(Submit)
    worker.send(UnknownStreams((handle,)), UnknownStreams((handle,)))
    assert next(stream).text == "a"
    with pytest.raises(StreamLostError) as caught:
        next(stream)
    assert caught.value.text == "a"
    assert list(stream) == []


@pytest.mark.parametrize(
    ("code", "kind"), [("conflict", ConflictError), ("unknown_stream", UnknownStreamError)]
)
def test_a_resubmission_may_be_refused(
    client: Client, worker: FakeWorker, code: Any, kind: type[SlipstreamError]
) -> None:
    stream, handle = start(client, worker)
    worker.send(UnknownStreams((handle,)))
    worker.reject(worker.expect(Submit), Fault(code, "no"))
    with pytest.raises(kind, match="no"):
        next(stream)


def test_a_stream_that_diverged_ends(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")))
    worker.tell_to_attach()
    worker.expect(Resume)
    worker.send(Rejected(handle, Fault("diverged", "other tokens")))
    assert next(stream).text == "a"
    with pytest.raises(StreamLostError, match="other tokens"):
        next(stream)


# ---- resuming by hand ----------------------------------------------------------------------


def test_a_new_client_gets_the_rest_exactly(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    assert stream.position == (0, 0)
    worker.send(deltas(Entry(handle, "aé", ids=[7, 8, 9])), deltas(Entry(handle, "unread", 2, 3)))
    assert next(stream).text == "aé"
    assert stream.position == (2, 3)  # what was read, not what has come
    with Client(worker.address) as other:
        num_chars, num_tokens = stream.position
        rest = other.resume(stream.id, num_chars=num_chars, num_tokens=num_tokens)
        resume = worker.expect(Resume)
        assert resume == Resume(resume.handle, bytes.fromhex(stream.id), 2, 3)
        assert rest.prompt_token_ids is None
        worker.send(Accepted(resume.handle, pack_u32([1, 2])))
        worker.send(deltas(Entry(resume.handle, "unr", 2, 3)))
        assert next(rest).text == "unr"
        assert (rest.id, rest.label, rest.position) == (stream.id, "", (5, 6))
        assert rest.prompt_token_ids == [1, 2]
        worker.tell_to_attach()
        resume = worker.expect(Resume)  # what it has no beginning of, it has no digest of
        assert (resume.num_chars, resume.num_tokens, resume.digest) == (5, 6, None)
        worker.send(deltas(Entry(resume.handle, "ead", 5, 6, end=End("stop", 9))))
        assert (read(rest), rest.text, rest.position) == ("ead", "unread", (8, 9))


@pytest.mark.parametrize("kind", ["cumulative", "final"])
def test_resumed_outputs_of_other_kinds(client: Client, worker: FakeWorker, kind: Any) -> None:
    rest = client.resume("ab" * 16, num_chars=1, num_tokens=1, output_kind=kind)
    assert rest.position == (1, 1)
    handle = worker.expect(Resume).handle
    worker.send(deltas(Entry(handle, "b", 1)), deltas(Entry(handle, "c", 2, end=end_of("abc"))))
    assert list(rest)[-1].text == rest.text == "bc"
    assert rest.position == (3, 3)


def test_who_is_superseded_reads_what_came_and_is_told(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "a")), Superseded(handle))
    assert next(stream).text == "a"
    with pytest.raises(SupersededError, match="another reader") as caught:
        next(stream)
    assert caught.value.text == "a"
    stream.close()
    other = client.stream("y")
    worker.expect(Submit)  # and no Abort of what is somebody else's
    other.close()


def test_a_stream_that_nobody_knows_is_named(client: Client, worker: FakeWorker) -> None:
    rest = client.resume("ab" * 16)
    worker.send(UnknownStreams((worker.expect(Resume).handle,)))
    with pytest.raises(UnknownStreamError, match="no stream of this id"):
        next(rest)
    rest = client.resume("ab" * 16, num_chars=5, num_tokens=9)
    fault = Fault("diverged", "the stream has no such position", "num_tokens")
    worker.send(Rejected(worker.expect(Resume).handle, fault))
    with pytest.raises(StreamLostError, match="no such position"):
        next(rest)


def test_a_resumed_stream_that_is_lost_ends(client: Client, worker: FakeWorker) -> None:
    rest = client.resume("ab" * 16)
    handle = worker.expect(Resume).handle
    worker.send(Accepted(handle, pack_u32([1])), deltas(Entry(handle, "a")))
    assert next(rest).text == "a"
    worker.send(UnknownStreams((handle,)))
    with pytest.raises(StreamLostError):
        next(rest)


def test_leaving_a_resumed_stream_aborts_it(client: Client, worker: FakeWorker) -> None:
    with client.resume("ab" * 16):
        handle = worker.expect(Resume).handle
    assert worker.expect(Abort) == Abort(b"\xab" * 16, handle)


def test_ids_of_ones_own_make_asking_again_harmless(client: Client, worker: FakeWorker) -> None:
    stream = client.stream("x", stream_id="0A" * 16)
    assert stream.id == "0a" * 16
    submit = worker.expect(Submit)
    assert submit.stream_id == b"\n" * 16
    again = client.stream("x", stream_id=stream.id)
    second = worker.expect(Submit)
    assert second.handle != submit.handle
    worker.send(Superseded(submit.handle))
    worker.accept(second)
    worker.send(deltas(Entry(second.handle, "y", end=end_of("y"))))
    assert read(again) == "y"
    with pytest.raises(SupersededError):
        next(stream)
    worker.script = lambda worker, body: answer(worker, body, body.stream_id.hex())
    assert client.generate("x", stream_id="0b" * 16).text == "0b" * 16


def test_ids_and_positions_are_checked(client: Client) -> None:
    for call, field in (
        (lambda: client.stream("x", stream_id="mine"), "stream_id"),
        (lambda: client.generate("x", stream_id="0b" * 16 + "\n"), "stream_id"),
        (lambda: client.stream("x", stream_id=b"\0" * 16), "stream_id"),  # type: ignore[arg-type]
        (lambda: client.resume("0b" * 15), "stream_id"),
        (lambda: client.resume("0b" * 16, num_chars=-1), "num_chars"),
        (lambda: client.resume("0b" * 16, num_tokens=1.0), "num_tokens"),  # type: ignore[arg-type]
        (lambda: client.resume("0b" * 16, output_kind="whole"), "output_kind"),  # type: ignore[arg-type]
    ):
        with pytest.raises(BadRequestError) as caught:
            call()
        assert caught.value.field == field


def test_columns_that_do_not_fit_are_not_taken(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    broken = Deltas(pack_u32([handle]), b"", pack_u32([0]), ["a"], pack_u32([1]))
    worker.send(broken)
    assert worker.expect(Resume).num_chars == 0
    worker.send(broken)
    assert worker.expect(Resume).num_chars == 0
    worker.send(broken)
    with pytest.raises(EngineError, match="protocol: chars"):
        next(stream)


class Interrupter:
    """A script that keeps histories, and loses its sessions at random while it sends them.

    A forgetful one loses its histories too, as core and worker do when they die at once.
    """

    def __init__(self, seed: int, *, is_forgetful: bool) -> None:
        self._random = random.Random(seed)
        self._texts: dict[bytes, str] = {}
        self._is_forgetful = is_forgetful
        self.num_interruptions = 0
        self.num_resubmissions = 0

    def __call__(self, worker: FakeWorker, body: Any) -> None:
        if not worker.has_session:
            return  # what was read before the session was lost
        match body:
            case Submit():
                text = self._texts[body.stream_id] = body.text or ""
                assert body.was_accepted == bool(body.output_ids) or not body.num_chars
                assert body.output_ids == pack_u32([ord(char) for char in text[: body.num_chars]])
                self.num_resubmissions += body.was_accepted
                worker.accept_from_script(body)
                self._send(worker, body.handle, text, body.num_chars)
            case Resume():
                if body.stream_id not in self._texts:
                    worker.post(UnknownStreams((body.handle,)))
                    return
                text = self._texts[body.stream_id]
                has = np.array([ord(char) for char in text[: body.num_chars]], np.uint32)
                assert body.digest == history_digest(has)
                overlap = self._random.randint(0, min(5, body.num_chars))
                self._send(worker, body.handle, text, body.num_chars - overlap)

    def _send(self, worker: FakeWorker, handle: int, text: str, at: int) -> None:
        while at < len(text):
            if self._random.random() < 0.05:
                self.num_interruptions += 1
                if self._is_forgetful:
                    self._texts.clear()
                return worker.interrupt()
            piece = text[at : at + self._random.randint(1, 9)]
            end = end_of(text) if at + len(piece) == len(text) else None
            worker.post(deltas(Entry(handle, piece, at, end=end)))
            at += len(piece)
        return None


@pytest.mark.parametrize("is_forgetful", [False, True], ids=["", "forgetful"])
@pytest.mark.parametrize("seed", range(5))
def test_any_interruption_keeps_every_text_exact(
    client: Client, worker: FakeWorker, seed: int, is_forgetful: bool
) -> None:
    worker.script = script = Interrupter(seed, is_forgetful=is_forgetful)
    prompts = [f"{index:03} " * 25 for index in range(20)]
    with ThreadPoolExecutor(20) as pool:
        assert list(pool.map(lambda prompt: read(client.stream(prompt)), prompts)) == prompts
    found = client.generate_many(prompts)
    assert [completion.text for completion in found] == prompts
    assert [completion.num_tokens for completion in found] == [100] * 20
    assert script.num_interruptions > 5
    assert (script.num_resubmissions > 5) == is_forgetful


def test_worker_that_dies_and_comes_back(address: str) -> None:
    worker = FakeWorker(address)
    with Client(address, timeout_s=PATIENCE_S) as client:
        stream, handle = start(client, worker)
        worker.send(deltas(Entry(handle, "a")))
        assert next(stream).text == "a"
        worker.stop()
        worker = FakeWorker(address)
        second = client.stream("more")  # makes the client speak, so that it is told to attach
        resume = worker.expect(Resume)
        assert (resume.handle, resume.num_chars) == (handle, 1)
        worker.send(deltas(Entry(handle, "b", 1, end=end_of("ab"))))
        assert read(stream) == "b"
        handle = worker.expect_and_accept()
        worker.send(deltas(Entry(handle, "c", end=end_of("c"))))
        assert read(second) == "c"
    worker.stop()


# ---- the connection ------------------------------------------------------------------------


def test_missing_server_is_named(address: str) -> None:
    with pytest.raises(ConnectionLostError, match="scripts/launch") as caught:
        Client(address, timeout_s=0.1)
    assert address in str(caught.value)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("is_left_behind", [False, True])
def test_a_missing_socket_is_named_at_once(address: str, is_left_behind: bool) -> None:
    if is_left_behind:
        with closing(socket.socket(socket.AF_UNIX)) as left:
            left.bind(address.removeprefix("ipc://"))
    reason = "nothing listens" if is_left_behind else "no such socket"
    with pytest.raises(ConnectionLostError, match=reason) as caught:
        Client(address)
    assert "slipstream serve" in str(caught.value)
    with pytest.raises(ConnectionLostError, match=r"for .* s: start one"):  # for all of that time
        Client(address, timeout_s=1.5)


def test_a_server_that_starts_is_waited_for(address: str) -> None:
    folder = Path(address.removeprefix("ipc://")).parent
    (folder / LOCK_NAME).write_text(str(os.getpid()))
    assert why_absent(address) is None
    (folder / LOCK_NAME).write_text("")  # about to be written
    assert why_absent(address) is None
    (folder / LOCK_NAME).write_text(str(ended_pid()))
    assert why_absent(address) == "there is no such socket"
    with subprocess.Popen(["true"]) as killed:
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)  # it is not reaped
        (folder / LOCK_NAME).write_text(str(killed.pid))
        assert why_absent(address) == "there is no such socket"
    (folder / LOCK_NAME).unlink()
    assert why_absent(address) == "there is no such socket"
    assert why_absent("tcp://127.0.0.1:1") is None
    worker = FakeWorker(address)
    assert why_absent(address) is None
    worker.stop()


def ended_pid() -> int:
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_server_that_stays_away_ends_what_waits(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = FakeWorker(address)
    with Client(address) as client:
        stream, _ = start(client, worker)
        [session] = client._io._cluster._alone.links
        monkeypatch.setattr(session, "timeout_s", 0.2)
        worker.is_silent = True
        worker.tell_to_attach()
        with pytest.raises(ConnectionLostError, match="gone"):
            next(stream)
        with pytest.raises(ConnectionLostError, match="gone"):
            client.generate("another")
        worker.is_silent = False
        assert worker.expect(Abort).stream_id.hex() == stream.id  # it may be running there
    worker.stop()


def test_server_of_another_version_is_named(
    worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = client_codec()
    codec.version = 999
    monkeypatch.setattr("slipstream.client.connection.link_session.client_codec", lambda: codec)
    with pytest.raises(SlipstreamError, match="version 999") as caught:
        Client(worker.address)
    assert not isinstance(caught.value, ConnectionLostError)


def test_refusal_reaches_every_waiting_caller(client: Client, worker: FakeWorker) -> None:
    first, _ = start(client, worker)
    second = client.stream("x")
    worker.expect(Submit)
    worker.refuse(Fault("bad_request", "cannot read that"))
    for stream in (first, second):
        with pytest.raises(SlipstreamError, match="cannot read that"):
            next(stream)
    assert {worker.expect(Abort).stream_id.hex() for _ in range(2)} == {first.id, second.id}
    third, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
    assert read(third) == "y"


def test_address_is_checked(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    with pytest.raises(BadRequestError, match="tcp://"):
        Client("tcp://localhost:1")
    with pytest.raises(BadRequestError, match="timeout_s"):
        Client(address, timeout_s=0)
    monkeypatch.setenv("SLIPSTREAM_ADDRESS", address)
    with pytest.raises(ConnectionLostError, match=address):
        Client(timeout_s=0.1)


def test_close_says_goodbye_and_ends_waiting_readers(worker: FakeWorker) -> None:
    client = Client(worker.address)
    streams = [start(client, worker)[0] for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        readings = [pool.submit(list, stream) for stream in streams]
        whole = pool.submit(client.generate, "x")
        worker.expect(Submit)
        client.close()
        for reading in [*readings, whole]:
            with pytest.raises(ClosedError):
                reading.result(PATIENCE_S)
    worker.expect(Goodbye)
    client.close()
    with pytest.raises(ClosedError):
        client.generate("late")


def test_close_does_not_wait_for_a_dead_server(address: str) -> None:
    worker = FakeWorker(address)
    client = Client(address, timeout_s=10 * PATIENCE_S)
    worker.stop()
    closing = threading.Thread(target=client.close, daemon=True)
    closing.start()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_client_that_nobody_holds_is_closed(worker: FakeWorker) -> None:
    Client(worker.address)
    gc.collect()
    worker.expect(Goodbye)


def test_stream_holds_its_client(worker: FakeWorker) -> None:
    stream = Client(worker.address).stream("x")
    gc.collect()
    handle = worker.expect_and_accept()
    worker.send(deltas(Entry(handle, "y", end=end_of("y"))))
    assert read(stream) == "y"
    del stream
    gc.collect()
    worker.expect(Goodbye)


def test_interpreter_exits_with_a_client_left_open(worker: FakeWorker) -> None:
    program = (
        "import sys, threading\n"
        "from slipstream import Client\n"
        "client = Client(sys.argv[1])\n"
        "stream = client.stream('x')\n"
        "threading.Thread(target=lambda: list(stream), daemon=True).start()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, worker.address],
        timeout=PATIENCE_S,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Fatal" not in done.stderr
    worker.expect(Submit)
    worker.expect(Goodbye)


def test_reader_may_pause_while_the_thread_acknowledges(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    for position in range(100):
        worker.send(deltas(Entry(handle, "x", position)))
    other = client.stream("y")
    worker.expect(Submit)
    other.close()
    worker.expect(Abort)  # came after the acknowledgements
    assert worker.acknowledged()
    assert isinstance(next(stream), Delta)


def test_two_threads_cannot_read_one_stream(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: [delta.text for delta in stream])
        patience = Patience()
        while stream._state.wakeup is None:
            patience.wait()
        with pytest.raises(RequestError, match="another thread reads"):
            next(stream)
        worker.send(deltas(Entry(handle, "x", 0, end=end_of("x"))))
        assert reading.result(PATIENCE_S) == ["x"]


def test_a_batch_names_the_prompt_that_is_wrong(client: Client) -> None:
    with pytest.raises(BadRequestError, match=r"^prompts\[1\]: prompt: got") as caught:
        client.generate_many(["a", [], [1, 2]])
    assert caught.value.field == "prompt"


def test_generate_has_no_output_kind(client: Client) -> None:
    with pytest.raises(BadRequestError, match="output_kind"):
        client.generate("a", output_kind="cumulative")


def test_a_server_that_shuts_down_says_so_to_those_who_wait(
    client: Client, worker: FakeWorker
) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "so far", 0)))
    assert next(stream).text == "so far"
    worker.refuse(Fault("engine", "the server is shutting down"))
    with pytest.raises(SlipstreamError, match="shutting down"):
        next(stream)


def test_a_server_that_leaves_for_another_is_waited_for(client: Client, worker: FakeWorker) -> None:
    stream, handle = start(client, worker)
    worker.send(deltas(Entry(handle, "so far", 0)))
    assert next(stream).text == "so far"
    worker.refuse(Fault("engine", "the server is shutting down"), is_leaving=True)
    resume = worker.expect(Resume)
    assert (resume.num_chars, resume.handle) == (6, handle)
    worker.send(UnknownStreams((handle,)))
    again = worker.expect(Submit)
    assert again.was_accepted
    worker.accept(again)
    worker.send(deltas(Entry(handle, "!", 6, end=end_of("so far!"))))
    assert next(stream).text == "!"


def test_what_a_leaving_server_turns_away_is_asked_for_at_the_next_attach(
    client: Client, worker: FakeWorker
) -> None:
    stream, given_up = client.stream("a"), client.stream("b")
    fault = Fault("overloaded", "the server is shutting down")
    first, second = worker.expect(Submit), worker.expect(Submit)
    worker.send(*[Rejected(each.handle, fault, is_leaving=True) for each in (first, second)])
    patience = Patience()
    while given_up._state.was_sent or not worker.acknowledged():
        patience.wait()
    given_up.abort()
    assert list(given_up) == []
    worker.tell_to_attach()
    again = worker.expect(Submit)
    assert again == first
    worker.accept(again)
    worker.send(deltas(Entry(again.handle, "x", 0, end=end_of("x"))))
    assert "".join(delta.text for delta in stream) == "x"
