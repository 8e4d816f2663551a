"""A front over replicas of two models, each played by the test."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from tests.helpers.fake_worker import MODEL, Entry, FakeWorker, deltas, end_of
from tests.helpers.http_front import Front, Raw
from tests.helpers.patience import Patience

from slipstream.demo_model import MODEL_PATH
from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import (
    Detokenize,
    Detokenized,
    Locate,
    Located,
    Recall,
    Recalled,
    Resume,
    Submit,
    Tokenize,
    Tokenized,
    UnknownStreams,
)
from slipstream_ipc.transport.sockets import private_directory

ONE = replace(MODEL, name="one", vocab_size=10, fingerprint=b"1")
TWO = replace(MODEL, name="two", path=str(MODEL_PATH), fingerprint=b"2")
KNOWN = "ab" * 16  # a stream that the second replica has
ALLOWED = "allowed: one of 'one', 'two'"
CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT_OF: dict[str, Any] = {
    "/v1/completions": lambda body: body["choices"][0]["text"],
    "/v1/chat/completions": lambda body: body["choices"][0]["message"]["content"],
    "/v1/responses": lambda body: body["output"][0]["content"][0]["text"],
    "/v1/messages": lambda body: body["content"][0]["text"],
    "/generate": lambda body: body["choices"][0]["text"],
    "/tokenize": lambda body: body["tokens"],
    "/detokenize": lambda body: body["prompt"],
    "/v1/messages/count_tokens": lambda body: body["input_tokens"],
    "/v1/responses/input_tokens": lambda body: body["input_tokens"],
}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "x", "store": False},
    "/v1/messages": {**CHAT, "max_tokens": 9},
    "/generate": {"prompt": "x"},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [1]},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "x"},
}


def play(worker: FakeWorker, body: Any) -> None:
    """Every answer is the name of the model, or as many tokens as that has letters."""
    name = worker.model.name
    match body:
        case Submit():
            worker.accept_from_script(body)
            worker.post(deltas(Entry(body.handle, name, end=end_of(name))))
        case Tokenize():
            worker.post(Tokenized(body.number, pack_u32([7] * (1 + (name == "two")))))
        case Detokenize():
            worker.post(Detokenized(body.number, name))
        case Locate():
            has = name == "two" and body.stream_ids == (bytes.fromhex(KNOWN),)
            worker.post(Located(body.number, (int(has),)))
        case Recall():
            worker.post(Recalled(body.number))
        case Resume() if body.stream_id != bytes.fromhex(KNOWN):
            worker.post(UnknownStreams((body.handle,)))
        case Resume():
            worker.accept_from_script(body)  # type: ignore[arg-type]
            worker.post(deltas(Entry(body.handle, name, end=end_of(name))))


@pytest.fixture(scope="module")
def workers() -> Iterator[list[FakeWorker]]:
    folder = private_directory()
    found = [FakeWorker(f"ipc://{folder}/{card.name}", play, card) for card in (ONE, TWO)]
    yield found
    for each in found:
        each.stop()


@pytest.fixture(scope="module")
def front(workers: list[FakeWorker]) -> Iterator[Front]:
    running = Front(",".join([each.address for each in workers]), is_router=True)
    patience = Patience()
    while len(get(running, "/v1/models").json["data"]) < 2:
        patience.wait("both models are known")
    yield running
    running.stop()


def get(front: Front, path: str, *headers: str) -> Any:
    with Raw(front.port) as raw:
        return raw.get(path, *headers)


def post(front: Front, path: str, body: Any) -> Any:
    with Raw(front.port) as raw:
        raw.post(path, body)
        return raw.read()


def test_every_model_is_listed(front: Front) -> None:
    listed = get(front, "/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["one", "two"]
    assert (listed["first_id"], listed["last_id"]) == ("one", "two")
    assert get(front, "/v1/models/two").json["id"] == "two"
    page = get(front, "/v1/models?limit=1&after_id=one").json
    assert [model["id"] for model in page["data"]] == ["two"]
    assert (page["first_id"], page["last_id"], page["has_more"]) == ("two", "two", False)
    assert get(front, "/v1/models?limit=1").json["has_more"] is True
    page = get(front, "/v1/models?after_id=two").json
    assert (page["data"], page["first_id"], page["last_id"]) == ([], None, None)
    assert get(front, "/v1/models?after_id=three").status == 400
    assert get(front, "/v1/models/three").status == 404
    assert get(front, "/ready").json == {"status": "ready", "models": ["one", "two"]}


@pytest.mark.parametrize("path", BODIES)
def test_a_request_chooses_its_model(front: Front, path: str) -> None:
    found = []
    for model in ("one", "two"):
        answer = post(front, path, {**BODIES[path], "model": model})
        assert answer.status == 200, answer.body
        assert answer.json.get("model", model) == model
        found.append(TEXT_OF[path](answer.json))
    assert found in (["one", "two"], [1, 2], [[7], [7, 7]])


@pytest.mark.parametrize("path", BODIES)
def test_none_of_the_models_and_no_name_are_refused_with_the_list(front: Front, path: str) -> None:
    answer = post(front, path, {**BODIES[path], "model": "three"})
    assert answer.status == 404
    assert f"model: got 'three', {ALLOWED}" in answer.body.decode()
    answer = post(front, path, BODIES[path])
    assert answer.status == 400
    assert "model" in answer.body.decode()


def test_a_missing_name_is_said_to_be_missing(front: Front) -> None:
    error = post(front, "/tokenize", {"prompt": "x"}).error
    assert (error["param"], error["message"]) == ("model", f"model: missing, {ALLOWED}")


def test_a_request_is_checked_by_its_models_card(front: Front) -> None:
    for model, status in (("one", 400), ("two", 200)):
        body = {"tokens": [99], "model": model}
        assert post(front, "/detokenize", body).status == status
        body = {"prompt": [99], "model": model}
        assert post(front, "/v1/completions", body).status == status


def test_tokens_have_the_texts_of_their_models_tokenizer(front: Front) -> None:
    assert get(front, "/tokenizer_info").status == 400
    assert "tokenizer_class" in get(front, "/tokenizer_info?model=two").json


def test_a_stream_of_another_front_is_resumed_as_its_own_models(front: Front) -> None:
    with Raw(front.port) as raw:
        answer = raw.get(f"/v1/streams/cmpl-{KNOWN}", "Accept: text/event-stream")
    events = [line for line in answer.body.decode().split("\n") if line.startswith("data: {")]
    assert answer.status == 200, answer.body
    assert events
    assert all('"model":"two"' in event for event in events)
    assert get(front, f"/v1/streams/cmpl-{'cd' * 16}").status == 404


def test_metrics_and_the_live_numbers_tell_the_models_of_replicas(
    front: Front, workers: list[FakeWorker]
) -> None:
    addresses = [each.address for each in workers]
    live = get(front, "/live").json
    assert live["model"] == "one, two"
    assert [live["replicas"][each]["model"] for each in addresses] == ["one", "two"]
    text = get(front, "/metrics").body.decode()
    found = {
        sample.labels["replica"]: sample.labels["model_name"]
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "slipstream:replica_state"
    }
    assert found == dict(zip(addresses, ["one", "two"], strict=True))


def test_a_front_is_ready_while_each_model_has_a_replica(
    front: Front, workers: list[FakeWorker]
) -> None:
    """The last test of this module: the replica does not come back."""
    assert get(front, "/health").json["status"] == "ok"
    workers[0].stop()
    patience = Patience()
    while (answer := get(front, "/ready")).status == 200:
        patience.wait("a replica is lost")
    assert answer.error["message"] == "no replica of one takes requests now"
    assert get(front, "/health").json["status"] == "recovering"
    assert [model["id"] for model in get(front, "/v1/models").json["data"]] == ["one", "two"]
    body = {**BODIES["/v1/completions"], "model": "two"}
    assert post(front, "/v1/completions", body).json["choices"][0]["text"] == "two"
