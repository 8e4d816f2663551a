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
from slipstream.http.anthropic import request_bodies as messages_requests
from slipstream.http.anthropic import response_bodies as messages_responses
from slipstream.http.api_errors import (
    AnthropicErrorBody,
    ErrorBody,
    ErrorShape,
    error_shape,
)
from slipstream.http.endpoints.model_pages import PAGE_QUERY
from slipstream.http.endpoints.response_endpoints import LIST_QUERY
from slipstream.http.endpoints.response_endpoints import QUERY as RESPONSE_QUERY
from slipstream.http.endpoints.resume import QUERY
from slipstream.http.openai import request_bodies as requests
from slipstream.http.openai import response_bodies as responses
from slipstream.http.responses.response_object import (
    DeletedResponse,
    InputItemList,
    InputTokenCount,
    ResponseObject,
)
from slipstream.http.responses.responses_request import ResponsesRequest
from slipstream.http.responses.stream_events import StreamEvent

_REF = "#/components/schemas/{name}"
_BY_ID = list[responses.LogprobsById]
_PROMPT = list[responses.LogprobsById | None] | UnsetType | None


def _narrowed(base: type[Struct], name: str, **types: Any) -> type[Struct]:
    """A copy of a Struct type called `name`, with the types of some fields replaced."""
    fields: list[Any] = []
    for field in msgspec.structs.fields(base):
        kind = types.get(field.name, field.type)
        fields.append((field.name, kind) if field.required else (field.name, kind, field.default))
    namespace = {"__doc__": base.__doc__}
    config = base.__struct_config__
    tag: dict[str, Any] = {} if config.tag is None else {"tag": config.tag}
    return msgspec.defstruct(
        name, fields, namespace=namespace, kw_only=True, tag_field=config.tag_field, **tag
    )


_COMPLETION_CHOICE = _narrowed(
    responses.CompletionChoice,
    "CompletionChoice",
    text=str,
    logprobs=responses.CompletionLogprobs | None,
    prompt_logprobs=_PROMPT,
)
_ANSWER_MESSAGE = _narrowed(responses.AnswerMessage, "AnswerMessage", content=str | None)
_CHAT_CHOICE = _narrowed(
    responses.ChatChoice,
    "ChatChoice",
    message=_ANSWER_MESSAGE,
    logprobs=responses.ChatLogprobs | None,
)
_FUNCTION_CHUNK = _narrowed(responses.FunctionChunk, "FunctionChunk", arguments=str)
_CALL_CHUNK = _narrowed(responses.CallChunk, "CallChunk", function=_FUNCTION_CHUNK)
_CHAT_DELTA = _narrowed(
    responses.ChatDelta,
    "ChatDelta",
    content=str | UnsetType,
    reasoning_content=str | UnsetType,
    reasoning=str | UnsetType,
    tool_calls=list[_CALL_CHUNK] | UnsetType,  # type: ignore[valid-type]
)
_CHAT_CHUNK_CHOICE = _narrowed(
    responses.ChatChunkChoice,
    "ChatChunkChoice",
    delta=_CHAT_DELTA,
    logprobs=responses.ChatLogprobs | None,
)
_GENERATE_CHOICE = _narrowed(
    responses.GenerateChoice, "GenerateChoice", text=str, logprobs=_BY_ID | None
)


def _answer(name: str, choice: type[Struct]) -> type[Struct]:
    return _narrowed(responses.Answer, name, choices=list[choice])  # type: ignore[valid-type]


@dataclass(frozen=True)
class Endpoint:
    """One method of a path, with the types of its bodies. events: those of a stream's events, the
    last of which may be [DONE]. others: further methods of the path.
    """

    method: str
    summary: str
    answer: type
    body: type | None = None
    events: type | None = None
    has_key: bool = True
    query: tuple[str, ...] = ()
    media: str = "application/json"  # of the answer
    has_done: bool = True
    others: tuple[Endpoint, ...] = ()


_COMPLETION = _answer("CompletionAnswer", _COMPLETION_CHOICE)
_CHAT = _answer("ChatAnswer", _CHAT_CHOICE)
_CHAT_CHUNK = _answer("ChatChunk", _CHAT_CHUNK_CHOICE)
_GENERATION = _answer("Generation", _GENERATE_CHOICE)

