"""Unknown fields of bodies: ignored and named at OpenAI's endpoints, refused elsewhere and with
--strict-fields; ids of requests; details of usage.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import pytest
from tests.helpers.agent_bodies import AGENT_BODIES, USER
from tests.helpers.fake_worker import Entry, FakeWorker, deltas
from tests.helpers.http_front import Answer, Front, Raw

from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.response_encoding import Response
from slipstream_ipc.messages import End, Fault, Submit

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD: dict[str, dict[str, Any]] = {CHAT: {"messages": [USER]}, COMPLETIONS: {"prompt": "x"}}
HEADER = "x-slipstream-ignored-fields"


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FakeWorker, int]]:
    """A worker, and the port of its front, which has --strict-fields."""
    worker = FakeWorker(f"ipc://{tmp_path_factory.mktemp('strict')}/client.sock")
    front = Front(worker.address, strict_fields=True)
    yield worker, front.port
    front.stop()
    worker.stop()


def answered(
    raw: Raw, played: FakeWorker, path: str, body: dict[str, Any], *headers: str, **end: int
) -> tuple[Submit, Answer]:
    raw.post(path, body, *headers)
    submit = played.expect(Submit)
    played.accept(submit)
    played.send(deltas(Entry(submit.handle, "x", end=End("stop", 1, **end))))
    return submit, raw.read()


@pytest.mark.parametrize("name", AGENT_BODIES)
def test_an_agents_body_is_answered(raw: Raw, played: FakeWorker, name: str) -> None:
    body = AGENT_BODIES[name]
    submit, answer = answered(raw, played, CHAT, body)
    assert answer.status == 200
    assert HEADER not in answer.headers
    assert len(submit.messages) == len(body["messages"])


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("is_stream", [False, True])
def test_unknown_fields_are_named(raw, played, path: str, is_stream: bool) -> None:
    body = {**GOOD[path], "stream": is_stream, "max_token": 5, "b c": {}, "zzz": None}
    _, answer = answered(raw, played, path, body)
    assert answer.status == 200
    assert answer.headers[HEADER] == "max_token (did you mean max_tokens?), b_c, zzz"


@pytest.mark.parametrize("path", GOOD)
def test_they_are_named_beside_an_error(raw: Raw, path: str) -> None:
    raw.post(path, {**GOOD[path], "temperature": -1, "zzz": 1})
    answer = raw.read()
    assert (answer.status, answer.headers[HEADER]) == (400, "zzz")
    assert answer.error["param"] == "temperature"


def test_the_next_answer_does_not_name_them(raw: Raw, played: FakeWorker) -> None:
    assert HEADER in answered(raw, played, CHAT, {**GOOD[CHAT], "zzz": 1})[1].headers
    assert HEADER not in answered(raw, played, CHAT, GOOD[CHAT])[1].headers


@pytest.mark.parametrize("path", GOOD)
def test_strict_fields_refuses_them(strict: tuple[FakeWorker, int], path: str) -> None:
    with Raw(strict[1]) as raw:
        raw.post(path, {**GOOD[path], "max_token": 5})
        answer = raw.read()
        assert answer.status == 400
        assert HEADER not in answer.headers
        assert answer.error["param"] == "max_token"
        assert answer.error["message"] == "max_token: unknown field; did you mean max_tokens?"
        raw.post(CHAT, {"messages": [{**USER, "x": 1}]})
        assert raw.read().error["param"] == "messages[0].x"


@pytest.mark.parametrize("name", AGENT_BODIES)
def test_strict_fields_takes_what_is_known(strict: tuple[FakeWorker, int], name: str) -> None:
    worker, port = strict
    with Raw(port) as raw:
        assert answered(raw, worker, CHAT, AGENT_BODIES[name])[1].status == 200


# ---- the log ---------------------------------------------------------------------------------


class Refused:
    """A sink that takes the answers of a front without a worker."""

    def respond(self, response: Response) -> None:
        assert response.status == 503


def test_the_log_names_each_kind_once(caplog: pytest.LogCaptureFixture) -> None:
    class NoWorker:
        models = ()

    endpoints = ModelEndpoints(cast(Any, NoWorker()), ApiKeys(()), cast(Any, None), Limits())

    def post(body: bytes) -> None:
        request = HttpRequest("POST", COMPLETIONS, body=body, id="me")
        exchange = Exchange(request, cast(Any, Refused()))
        endpoints.handle(endpoints.posts[COMPLETIONS], request, exchange)

    with caplog.at_level(logging.INFO, "slipstream.http.endpoints.model_endpoints"):
        for body in (b'{"prompt": "secret", "zz\\n": 1}', b'{"prompt": "x", "yy": 1}'):
            post(body)
            post(body)
    lines = [record.getMessage() for record in caplog.records if "ignored" in record.getMessage()]
    assert lines == ["ignored: zz_", "ignored: yy"]


# ---- the request's id ------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_id_in_the_body_is_the_requests(raw, played, path: str, is_stream: bool) -> None:
    body = {**GOOD[path], "stream": is_stream, "request_id": "mine"}
    submit, answer = answered(raw, played, path, body)
    assert (submit.label, answer.headers["x-request-id"]) == ("mine", "mine")
    submit, answer = answered(raw, played, path, body, "X-Request-Id: theirs")
    assert (submit.label, answer.headers["x-request-id"]) == ("theirs", "theirs")


def test_what_cannot_be_an_id_is_none(raw: Raw, played: FakeWorker) -> None:
    for given in ("", "a b", "a\r\nSet-Cookie: x", "é", "x" * 129):
        submit, answer = answered(raw, played, CHAT, {**GOOD[CHAT], "request_id": given})
        assert answer.headers["x-request-id"] == submit.label != given
    raw.post(CHAT, {**GOOD[CHAT], "request_id": 7})
    answer = raw.read()
    assert (answer.status, answer.error["param"]) == (400, "request_id")


def test_an_error_has_the_requests_id(raw: Raw, played: FakeWorker) -> None:
    body = {**GOOD[CHAT], "request_id": "mine"}
    raw.post(CHAT, {**body, "temperature": -1})
    answer = raw.read()
    assert (answer.status, answer.headers["x-request-id"]) == (400, "mine")
    raw.post(CHAT, body)
    played.reject(played.expect(Submit), Fault("overloaded", "full"))
    answer = raw.read()
    assert (answer.status, answer.headers["x-request-id"]) == (503, "mine")
    raw.post(CHAT, b"{", "X-Request-Id: theirs")
    answer = raw.read()
    assert (answer.status, answer.headers["x-request-id"]) == (400, "theirs")


# ---- usage -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOOD)
def test_usage_has_details_as_vllm_50895_asks(raw, played, path: str) -> None:
    """Streamed or not; in a stream they are in the one last chunk with usage."""
    expected = {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 16},
        "completion_tokens_details": {
            "reasoning_tokens": 1,
            "accepted_prediction_tokens": 5,
            "rejected_prediction_tokens": 2,
        },
    }
    ends = {
        "num_cached_tokens": 16,
        "num_reasoning_tokens": 1,
        "num_accepted_prediction_tokens": 5,
        "num_rejected_prediction_tokens": 2,
    }
    _, answer = answered(raw, played, path, GOOD[path], **ends)
    assert answer.json["usage"] == expected
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    _, answer = answered(raw, played, path, {**GOOD[path], **stream}, **ends)
    *chunks, last, done = answer.events
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], expected)
    assert [chunk["usage"] for chunk in chunks] == [None] * len(chunks)
    stream = {"stream": True, "stream_options": {"continuous_usage_stats": True}}
    stream["stream_options"] |= {"include_usage": True}
    _, answer = answered(raw, played, path, {**GOOD[path], **stream}, **ends)
    *chunks, last, _ = answer.events
    assert last["usage"] == expected
    assert all("prompt_tokens_details" not in chunk["usage"] for chunk in chunks)


def test_a_prompt_with_several_answers_is_counted_once(raw: Raw, played: FakeWorker) -> None:
    """Its other answers found the blocks of the first one."""
    raw.post(COMPLETIONS, {"prompt": ["x", "y"], "n": 2})
    for num in (0, 48, 16, 64):
        submit = played.expect(Submit)
        played.accept(submit, range(100))
        end = End("stop", 1, num_cached_tokens=num)
        played.send(deltas(Entry(submit.handle, "x", end=end)))
    usage = raw.read().json["usage"]
    assert usage["prompt_tokens"] == 200
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
