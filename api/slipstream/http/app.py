"""Routing: the paths, their handlers, and the checks made before a body is read.

- A body is JSON. A request with an Origin header must declare `Content-Type: application/json`,
  which a page of another origin cannot send without a preflight.
- A request whose Host is not one of this server's names is refused on any path (`hosts`). The live
  page and /live are closed to other origins.
- OPTIONS lists the methods of a path; a browser's preflight is answered as `cors` allows.
- /health: whether every process of the stack is alive, as the supervisor sees it (a process in its
  first start counts as alive). /ready: whether a request would be served now. /metrics: Prometheus.
  None of them needs a key: the numbers reveal nothing of prompts or outputs.
- While the stack drains, no stream begins; every other path answers, and a running stream can be
  resumed.
"""

from __future__ import annotations

import time
from importlib.metadata import version
from urllib.parse import unquote

from msgspec import UNSET

from slipstream.client.connection.loop_io import LoopIO
from slipstream.http.admin.live import Live
from slipstream.http.admin.metrics import Metrics
from slipstream.http.admin.static import PAGE, page_handlers
from slipstream.http.auth import Keys
from slipstream.http.config import Limits
from slipstream.http.counters import OTHER
from slipstream.http.errors import ApiError, is_draining, not_ready
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.openai import openapi
from slipstream.http.openai.endpoints import Endpoints, Handler
from slipstream.http.openai.responses import Health, Model, Models, Version
from slipstream.http.openai.resuming import PREFIX as STREAMS
from slipstream.http.openai.resuming import last_event
from slipstream.http.openai.served import served_model
from slipstream.http.openai.vocabulary import TokenTexts
from slipstream.http.server.cors import Cors
from slipstream.http.server.hosts import Hosts
from slipstream.http.wire import Response, json_response
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.telemetry.statistics import Statistics

_NEEDS_KEY = ("/v1/", "/generate", "/abort", "/tokenize", "/detokenize")
_MODEL = "/v1/models/"
_LIVE = "/live"
_WELL = frozenset(("starting", "ready"))
_ENGINE = ("core", "worker", "prompts")
_BEGINNING = frozenset(("/v1/completions", "/v1/chat/completions", "/generate"))