_TOOL_USE = _narrowed(messages_responses.MessageToolUse, "MessageToolUse", input=dict[str, Any])
_MESSAGE_CONTENT: Any = (
    messages_responses.MessageText | messages_responses.MessageThinking | _TOOL_USE
)
_MESSAGE = _narrowed(
    messages_responses.AnsweredMessage, "AnsweredMessage", content=list[_MESSAGE_CONTENT]
)
_CONTENT_DELTA = (
    _narrowed(messages_responses.TextDelta, "TextDelta", text=str)
    | _narrowed(messages_responses.ThinkingDelta, "ThinkingDelta", thinking=str)
    | _narrowed(messages_responses.InputJsonDelta, "InputJsonDelta", partial_json=str)
)
_MESSAGE_EVENT: Any = (
    _narrowed(messages_responses.MessageStart, "MessageStart", message=_MESSAGE)
    | messages_responses.PingEvent
    | _narrowed(
        messages_responses.ContentBlockStart, "ContentBlockStart", content_block=_MESSAGE_CONTENT
    )
    | _narrowed(messages_responses.ContentBlockDelta, "ContentBlockDelta", delta=_CONTENT_DELTA)
    | messages_responses.ContentBlockStop
    | messages_responses.MessageDelta
    | messages_responses.MessageStop
)

# by path; braces mark parameters
ENDPOINTS: dict[str, Endpoint] = {
    "/health": Endpoint("get", "state of every process", responses.Health, has_key=False),
    "/ready": Endpoint("get", "whether requests are served", responses.Health, has_key=False),
    "/metrics": Endpoint("get", "metrics for Prometheus", str, has_key=False, media="text/plain"),
    "/live": Endpoint("get", "current rates, latencies and timeline", LiveNumbers, has_key=False),
    "/version": Endpoint(
        "get", "version of Slipstream, and of another engine", responses.Version, has_key=False
    ),
    "/v1/models": Endpoint("get", "served models", responses.Models, query=PAGE_QUERY),
    "/v1/models/{id}": Endpoint("get", "one served model", responses.Model),
    "/v1/completions": Endpoint(
        "post",
        "complete prompts",
        _COMPLETION,
        body=requests.CompletionRequest,
        events=_COMPLETION,
    ),
    "/v1/chat/completions": Endpoint(
        "post", "complete a chat", _CHAT, body=requests.ChatRequest, events=_CHAT_CHUNK
    ),
    "/v1/responses": Endpoint(
        "post",
        "make a response",
        ResponseObject,
        body=ResponsesRequest,
        events=StreamEvent,  # type: ignore[arg-type]
        has_done=False,
    ),
    "/v1/responses/input_tokens": Endpoint(
        "post", "count the tokens of a response's input", InputTokenCount, body=ResponsesRequest
    ),
    "/v1/responses/{id}": Endpoint(
        "get",
        "a response that is kept, as it is now or as a stream",
        ResponseObject,
        events=StreamEvent,  # type: ignore[arg-type]
        query=RESPONSE_QUERY,
        has_done=False,
        others=(Endpoint("delete", "keep a response no longer", DeletedResponse),),
    ),
    "/v1/responses/{id}/cancel": Endpoint("post", "end a response", ResponseObject),
    "/v1/responses/{id}/input_items": Endpoint(
        "get", "the input of a response that is kept", InputItemList, query=LIST_QUERY
    ),
    "/v1/messages": Endpoint(
        "post",
        "answer a conversation, in Anthropic's shapes",
        _MESSAGE,
        body=messages_requests.MessagesRequest,
        events=_MESSAGE_EVENT,
        has_done=False,
    ),
    "/v1/messages/count_tokens": Endpoint(
        "post",
        "count the tokens of a conversation",
        messages_responses.InputTokens,
        body=messages_requests.CountTokensRequest,
    ),
    "/v1/streams/{id}": Endpoint(
        "get",
        "resume an answer after Last-Event-ID, or read it from its beginning",
        _COMPLETION,
        events=_COMPLETION | _CHAT_CHUNK | _GENERATION | _MESSAGE_EVENT,
        query=QUERY,
    ),
    "/v1/embeddings": Endpoint(
        "post", "embed texts", responses.EmbeddingList, body=requests.EmbeddingRequest
    ),
    "/classify": Endpoint(
        "post",
        "classify texts",
        responses.ClassificationList,
        body=requests.ClassificationRequest,
    ),
    **{
        path: Endpoint(
            "post", "score pairs of texts", responses.ScoreList, body=requests.ScoreRequest
        )
        for path in ("/score", "/v1/score")
    },
    **{
        path: Endpoint("post", "rank documents", responses.RerankList, body=requests.RerankRequest)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    },
    "/generate": Endpoint(
        "post",
        "complete a prompt; with token ids",
        _GENERATION,
        body=requests.GenerateRequest,
        events=_GENERATION,
    ),
    "/abort": Endpoint("post", "abort a request", responses.Aborted, body=requests.AbortRequest),
    "/v1/load_lora_adapter": Endpoint(
        "post", "load an adapter", str, body=requests.LoadLoraRequest, media="text/plain"
    ),
    "/v1/unload_lora_adapter": Endpoint(
        "post", "unload an adapter", str, body=requests.UnloadLoraRequest, media="text/plain"
    ),
    "/tokenize": Endpoint(
        "post", "tokenize a prompt or messages", responses.Tokens, body=requests.TokenizeRequest
    ),
    "/detokenize": Endpoint(
        "post", "detokenize token ids", responses.Text, body=requests.DetokenizeRequest
    ),
    "/tokenizer_info": Endpoint("get", "tokenizer configuration", dict[str, Any]),
    "/openapi.json": Endpoint("get", "this document", dict[str, Any], has_key=False),
}


