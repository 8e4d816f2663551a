"""GET /openapi.json, generated from the types of requests and responses.

- Schemas are msgspec's, of the types that read and write the JSON. A type that several endpoints
  share is narrowed to what each of them sends.
- A field that is not supported yet lists its accepted values.
- A test compares the paths here with those of `app`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec
from msgspec import Struct, UnsetType

from slipstream.http.admin.live import LiveNumbers
from slipstream.http.errors import ErrorBody
from slipstream.http.openai import requests as asks
from slipstream.http.openai import responses as gives
from slipstream.http.openai.resuming import QUERY

_REF = "#/components/schemas/{name}"
_BY_ID = list[gives.LogprobsById]
_PROMPT = list[gives.LogprobsById | None] | UnsetType | None


def _narrowed(base: type[Struct], name: str, **types: Any) -> type[Struct]:
    """A copy of a Struct type called `name`, with the types of some fields replaced."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(base):
        kind = types.get(field.name, field.type)
        fields.append((field.name, kind) if field.required else (field.name, kind, field.default))
    return msgspec.defstruct(name, fields, namespace={"__doc__": base.__doc__})


_COMPLETION_CHOICE = _narrowed(
    gives.CompletionChoice,
    "CompletionChoice",
    text=str,
    logprobs=gives.CompletionLogprobs | None,
    prompt_logprobs=_PROMPT,
)
_CHAT_CHOICE = _narrowed(gives.ChatChoice, "ChatChoice", logprobs=gives.ChatLogprobs | None)
_CHAT_DELTA = _narrowed(gives.ChatDelta, "ChatDelta", content=str | UnsetType)
_CHAT_CHUNK_CHOICE = _narrowed(
    gives.ChatChunkChoice, "ChatChunkChoice", delta=_CHAT_DELTA, logprobs=gives.ChatLogprobs | None
)
_GENERATE_CHOICE = _narrowed(
    gives.GenerateChoice, "GenerateChoice", text=str, logprobs=_BY_ID | None
)


def _answer(name: str, choice: type[Struct]) -> type[Struct]:
    return _narrowed(gives.Answer, name, choices=list[choice])  # type: ignore[valid-type]


@dataclass(frozen=True)
class Endpoint:
    """One method of a path. Types: body of the request, gives of the answer, streams of events."""

    method: str
    summary: str
    gives: type
    body: type | None = None
    streams: type | None = None
    has_key: bool = True
    query: tuple[str, ...] = ()
    media: str = "application/json"  # of the answer


_COMPLETION = _answer("CompletionAnswer", _COMPLETION_CHOICE)
_CHAT = _answer("ChatAnswer", _CHAT_CHOICE)
_CHAT_CHUNK = _answer("ChatChunk", _CHAT_CHUNK_CHOICE)
_GENERATION = _answer("Generation", _GENERATE_CHOICE)

# by path; braces mark parameters
ENDPOINTS: dict[str, Endpoint] = {
    "/health": Endpoint("get", "how every process is", gives.Health, has_key=False),
    "/ready": Endpoint("get", "whether a request would be served", gives.Health, has_key=False),
    "/metrics": Endpoint(
        "get", "what was counted, for Prometheus", str, has_key=False, media="text/plain"
    ),
    "/live": Endpoint("get", "how the stack does right now", LiveNumbers, has_key=False),
    "/version": Endpoint("get", "of this software", gives.Version, has_key=False),
    "/v1/models": Endpoint("get", "what is served", gives.Models),
    "/v1/models/{id}": Endpoint("get", "the model of this name", gives.Model),
    "/v1/completions": Endpoint(
        "post",
        "prompts go on",
        _COMPLETION,
        body=asks.CompletionRequest,
        streams=_COMPLETION,
    ),
    "/v1/chat/completions": Endpoint(
        "post", "a conversation goes on", _CHAT, body=asks.ChatRequest, streams=_CHAT_CHUNK
    ),
    "/v1/streams/{id}": Endpoint(
        "get",
        "an answer's events, from where its reader is (Last-Event-ID) or from the beginning",
        _COMPLETION,
        streams=_COMPLETION | _CHAT_CHUNK | _GENERATION,  # type: ignore[arg-type]
        query=QUERY,
    ),
    "/generate": Endpoint(
        "post",
        "a prompt goes on; with token ids",
        _GENERATION,
        body=asks.GenerateRequest,
        streams=_GENERATION,
    ),
    "/abort": Endpoint("post", "end a request", gives.Aborted, body=asks.AbortRequest),
    "/tokenize": Endpoint("post", "what a prompt becomes", gives.Tokens, body=asks.TokenizeRequest),
    "/detokenize": Endpoint(
        "post", "what token ids read like", gives.Text, body=asks.DetokenizeRequest
    ),
    "/tokenizer_info": Endpoint("get", "how the tokenizer is set up", dict[str, Any]),
    "/openapi.json": Endpoint("get", "this description", dict[str, Any], has_key=False),
}


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    kinds: list[Any] = [ErrorBody]
    for endpoint in ENDPOINTS.values():
        kinds += [endpoint.gives, *_parts(endpoint.streams)]
        kinds += [] if endpoint.body is None else [endpoint.body]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    by_kind = dict(zip(kinds, schemas, strict=True))
    for endpoint in ENDPOINTS.values():
        if endpoint.body is not None:
            _show_what_is_not_supported(endpoint.body, components)
    _show_what_is_not_supported(asks.Message, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": version("slipstream")},
        "paths": {path: _path(path, each, by_kind) for path, each in ENDPOINTS.items()},
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _path(path: str, endpoint: Endpoint, by_kind: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.body is not None or endpoint.streams is None:
        content[endpoint.media] = {"schema": by_kind[endpoint.gives]}
    parts = [by_kind[part] for part in _parts(endpoint.streams)]
    if parts:
        said = "each event's data; the last one is [DONE]"
        schema = {"anyOf": [*parts, by_kind[ErrorBody]], "description": said}
        content["text/event-stream"] = {"schema": schema}
    error = {
        "description": "what is wrong",
        "content": {"application/json": {"schema": by_kind[ErrorBody]}},
    }
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.method + path.translate(_TO_NAMES),
        "responses": {
            "200": {"description": endpoint.summary, "content": content},
            "4XX": error,
            "5XX": error,
        },
        # {}: a server without keys needs none
        "security": [{"key": []}, {}] if endpoint.has_key else [{}],
    }
    if endpoint.body is not None:
        body = {"application/json": {"schema": by_kind[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    parameters = _parameters(path, endpoint)
    if parameters:
        operation["parameters"] = parameters
    return {endpoint.method: operation}


_TO_NAMES = str.maketrans({"/": "_", "{": "", "}": "", ".": "_"})


def _parameters(path: str, endpoint: Endpoint) -> list[dict[str, Any]]:
    text = {"type": "string"}
    found: list[dict[str, Any]] = []
    if "{id}" in path:
        found.append({"name": "id", "in": "path", "required": True, "schema": text})
    found += [{"name": name, "in": "query", "schema": text} for name in endpoint.query]
    if endpoint.streams is not None:
        found.append({"name": "Last-Event-ID", "in": "header", "schema": text})
    return found


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union; a single type alone, and nothing for None."""
    return () if kind is None else getattr(kind, "__args__", (kind,))


def _show_what_is_not_supported(kind: type, components: dict[str, Any]) -> None:
    properties = components[kind.__name__]["properties"]
    for name, neutral in asks.NEUTRAL.items():
        if name in properties and properties[name].keys() <= {"default"}:
            properties[name] = {"enum": [*neutral, None], "description": "not supported yet"}