class App:
    """Routes requests to handlers, over one connection to the worker."""

    def __init__(
        self,
        io: LoopIO,
        keys: Keys,
        texts: TokenTexts,
        limits: Limits,
        cors: Cors | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        self._io = io
        self._keys = keys
        self._model = Endpoints(io, keys, texts, limits)
        self._cors = Cors(()) if cors is None else cors
        self._hosts = Hosts(None) if hosts is None else hosts
        self._started = int(time.time())
        self.is_draining = False
        self.processes: dict[str, str] = {}  # state by process name, as the supervisor reports it
        self.live = Live()
        self._metrics = Metrics()
        self.statistics = Statistics()  # latest of the whole stack; empty before the first report
        self._handlers: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/metrics": {"GET": self._tell_metrics},
            "/ready": {"GET": self._ready},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            _LIVE: {"GET": self._show_live},
            "/openapi.json": {"GET": self._openapi},
        }
        self._handlers |= {path: {"POST": each} for path, each in self._model.posts.items()}
        self._handlers |= {path: {"GET": each} for path, each in self._model.gets.items()}
        self._pages = page_handlers()
        self._handlers |= self._pages
        self._below: dict[str, dict[str, Handler]] = {  # by path prefix
            _MODEL: {"GET": self._tell_model},
            STREAMS: {"GET": self._model.streams},
        }

    def pattern_of(self, path: str) -> str:
        """The route that a path matches, one for all files of the page; "other" if none does."""
        for beginning in self._below:
            if path.startswith(beginning):
                return beginning + "{id}"
        if path in self._pages:
            return PAGE
        return path if path in self._handlers else OTHER

    @property
    def endpoints(self) -> dict[str, tuple[str, ...]]:
        """Every path of the API with its methods; a prefix of paths ends with a slash."""
        handlers = {**self._handlers, **self._below}
        return {path: tuple(each) for path, each in handlers.items() if path not in self._pages}

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request, as far as its head decides; None if its body may be read."""
        path = request.path
        request.answer_headers = self._cors.headers(request)
        refusal = self._hosts.check(request)
        if refusal is None and (path in self._pages or path == _LIVE):
            refusal = self._hosts.check_origin(request)
        if refusal is not None:
            return refusal
        if self._cors.is_preflight(request) and self._methods(path) is not None:
            return None
        if path.startswith(_NEEDS_KEY):
            refusal = self._keys.check(request.headers.get(b"authorization"))
            if refusal is not None:
                return refusal
        methods = self._methods(path)
        if methods is None:
            message = f"no such path: {path[:200]} (/openapi.json describes those there are)"
            return ApiError(404, message, code="not_found")
        method = "GET" if request.method == "HEAD" else request.method
        if method not in methods and method != "OPTIONS":
            allowed = ", ".join(methods)
            message = f"method: got {request.method}, allowed: {allowed}"
            headers = ((b"allow", allowed.encode()),)
            return ApiError(405, message, code="method_not_allowed", headers=headers)
        if (refusal := self._begins_too_late(request)) is not None:
            return refusal
        if method == "POST":
            # programs may leave it out; a request from a page, which has an Origin, may not
            unsaid = b"" if b"origin" in request.headers else b"application/json"
            kind = request.headers.get(b"content-type", unsaid)
            if kind.partition(b";")[0].strip().lower() != b"application/json":
                what = "the body is JSON: send the header `Content-Type: application/json`"
                return ApiError(415, what)
        return None

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""
        method = "GET" if request.method == "HEAD" else request.method
        methods = self._methods(request.path)
        assert methods is not None  # `check_head` refuses unknown paths
        if method == "OPTIONS":
            exchange.respond(self._options(request, methods))
            return
        if (refusal := self._begins_too_late(request)) is not None:
            exchange.respond(refusal.response())
            return
        self._model.handle(methods[method], request, exchange)

    def _methods(self, path: str) -> dict[str, Handler] | None:
        for beginning, methods in self._below.items():
            if path.startswith(beginning):
                return methods
        return self._handlers.get(path)

    def _begins_too_late(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request that would begin a stream while the server drains."""
        if not self.is_draining or request.path not in _BEGINNING or request.method != "POST":
            return None
        return is_draining() if last_event(request) is None else None  # else it resumes a stream

    def _options(self, request: HttpRequest, methods: dict[str, Handler]) -> Response:
        head = ("HEAD",) if "GET" in methods else ()
        allowed = ", ".join((*methods, *head, "OPTIONS")).encode()
        if self._cors.is_preflight(request):
            return self._cors.preflight(request, allowed)
        return Response(204, b"", ((b"allow", allowed),))

    # ---- handlers ----------------------------------------------------------------------------

    def _health(self, _request: HttpRequest, exchange: Exchange) -> None:
        processes = self.processes
        is_well = _WELL.issuperset(processes.values())
        status = "draining" if self.is_draining else "ok"
        health = Health(status if is_well else "unhealthy", processes=processes or UNSET)
        exchange.respond(json_response(200 if is_well else 503, health))

    def _version(self, _request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(json_response(200, Version(version("slipstream"))))

    def _tell_metrics(self, request: HttpRequest, exchange: Exchange) -> None:
        model_name = "" if self._io.model is None else self._io.model.name
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        exchange.respond(
            self._metrics.response(self.statistics, model_name, accept, self.processes)
        )

    def _ready(self, _request: HttpRequest, exchange: Exchange) -> None:
        if self.is_draining:
            raise is_draining()
        model = served_model(self._io)
        engine = [self.processes.get(name, "ready") for name in _ENGINE]
        if not self._io.is_attached or not _WELL.issuperset(engine):
            raise not_ready("the engine behind this server does not answer")
        exchange.respond(json_response(200, Health("ready", model.name)))

    def _show_live(self, _request: HttpRequest, exchange: Exchange) -> None:
        model = self._io.model
        exchange.respond(self.live.response(None if model is None else model.name, self.processes))

    def _models(self, _request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(json_response(200, Models([self._shown(served_model(self._io))])))

    def _tell_model(self, request: HttpRequest, exchange: Exchange) -> None:
        model = served_model(self._io, unquote(request.path.removeprefix(_MODEL)))
        exchange.respond(json_response(200, self._shown(model)))

    def _openapi(self, _request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(Response(200, openapi.document()))

    def _shown(self, model: ModelCard) -> Model:
        return Model(model.name, self._started, model.max_model_len)