@cache
def document() -> bytes:
    """The OpenAPI 3.1 document as JSON."""
    return msgspec.json.encode(_document())


def _document() -> dict[str, Any]:
    kinds: list[Any] = [ErrorBody, AnthropicErrorBody]
    endpoints = [each for first in ENDPOINTS.values() for each in (first, *first.others)]
    for endpoint in endpoints:
        kinds += [endpoint.answer, *_parts(endpoint.events)]
        kinds += [] if endpoint.body is None else [endpoint.body]
    kinds = list(dict.fromkeys(kinds))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    by_kind = dict(zip(kinds, schemas, strict=True))
    for endpoint in endpoints:
        if endpoint.body is not None:
            _mark_unsupported(endpoint.body, components)
    _mark_unsupported(requests.Message, components)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": version("slipstream")},
        "paths": {
            path: {each.method: _operation(path, each, by_kind) for each in (first, *first.others)}
            for path, first in ENDPOINTS.items()
        },
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(path: str, endpoint: Endpoint, by_kind: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if endpoint.body is not None or endpoint.events is None or not endpoint.has_done:
        content[endpoint.media] = {"schema": by_kind[endpoint.answer]}
    parts = [by_kind[part] for part in _parts(endpoint.events)]
    is_anthropic = error_shape(path) == ErrorShape.ANTHROPIC
    error_body = by_kind[AnthropicErrorBody if is_anthropic else ErrorBody]
    if parts:
        done = "; the last one is [DONE]" if endpoint.has_done else ""
        schema = {"anyOf": [*parts, error_body], "description": f"each event's data{done}"}
        content["text/event-stream"] = {"schema": schema}
    error = {"description": "error", "content": {"application/json": {"schema": error_body}}}
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": endpoint.method + path.translate(_TO_NAMES),
        "responses": {
            "200": {"description": endpoint.summary, "content": content},
            "4XX": error,
            "5XX": error,
        },
        # {}: a server without keys needs none
        "security": [{"bearer": []}, {"x-api-key": []}, {}] if endpoint.has_key else [{}],
    }
    if endpoint.body is not None:
        body = {"application/json": {"schema": by_kind[endpoint.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    parameters = _parameters(path, endpoint)
    if parameters:
        operation["parameters"] = parameters
    return operation


_TO_NAMES = str.maketrans({"/": "_", "{": "", "}": "", ".": "_"})


def _parameters(path: str, endpoint: Endpoint) -> list[dict[str, Any]]:
    text = {"type": "string"}
    found: list[dict[str, Any]] = []
    if "{id}" in path:
        found.append({"name": "id", "in": "path", "required": True, "schema": text})
    found += [{"name": name, "in": "query", "schema": text} for name in endpoint.query]
    if endpoint.events is not None:
        found.append({"name": "Last-Event-ID", "in": "header", "schema": text})
    return found


def _parts(kind: Any) -> tuple[Any, ...]:
    """The members of a union; a single type alone, and nothing for None."""
    return () if kind is None else getattr(kind, "__args__", (kind,))


def _mark_unsupported(kind: type, components: dict[str, Any]) -> None:
    properties = components[kind.__name__]["properties"]
    for name, neutral in requests.NEUTRAL_VALUES.items():
        if name in properties and properties[name].keys() <= {"default"}:
            properties[name] = {"enum": [*neutral, None], "description": "not supported yet"}
