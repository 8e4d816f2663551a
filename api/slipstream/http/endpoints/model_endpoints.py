"""The endpoints that run the model or its tokenizer, independent of HTTP's transport.

Each takes a request and an exchange, which gets the answer now or later. `App` calls them by path;
`ModelEndpoints.answer` calls one from within this process and waits for the answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from asyncio import Future
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar
from weakref import WeakValueDictionary

from slipstream.client.connection.loop_io import LoopIO
from slipstream.client.streams.stream_state import StreamState
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.anthropic.messages import (
    count_tokens,
    plan_messages,
    read_count_tokens,
    read_messages,
)
from slipstream.http.api_errors import ApiError
from slipstream.http.auth import ApiKeys
from slipstream.http.config import Limits
from slipstream.http.endpoints.response_endpoints import (
    COUNT_PATH,
    PATH,
    ResponseEndpoints,
    Starter,
)
from slipstream.http.endpoints.resume import (
    accepts_events,
    plan_or_resume,
    plan_resumed_stream,
    resumed_answer,
)
from slipstream.http.exchange import Exchange, Handler, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.native.abort import abort
from slipstream.http.native.adapters import load_adapter, unload_adapter
from slipstream.http.native.embeddings import embeddings, read_embeddings
from slipstream.http.native.generate import plan_generation, read_generate
from slipstream.http.native.scoring import (
    classify,
    read_classification,
    read_rerank,
    read_score,
    rerank,
    score,
)
from slipstream.http.native.tokenize import detokenize, tokenize, tokenizer_info
from slipstream.http.openai.body_decoder import check_num_values
from slipstream.http.openai.decoded_files import (
    decoded_files,
    has_large_files,
    known_files,
)
from slipstream.http.openai.ignored_fields import IGNORED_FIELDS, IgnoredFields
from slipstream.http.openai.request_bodies import SampledRequest
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream.http.planning.served_model import guarded, served_model, served_models
from slipstream.http.response_encoding import Response
from slipstream.http.responses.response_plan import KIND
from slipstream.request.served_models import find_model
from slipstream.request.trace_context import TRACEPARENT, TRACESTATE, trace_context
from slipstream_ipc.messages import MediaItem, ModelCard, TraceContext
from slipstream_ipc.telemetry.logs import of_requests

_logger = logging.getLogger(__name__)
_LOCATE_S = 2.0  # for replicas to say whether they have a stream
_MISSING_S = 2.0  # for one that is away to come back, where the others do not have it
_MAX_LOGGED = 64  # kinds of ignored fields that are not logged again
Body = TypeVar("Body")


class ModelEndpoints:
    """The endpoints, over one connection to the worker. posts, gets: handlers by path."""

    def __init__(
        self,
        io: LoopIO,
        keys: ApiKeys,
        texts: TextsByModel,
        limits: Limits,
        *,
        is_traced: bool = False,
        strict_fields: bool = False,
        strict_finish: bool = False,
    ) -> None:
        """is_traced: whether requests carry their trace to the worker, which exports it.
        strict_fields: whether unknown fields of OpenAI's and Anthropic's bodies are refused.
        strict_finish: see `plan_chat`.
        """
        self._is_traced = is_traced
        self._strict_fields = strict_fields
        self._strict_finish = strict_finish
        self._logged: deque[str] = deque(maxlen=_MAX_LOGGED)  # ignored fields
        self._io = io
        self._keys = keys
        self._context = AnswerContext(io, texts, limits, log_ignored=self._log_ignored)
        self._streams_by_id: WeakValueDictionary[bytes, StreamState] = WeakValueDictionary()
        self.responses = ResponseEndpoints(io, keys, self._read, self._start, self._context)
        self.posts: dict[str, Handler] = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/v1/messages": self.messages,
            "/v1/messages/count_tokens": self.count_tokens,
            PATH: self.responses.create,
            COUNT_PATH: self.responses.count,
            "/v1/embeddings": self.embeddings,
            "/classify": self.classify,
            **dict.fromkeys(("/score", "/v1/score"), self.score),
            **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), self.rerank),
            "/generate": self.generate,
            "/abort": self.abort,
            "/v1/load_lora_adapter": partial(load_adapter, io, keys),
            "/v1/unload_lora_adapter": partial(unload_adapter, io, keys),
            "/tokenize": partial(tokenize, io),
            "/detokenize": partial(detokenize, io),
        }
        self.gets: dict[str, Handler] = {"/tokenizer_info": partial(tokenizer_info, io, texts)}

    async def answer(self, path: str, body: bytes) -> Response:
        """POST `body` to `path`, one of `posts`, from within this process. Not for streams."""
        request = HttpRequest("POST", path, body=body)
        answered: Future[Response] = asyncio.get_running_loop().create_future()
        exchange = Exchange(request, _InProcessSink(answered), takes_pieces=False)
        self.handle(self.posts[path], request, exchange)
        try:
            return await answered
        finally:
            exchange.release()

    def handle(self, handler: Handler, request: HttpRequest, exchange: Exchange) -> None:
        """Call a handler; an exception becomes the answer."""
        guarded(exchange, partial(self._handle, handler, request, exchange))

    def _handle(self, handler: Handler, request: HttpRequest, exchange: Exchange) -> None:
        longest = max([model.max_model_len for model in self._io.models], default=0)
        check_num_values(request.body, longest)
        if not has_large_files(request.body):
            handler(request, exchange)
            return
        request.keeps_body = True
        decoding = self._io.loop.run_in_executor(None, decoded_files, request.body)
        decoding.add_done_callback(partial(self._decoded, handler, request, exchange))

    def _decoded(
        self,
        handler: Handler,
        request: HttpRequest,
        exchange: Exchange,
        decoding: Future[dict[str, MediaItem]],
    ) -> None:
        """Call the handler of a request whose files are decoded."""
        request.keeps_body = False
        if exchange.is_open:
            guarded(exchange, partial(_with_files, handler, request, exchange, decoding))
        if not (request.keeps_body and exchange.is_open):
            request.free()

    def completions(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/completions. Raises: ApiError, BadRequestError."""
        body = self._read(read_completion, request)
        model = served_model(self._io, body.model)
        plan = plan_or_resume(request, "cmpl", model, partial(plan_completion, body, model))
        self._start(plan, request, exchange)

    def chat(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/chat/completions. Raises: ApiError, BadRequestError."""
        body = self._read(read_chat, request)
        model = served_model(self._io, body.model)
        new_plan = partial(plan_chat, body, model, strict_finish=self._strict_finish)
        plan = plan_or_resume(request, "chatcmpl", model, new_plan)
        self._start(plan, request, exchange)

    def messages(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/messages. Raises: ApiError."""
        body = self._read(read_messages, request)
        model = served_model(self._io, body.model)
        plan = plan_or_resume(request, "msg", model, partial(plan_messages, body, model))
        self._start(plan, request, exchange)

    def count_tokens(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/messages/count_tokens. Raises: ApiError, BadRequestError."""
        body = self._read(read_count_tokens, request)
        model = served_model(self._io, body.model)
        count_tokens(self._io, body, model, exchange)

    def embeddings(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /v1/embeddings. Raises: ApiError, BadRequestError."""
        body = self._read(read_embeddings, request)
        embeddings(self._io, body, request, exchange, self._context.slices)

    def classify(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /classify. Raises: ApiError, BadRequestError."""
        body = self._read(read_classification, request)
        classify(self._io, body, request, exchange, self._context.slices)

    def score(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /score. Raises: ApiError, BadRequestError."""
        body = self._read(read_score, request)
        score(self._io, body, request, exchange, self._context.slices)

    def rerank(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /rerank. Raises: ApiError, BadRequestError."""
        body = self._read(read_rerank, request)
        rerank(self._io, body, request, exchange, self._context.slices)

    def generate(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /generate. Raises: ApiError, BadRequestError."""
        body, params = read_generate(request.body)
        model = served_model(self._io, body.model)
        new_plan = partial(plan_generation, body, params, model)
        self._start(plan_or_resume(request, "gen", model, new_plan), request, exchange)

    def streams(self, request: HttpRequest, exchange: Exchange) -> None:
        """GET /v1/streams/ID: resume an answer. Raises: ApiError."""
        if request.method == "HEAD":  # it would take the stream over from its reader
            raise ApiError(405, "method: got HEAD, allowed: GET", headers=((b"allow", b"GET"),))

        def resume(model: ModelCard) -> None:
            first = resumed_answer(request).first
            plan = plan_resumed_stream(request, self._adapted(model, first, request))
            start = self.responses.resume if plan.id.kind == KIND else self._start
            start(plan, request, exchange)

        models = served_models(self._io)
        if len(models) == 1:
            resume(models[0])
        else:
            self._with_model_of(resumed_answer(request).first, request, exchange, resume)

    def _adapted(self, model: ModelCard, stream_id: bytes, request: HttpRequest) -> ModelCard:
        """The adapter of `model` that a stream was asked of, as far as is known here."""
        before = self._streams_by_id.get(stream_id)
        if before is None or before.resubmittable is None:
            return model
        if before.request.scope != self._keys.tenant(request.headers):
            return model
        its = before.resubmittable.adapter
        return (find_model(self._io.models, its) if its else None) or model

    def _with_model_of(
        self,
        stream_id: bytes,
        request: HttpRequest,
        exchange: Exchange,
        then: Callable[[ModelCard], None],
    ) -> None:
        """Call `then` with the model of a stream, with any of them where no replica knows it. One
        that is away is waited for, as it may.
        """
        tenant = self._keys.tenant(request.headers)

        def found(name: str, *, is_last: bool = False) -> None:
            models = served_models(self._io)
            model = find_model(models, name)
            if not exchange.is_open:
                return
            if model is not None or is_last or not self._is_any_away():
                then(model or models[0])
            else:
                self._io.loop.call_later(_MISSING_S, ask, True)

        def ask(is_last: bool) -> None:
            use = partial(_guarded_call, exchange, partial(found, is_last=is_last))
            self._io.find_model(stream_id, tenant, _LOCATE_S, use)

        before = self._streams_by_id.get(stream_id)
        if before is not None and before.request.scope == tenant and before.model:
            found(before.model)
        else:
            ask(False)

    def _is_any_away(self) -> bool:
        return any(each.condition == "away" for each in self._io.cluster.statuses())

    def abort(self, request: HttpRequest, exchange: Exchange) -> None:
        """POST /abort. Raises: ApiError."""
        abort(self._io, request, exchange, self._keys.tenant(request.headers))

    def _read(
        self, read: Callable[[bytes, IgnoredFields | None], Body], request: HttpRequest
    ) -> Body:
        """The body of a request to an endpoint of another server's API. Raises: ApiError."""
        ignored = None if self._strict_fields else IgnoredFields()
        try:
            body = read(request.body, ignored)
        finally:
            if ignored:
                self._tell_ignored(str(ignored), request)
        if isinstance(body, SampledRequest):
            request.take_id(body.request_id)
        return body

    def _tell_ignored(self, fields: str, request: HttpRequest) -> None:
        request.answer_headers = (*request.answer_headers, (IGNORED_FIELDS, fields.encode()))
        self._log_ignored(fields, request.id)

    def _log_ignored(self, fields: str, request_id: str) -> None:
        if fields not in self._logged:  # a client sends the same ones with each request
            self._logged.append(fields)
            _logger.info("ignored: %s", fields, extra=of_requests(request_id))

    def _start(
        self,
        plan: AnswerPlan,
        request: HttpRequest,
        exchange: Exchange,
        starter: Starter = start_answer,
    ) -> None:
        if accepts_events(request) and plan.can_resume:
            plan = replace(plan, is_resumable=True)
        tenant = self._keys.tenant(request.headers)
        has_priority = self._keys.has_priority(tenant)
        trace = _trace_of(request) if self._is_traced else None
        for state in plan.states:
            state.set_origin(tenant, request.id, trace, has_priority=has_priority)
            if state.resubmittable is not None:  # else it is looked for at the replicas of all
                state.model = plan.served_by
        if plan.is_resumable or plan.is_background:
            self._keep_submits(plan)
        start = partial(starter, plan, exchange, self._context)
        if plan.needs_texts:
            self._context.texts.of(plan.served_by).when_loaded(start)
        else:
            start()

    def _keep_submits(self, plan: AnswerPlan) -> None:
        """Keep what the streams were submitted as, so that a later GET can compute them again."""
        for state in plan.states:
            before = self._streams_by_id.get(state.stream_id)
            if before is not None and before.request.scope != state.request.scope:
                continue  # another key's
            if state.resubmittable is None and before is not None:
                state.resubmittable, state.model = before.resubmittable, before.model
            self._streams_by_id[state.stream_id] = state


def _with_files(
    handler: Handler,
    request: HttpRequest,
    exchange: Exchange,
    decoding: Future[dict[str, MediaItem]],
) -> None:
    with known_files(decoding.result()):
        handler(request, exchange)


def _guarded_call(exchange: Exchange, call: Callable[[str], None], found: str) -> None:
    guarded(exchange, partial(call, found))


def _trace_of(request: HttpRequest) -> TraceContext:
    """The trace in a request's headers, or a new one for all of its streams."""
    headers = request.headers
    parent = headers.get(TRACEPARENT.encode(), b"").decode("latin-1")
    state = headers.get(TRACESTATE.encode(), b"").decode("latin-1")
    return trace_context(parent, state) or TraceContext(secrets.token_bytes(16))


class _InProcessSink:
    """The sink of a request made within this process: takes a complete answer, no stream."""

    def __init__(self, answered: Future[Response]) -> None:
        self._answered = answered

    def respond(self, response: Response) -> None:
        if not self._answered.done():  # else the caller has cancelled
            self._answered.set_result(response)

    def write(self, data: bytes) -> None:
        raise NotImplementedError("a caller in this process takes no streams")

    def begin_stream(self, content_type: bytes, /) -> None:
        self.write(content_type)

    def finish(self) -> None:
        self.write(b"")

    def abort(self) -> None:
        self._answered.cancel()
