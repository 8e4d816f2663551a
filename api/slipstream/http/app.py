"""Which request goes where.

Owns: the paths, who may use them, what is refused before a body is read. Does not know: sockets,
how answers are made (`answer`).

Rules:
- A request's body is JSON and says so: what a browser sends on behalf of a foreign page does not.
- /health says whether every process of the stack lives and goes on, as the supervisor sees it (one
  that starts for the first time does); /ready, whether a request would be served now. Neither asks
  for a key.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from urllib.parse import unquote

from msgspec import UNSET

from slipstream.errors import SlipstreamError
from slipstream.http import answer
from slipstream.http.ask import Ask
from slipstream.http.auth import Keys
from slipstream.http.chat import ask_chat, read_chat
from slipstream.http.completions import ask_completion, read_completion
from slipstream.http.config import Limits
from slipstream.http.connection import Exchange
from slipstream.http.errors import ApiError, error_of, not_ready, unknown_model
from slipstream.http.parsing import Request
from slipstream.http.responses import Health, Model, Models, Version
from slipstream.http.resuming import PREFIX as STREAMS
from slipstream.http.resuming import ask_again, ask_for_stream, last_event, wants_events
from slipstream.http.token_texts import TokenTexts
from slipstream.http.wire import json_response
from slipstream.loop_io import LoopIO
from slipstream_ipc.messages import ModelCard

_logger = logging.getLogger(__name__)
_NEEDS_KEY = "/v1/"
_MODEL = "/v1/models/"
_WELL = frozenset(("starting", "ready"))
Handler = Callable[[Request, Exchange], None]


class App:
    """The handlers, over one connection to the worker."""

    def __init__(self, io: LoopIO, keys: Keys, texts: TokenTexts, limits: Limits) -> None:
        self._io = io
        self._keys = keys
        self._texts = texts
        self._limits = limits
        self._started = int(time.time())
        self.processes: dict[str, str] = {}  # how they are, by name, as far as somebody has said
        self._handlers: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/v1/completions": {"POST": self._completions},
            "/v1/chat/completions": {"POST": self._chat},
        }
        self._below: dict[str, dict[str, Handler]] = {  # paths that begin so
            _MODEL: {"GET": self._model},
            STREAMS: {"GET": self._streams},
        }

    def check_head(self, request: Request) -> ApiError | None:
        """What is to be refused before its body is read."""
        path = request.path
        if path.startswith(_NEEDS_KEY):
            refusal = self._keys.check(request.headers.get(b"authorization"))
            if refusal is not None:
                return refusal
        methods = self._methods(path)
        if methods is None:
            return ApiError(404, f"no such path: {path[:200]}", code="not_found")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods:
            allowed = ", ".join(methods)
            message = f"method: got {request.method}, allowed: {allowed}"
            headers = ((b"allow", allowed.encode()),)
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        if method == "POST":
            kind = request.headers.get(b"content-type", b"application/json")
            if kind.partition(b";")[0].strip().lower() != b"application/json":
                what = "the body is JSON: send the header `Content-Type: application/json`"
                return ApiError(415, what)
        return None

    def handle(self, request: Request, exchange: Exchange) -> None:
        """See to it that the exchange gets its answer, now or later."""
        method = "GET" if request.method == "HEAD" else request.method
        methods = self._methods(request.path)
        assert methods is not None  # `check_head` has looked
        try:
            methods[method](request, exchange)
        except (ApiError, SlipstreamError) as error:
            exchange.respond(error_of(error, {}).response())
        except Exception as error:
            _logger.exception("%s %s failed", request.method, request.path)
            exchange.respond(error_of(error, {}).response())

    def _methods(self, path: str) -> dict[str, Handler] | None:
        for beginning, methods in self._below.items():
            if path.startswith(beginning):
                return methods
        return self._handlers.get(path)

    # ---- handlers ----------------------------------------------------------------------------

    def _health(self, _request: Request, exchange: Exchange) -> None:
        processes = self.processes
        is_well = _WELL.issuperset(processes.values())
        health = Health("ok" if is_well else "unhealthy", processes=processes or UNSET)
        exchange.respond(json_response(200 if is_well else 503, health))

    def _version(self, _request: Request, exchange: Exchange) -> None:
        exchange.respond(json_response(200, Version(version("slipstream"))))

    def _ready(self, _request: Request, exchange: Exchange) -> None:
        model = self._served()
        if not self._io.is_attached:
            raise not_ready("the engine behind this server does not answer")
        exchange.respond(json_response(200, Health("ready", model.name)))

    def _models(self, _request: Request, exchange: Exchange) -> None:
        exchange.respond(json_response(200, Models([self._shown(self._served())])))

    def _model(self, request: Request, exchange: Exchange) -> None:
        model = self._served()
        name = unquote(request.path.removeprefix(_MODEL))
        if name != model.name:
            raise unknown_model(name, model.name)
        exchange.respond(json_response(200, self._shown(model)))

    def _completions(self, request: Request, exchange: Exchange) -> None:
        model = self._served()
        body = read_completion(request.body)
        _check_model(body.model, model)
        event_id = last_event(request)
        if event_id is not None:
            self._start(ask_again(event_id, "cmpl", model), request, exchange)
        else:
            self._start(ask_completion(body, model), request, exchange)

    def _chat(self, request: Request, exchange: Exchange) -> None:
        model = self._served()
        body = read_chat(request.body)
        _check_model(body.model, model)
        event_id = last_event(request)
        if event_id is not None:
            self._start(ask_again(event_id, "chatcmpl", model), request, exchange)
        else:
            self._start(ask_chat(body, model), request, exchange)

    def _streams(self, request: Request, exchange: Exchange) -> None:
        if request.method == "HEAD":  # it would take the stream from its reader
            raise ApiError(405, "method: got HEAD, allowed: GET", headers=((b"allow", b"GET"),))
        self._start(ask_for_stream(request, self._served()), request, exchange)

    def _start(self, ask: Ask, request: Request, exchange: Exchange) -> None:
        if wants_events(request) and ask.can_resume:
            ask = replace(ask, is_resumable=True)
        start = partial(answer.start, ask, exchange, self._io, self._texts, self._limits)
        if ask.needs_texts:
            self._texts.when_loaded(start)
        else:
            start()

    def _served(self) -> ModelCard:
        model = self._io.model
        if model is None:
            raise not_ready("the engine behind this server is still starting")
        return model

    def _shown(self, model: ModelCard) -> Model:
        return Model(model.name, self._started, model.max_model_len)


def _check_model(name: str | None, model: ModelCard) -> None:
    if name is not None and name != model.name:
        raise unknown_model(name, model.name)
