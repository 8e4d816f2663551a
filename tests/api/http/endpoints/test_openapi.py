"""The description at /openapi.json: a valid one, of what is there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from openapi_spec_validator import validate
from tests.helpers.http_front import Raw, events_of
from tests.helpers.message_events import content_of, named_events
from tests.helpers.openapi import DOCUMENT, schema_of
from tests.helpers.response_events import response_events

from slipstream import Stack
from slipstream.http.app import App
from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.logprobs.vocabulary import TextsByModel

MODEL = "tiny"
TURNS = [{"role": "user", "content": "hi"}]
ASKS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [[5, 6], [7]], "max_tokens": 3, "logprobs": 2, "n": 2},
    "/v1/chat/completions": {
        "messages": TURNS,
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 1,
        "logit_bias": {"7": 1},
    },
    "/v1/messages": {"model": MODEL, "messages": TURNS, "max_tokens": 3, "top_k": 2},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": TURNS},
    "/v1/responses": {"input": TURNS, "max_output_tokens": 3, "metadata": {"a": "b"}},
    "/v1/responses/input_tokens": {"input": TURNS},
    "/generate": {
        "text": "a",
        "sampling_params": {"max_tokens": 3, "logprobs": 1, "stop": ["zzz"], "min_p": 0.1},
    },
    "/tokenize": {"messages": TURNS, "return_token_strs": True},
    "/detokenize": {"tokens": [300, 301]},
}


def test_it_is_openapi():
    validate(DOCUMENT)
    assert DOCUMENT["openapi"].startswith("3.1")


def test_a_key_may_be_in_either_header():
    schemes = DOCUMENT["components"]["securitySchemes"]
    security = DOCUMENT["paths"]["/v1/messages"]["post"]["security"]
    assert {name for each in security for name in each} == set(schemes)
    assert schemes["x-api-key"] == {"type": "apiKey", "in": "header", "name": "x-api-key"}


def test_it_describes_every_path_and_no_other():
    io: Any = None  # nothing is asked of it
    keys, texts = ApiKeys(()), TextsByModel(lambda _: "/nowhere")
    app = App(io, keys, ModelEndpoints(io, keys, texts, Limits()))
    described: dict[str, set[str]] = {}
    for path, methods in DOCUMENT["paths"].items():
        described.setdefault(path.partition("{id}")[0], set()).update(map(str.upper, methods))
    assert described == {path: set(methods) for path, methods in app.endpoints.items()}


def test_what_is_not_supported_says_so():
    shown = DOCUMENT["components"]["schemas"]["ChatRequest"]["properties"]
    assert shown["functions"]["enum"] == [[], None]
    assert shown["modalities"]["enum"] == [["text"], None]
    assert "enum" not in shown["temperature"]


@pytest.fixture
def connection(chain_stack: Stack) -> Iterator[Raw]:
    with Raw(int(chain_stack.http_address.rpartition(":")[2])) as raw:
        yield raw


@pytest.mark.parametrize("path", ASKS)
def test_requests_and_answers_are_as_it_says(connection, path):
    body = ASKS[path]
    jsonschema.validate(body, schema_of(path, "body"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**body, "nonsense": 1}, schema_of(path, "body"))
    connection.post(path, body)
    answer = connection.read()
    assert answer.status == 200, answer.body
    jsonschema.validate(answer.json, schema_of(path, "application/json"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"nothing": "of that"}, schema_of(path, "application/json"))


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_events_are_as_it_says(connection, path):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**ASKS[path], "stream": True, "stream_options": options}
    jsonschema.validate(body, schema_of(path, "body"))
    connection.post(path, body)
    *events, done = events_of(connection.read().body)
    assert done == "[DONE]"
    assert events[-1]["usage"]["total_tokens"] > 3
    for event in events:
        assert event["usage"]["total_tokens"]
        jsonschema.validate(event, schema_of(path, "text/event-stream"))


def test_events_of_a_response_are_as_it_says(connection):
    path = "/v1/responses"
    connection.post(path, {**ASKS[path], "stream": True})
    events = [data for _, data in response_events(connection.read().body)]
    assert events[-1]["type"] == "response.incomplete"
    for event in events:
        jsonschema.validate(event, schema_of(path, "text/event-stream"))


def test_events_of_messages_are_as_it_says(connection):
    path = "/v1/messages"
    connection.post(path, {**ASKS[path], "stream": True})
    events = named_events(connection.read().body)
    content_of(events)
    for _, event in events:
        jsonschema.validate(event, schema_of(path, "text/event-stream"))


def test_it_is_served_without_a_key_asked_for(connection):
    answer = connection.get("/openapi.json")
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/json"
    assert answer.json == DOCUMENT
