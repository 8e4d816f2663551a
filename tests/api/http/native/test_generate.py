"""/generate and /abort: what they say over raw sockets, with a worker that says what a test wants,
and by a stack of real processes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Front, Raw, events_of
from tests.helpers.patience import PATIENCE_S

from slipstream import Client, Stack
from slipstream_ipc.columns import pack_u32, u32
from slipstream_ipc.messages import (
    Abort,
    Cancel,
    Cancelled,
    End,
    Fault,
    SamplingParams,
    Submit,
)
from slipstream_ipc.transport.codec import decode_params

GENERATE = "/generate"
ASKS = {"text": "hi", "sampling_params": {"max_tokens": 5}}


def played_answer(played: FakeWorker, submit: Submit, *entries: Entry) -> None:
    played.accept(submit, [1, 2, 3])
    for entry in entries:
        played.send(deltas(entry))


# ---- /generate ---------------------------------------------------------------------------------


def test_an_answer_has_text_and_ids(played, raw):
    raw.post(GENERATE, {**ASKS, "priority": 3, "cache_salt": "mine"})
    submit = played.expect(Submit)
    assert (submit.text, submit.priority, submit.cache_salt) == ("hi", 3, "mine")
    assert decode_params(submit.params) == SamplingParams(max_tokens=5, stream_interval=64)
    end = End("stop", 2, "\n")
    played_answer(played, submit, Entry(submit.handle, "ab", ids=[7, 8], end=end))
    answer = raw.read().json
    assert answer.pop("id") == f"gen-{submit.stream_id.hex()}"
    del answer["created"]
    assert answer == {
        "object": "generation",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [7, 8],
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": "\n",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
        "prompt_logprobs": None,
        "prompt_token_ids": [1, 2, 3],
    }


def test_a_stream_tells_every_id_once(played, raw):
    raw.post(GENERATE, {**ASKS, "stream": True, "stream_options": {"include_usage": True}})
    submit = played.expect(Submit)
    assert decode_params(submit.params).stream_interval == 1
    handle = submit.handle
    played_answer(played, submit, Entry(handle, "", ids=[7]), Entry(handle, "é", 0, 1, ids=[8]))
    played.send(deltas(Entry(handle, "", 1, 2, ids=[9], end=End("length", 3))))
    *events, usage, done = raw.read().events
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == 3
    said = [event["choices"][0] for event in events]
    assert [token_id for each in said for token_id in each["token_ids"]] == [7, 8, 9]
    assert "".join(each["text"] for each in said) == "é"
    assert [each["finish_reason"] for each in said][-1] == "length"
    assert not any(each["finish_reason"] for each in said[:-1])
    assert {event["object"] for event in events} == {"generation.chunk"}


@pytest.mark.parametrize("name", ["text", "prompt"])
def test_names_of_a_text(played, raw, name):
    raw.post(GENERATE, {name: "hello"})
    submit = played.expect(Submit)
    assert submit.text == "hello"
    played_answer(played, submit, Entry(submit.handle, "x", end=End("stop", 1)))
    assert raw.read().status == 200


@pytest.mark.parametrize("name", ["token_ids", "prompt_token_ids"])
def test_names_of_ids(played, raw, name):
    raw.post(GENERATE, {name: [5, 6]})
    submit = played.expect(Submit)
    assert u32(submit.token_ids).tolist() == [5, 6]
    played_answer(played, submit, Entry(submit.handle, "x", end=End("stop", 1)))
    assert raw.read().status == 200


def test_what_the_worker_refuses_is_named_as_the_caller_names_it(played, raw):
    raw.post(GENERATE, ASKS)
    fault = Fault("bad_request", "max_tokens: too many", "max_tokens")
    played.reject(played.expect(Submit), fault)
    assert raw.read().error["param"] == "sampling_params.max_tokens"


@pytest.mark.parametrize("stream", [False, True])
def test_who_leaves_has_it_aborted(played, front, stream):
    with Raw(front.port) as raw:
        raw.post(GENERATE, {**ASKS, "stream": stream})
        submit = played.expect(Submit)
        played.accept(submit)
    assert played.expect(Abort).stream_id == submit.stream_id


# ---- /abort ------------------------------------------------------------------------------------


def test_several_streams_are_aborted_as_one(played, raw):
    raw.post("/abort", {"request_id": f"cmpl-{'0' * 31}1.2x2"})
    asked = played.expect(Cancel)
    assert len(set(asked.stream_ids)) == 4
    assert asked.stream_ids[0] == bytes(15) + b"\1"
    for found, status in (
        (("ended", "unknown", "running", "ended"), "aborted"),
        (("ended", "unknown", "unknown", "ended"), "ended"),
    ):
        played.send(Cancelled(asked.number, found))
        assert raw.read().json["status"] == status
        raw.post("/abort", {"request_id": f"cmpl-{'0' * 31}1.2x2"})
        asked = played.expect(Cancel)
    played.send(Cancelled(asked.number, ("unknown",) * 4))
    answer = raw.read()
    assert (answer.status, answer.error["code"]) == (404, "unknown_stream")


def test_an_answer_that_does_not_fit_is_asked_for_again(played, raw):
    """A worker that breaks the protocol is attached anew, and the question said again."""
    raw.post("/abort", {"request_id": f"gen-{'0' * 32}"})
    asked = played.expect(Cancel)
    played.send(Cancelled(asked.number, ()))
    played.hellos.get(timeout=PATIENCE_S)
    again = played.expect(Cancel)
    assert again == asked
    played.send(Cancelled(again.number, ("running",)))
    assert raw.read().json == {"request_id": f"gen-{'0' * 32}", "status": "aborted"}


def test_a_stream_that_is_aborted_ends_with_what_it_had(played, raw):
    raw.post("/v1/completions", {"prompt": "x", "stream": True})
    handle = played.expect_and_accept()
    played.send(deltas(Entry(handle, "ab")))
    played.send(deltas(Entry(handle, "c", 2, end=End("abort", 3))))
    *events, done = raw.read().events
    assert done == "[DONE]"
    assert "".join(event["choices"][0]["text"] for event in events) == "abc"
    assert events[-1]["choices"][0]["finish_reason"] == "abort"


# ---- real processes ----------------------------------------------------------------------------


@pytest.fixture
def native(chain_stack: Stack) -> Iterator[Client]:
    with chain_stack.client() as client:
        yield client


def connect(stack: Stack) -> Raw:
    assert stack.http_address is not None
    return Raw(int(stack.http_address.rpartition(":")[2]))


def test_it_says_what_the_python_client_says(chain_stack, native):
    params = {"max_tokens": 20, "temperature": 1, "seed": 5, "logprobs": 2, "n": 2}
    with connect(chain_stack) as raw:
        raw.post(GENERATE, {"text": "Once", "sampling_params": params, "model": "tiny"})
        answer = raw.read().json
        raw.post(GENERATE, {"text": "Once", "sampling_params": params, "stream": True})
        *events, done = events_of(raw.read().body)
    whole = native.generate("Once", **params)
    assert answer["prompt_token_ids"] == whole.prompt_token_ids
    texts, ids, logprobs = ["", ""], [[], []], [[], []]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            ids[choice["index"]] += choice["token_ids"]
            logprobs[choice["index"]] += choice["logprobs"]
    for index, (choice, expected) in enumerate(zip(answer["choices"], whole.choices, strict=True)):
        assert choice["text"] == texts[index] == expected.text
        assert choice["token_ids"] == ids[index] == expected.token_ids
        assert choice["logprobs"] == logprobs[index]
        for entry, found in zip(choice["logprobs"], expected.logprobs, strict=True):
            assert set(entry) == {str(token_id) for token_id in found}
            for token_id, each in found.items():
                shown = entry[str(token_id)]
                assert shown["logprob"] == pytest.approx(each.logprob, abs=1e-6)
                assert shown["rank"] == each.rank
                assert isinstance(shown["decoded_token"], str)
    assert done == "[DONE]"


def test_it_goes_on_from_where_its_reader_is(chain_stack):
    params = {"max_tokens": 40, "temperature": 0, "logprobs": 1}
    body = {"text": "Once", "sampling_params": params, "stream": True}

    def read(raw: Raw) -> list[tuple[str, Any]]:
        blocks = raw.read().body.decode().split("\n\n")[:-1]
        pairs = [block.split("\n") for block in blocks]
        return [(line[4:], data[6:]) for line, data in pairs]

    def choices(events: list[tuple[str, Any]]) -> tuple[list[int], list[Any], str]:
        found = [json.loads(data)["choices"][0] for _, data in events if data != "[DONE]"]
        ids = [token_id for each in found for token_id in each["token_ids"]]
        entries = [entry for each in found for entry in each["logprobs"]]
        return ids, entries, "".join(each["text"] for each in found)

    with connect(chain_stack) as raw:
        raw.post(GENERATE, body, "Accept: text/event-stream")
        events = read(raw)
        middle = len(events) // 2
        last = f"Last-Event-ID: {events[middle - 1][0]}"
        raw.post(GENERATE, body, "Accept: text/event-stream", last)
        rest = read(raw)
        answer_id = json.loads(events[0][1])["id"]
        again = raw.get(f"/v1/streams/{answer_id}?logprobs=1")
    assert choices(events[:middle] + rest) == choices(events)
    assert len(choices(events)[0]) == 40
    told = [json.loads(line[6:]) for line in again.body.decode().split("\n") if "data: {" in line]
    ids = [token_id for each in told for token_id in each["choices"][0]["token_ids"]]
    assert ids == choices(events)[0]


def test_abort_ends_a_stream_of_another_connection_and_says_so(chain_stack):
    body = {"text": "Once", "stream": True, "sampling_params": {"max_tokens": 4000}}
    with connect(chain_stack) as reader, connect(chain_stack) as other:
        reader.post(GENERATE, body)
        reader.read_until(b"\r\n\r\n")
        event = reader.read_event()
        asked = {"request_id": event["id"]}
        other.post("/abort", asked)
        assert other.read().json == {**asked, "status": "aborted"}
        said = [event]
        while said[-1] != "[DONE]":
            said += events_of(reader.read_chunk())
        assert said[-2]["choices"][0]["finish_reason"] == "abort"
        other.post("/abort", asked)
        assert other.read().json == {**asked, "status": "ended"}
        other.post("/abort", {"request_id": "cmpl-" + 32 * "0"})
        assert other.read().status == 404


def test_a_native_clients_stream_is_aborted_by_who_knows_its_id(chain_stack, native):
    with native.stream("Once", max_tokens=4000, ignore_eos=True) as stream:
        next(stream)
        with connect(chain_stack) as raw:
            raw.post("/abort", {"request_id": f"gen-{stream.id}"})
            assert raw.read().json["status"] == "aborted"
        for _ in stream:
            pass
        assert stream.finish_reason == "abort"


def test_ids_are_the_wires(played: FakeWorker, front: Front) -> None:
    """A delta of many ids at once is one event."""
    with Raw(front.port) as raw:
        raw.post(GENERATE, {**ASKS, "stream": True})
        submit = played.expect(Submit)
        entry = Entry(submit.handle, "abc", ids=[5, 6, 7], end=End("stop", 3))
        played_answer(played, submit, entry)
        (event, _) = raw.read().events
    assert pack_u32(event["choices"][0]["token_ids"]) == pack_u32([5, 6, 7])


def test_a_key_is_needed_to_abort(played: FakeWorker) -> None:
    front = Front(played.address, api_keys=("right",))
    try:
        with Raw(front.port) as raw:
            raw.post("/abort", {"request_id": "gen-" + 32 * "0"})
            assert raw.read().status == 401
    finally:
        front.stop()
