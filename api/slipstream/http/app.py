"""Routing: the paths, their handlers, and the checks made before a body is read.

- A body is JSON. A request with an Origin header must declare `Content-Type: application/json`,
  which a page of another origin cannot send without a preflight.
- A request whose Host is not one of this server's names is refused on any path (`hosts`). The live
  page and /live are closed to other origins.
- OPTIONS lists the methods of a path; a browser's preflight is answered as `cors` allows.
- /health: whether the stack lives or mends itself (`admin.health`). /ready: whether a request would
  be served now. /metrics: Prometheus. None of them needs a key: the numbers reveal nothing of
  prompts or outputs.
- While the stack drains, no stream begins; every other path answers, and a running stream can be
  resumed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from math import inf
from urllib.parse import parse_qs, unquote

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from slipstream.client.connection.loop_io import LoopIO
from slipstream.http.admin.health import StackHealth
from slipstream.http.admin.live import LiveStatistics
from slipstream.http.admin.metrics import Metrics, MetricsOfAll
from slipstream.http.admin.static import PAGE, page_handlers
from slipstream.http.api_errors import (
    ApiError,
    ErrorShape,
    error_shape,
    is_draining,
    not_ready,
    overloaded,
)
from slipstream.http.auth import ApiKeys
from slipstream.http.counters import OTHER
from slipstream.http.endpoints import openapi
from slipstream.http.endpoints.model_endpoints import ModelEndpoints
from slipstream.http.endpoints.model_pages import page_of
from slipstream.http.endpoints.response_endpoints import PATH
from slipstream.http.endpoints.response_endpoints import PREFIX as RESPONSES
from slipstream.http.endpoints.resume import PREFIX as STREAMS
from slipstream.http.endpoints.resume import last_event_id
from slipstream.http.exchange import Exchange, Handler, HttpRequest
from slipstream.http.openai.response_bodies import Health, Model, Models, Version
from slipstream.http.planning.served_model import served_model, served_models
from slipstream.http.response_encoding import Response, json_response
from slipstream.http.server.cors import Cors
from slipstream.http.server.hosts import Hosts
from slipstream.request.served_models import AdaptedModel, listed_names
from slipstream_ipc.messages import ModelCard
from slipstream_ipc.telemetry.statistics import CoreNumbers, Statistics

_NEEDS_KEY = (
    "/v1/",
    "/v2/",
    "/abort",
    "/classify",
    "/detokenize",
    "/generate",
    "/rerank",
    "/score",
    "/tokenize",
)
_MODEL = "/v1/models/"
_LIVE = "/live"
_INSPECT_S = 3.0  # for replicas to tell their statistics
_INSPECTED_S = 1.0  # that what they have told is shown
_MAX_INSPECTORS = 128  # requests that wait for it
_RESTARTABLE = ("core", "worker")
_HAS_SERVED = frozenset(("ready", "silent", "restarting"))
_STREAMING = frozenset(
    ("/v1/completions", "/v1/chat/completions", "/v1/messages", PATH, "/generate")
)


class App:
    """Routes requests to handlers, over one connection to the worker."""

    def __init__(
        self,
        io: LoopIO,
        keys: ApiKeys,
        endpoints: ModelEndpoints,
        cors: Cors | None = None,
        hosts: Hosts | None = None,
        model_name: str = "",
        hang_timeout_s: float = inf,
        *,
        metrics_prefix: str = "slipstream",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """endpoints: of the model, over the same `io`. model_name, hang_timeout_s, metrics_prefix:
        see `FrontConfig`.
        """
        self._io = io
        self._model_name = model_name
        self._keys = keys
        self._endpoints = endpoints
        self._cors = Cors(()) if cors is None else cors
        self._hosts = Hosts(None) if hosts is None else hosts
        self._started = int(time.time())
        self._version = version("slipstream")  # read from disk once
        self.is_draining = False
        self.health = StackHealth(hang_timeout_s)
        self.live = LiveStatistics()
        self._metrics_prefix = f"{metrics_prefix}:"
        self._metrics = Metrics(self._metrics_prefix)
        self._inspectors: list[tuple[Exchange, str]] = []  # wait for the metrics of all replicas
        self._is_inspecting = False
        self._inspected: MetricsOfAll | None = None  # shown until `_inspected_until`
        self._inspected_until = 0.0
        self._clock = clock
        self.statistics = Statistics()  # latest of the whole stack; empty before the first report
        self._handlers: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._get_health},
            "/metrics": {"GET": self._get_metrics},
            "/ready": {"GET": self._get_ready},
            "/version": {"GET": self._get_version},
            "/v1/models": {"GET": self._get_models},
            _LIVE: {"GET": self._get_live},
            "/openapi.json": {"GET": self._get_openapi},
        }
        self._handlers |= {path: {"POST": each} for path, each in self._endpoints.posts.items()}
        self._handlers |= {path: {"GET": each} for path, each in self._endpoints.gets.items()}
        self._page_handlers = page_handlers()
        self._handlers |= self._page_handlers
        self._handlers_by_prefix: dict[str, dict[str, Handler]] = {
            _MODEL: {"GET": self._get_model},
            STREAMS: {"GET": self._endpoints.streams},
            RESPONSES: self._endpoints.responses.by_prefix,
        }

    def pattern_of(self, path: str) -> str:
        """The route that a path matches, one for all files of the page; "other" if none does."""
        if path in self._handlers:
            return PAGE if path in self._page_handlers else path
        for prefix in self._handlers_by_prefix:
            if path.startswith(prefix):
                return prefix + "{id}"
        return OTHER

    @property
    def endpoints(self) -> dict[str, tuple[str, ...]]:
        """Every path of the API with its methods; a prefix of paths ends with a slash."""
        handlers = {**self._handlers, **self._handlers_by_prefix}
        return {
            path: tuple(each) for path, each in handlers.items() if path not in self._page_handlers
        }

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request, as far as its head decides; None if its body may be read."""
        request.answer_headers = self._cors.headers(request)
        if error_shape(request.path) == ErrorShape.ANTHROPIC:
            request.answer_headers += ((b"request-id", request.id.encode()),)
        methods = self._methods(request.path)
        refusal = self._check_host(request)
        if refusal is not None or (methods is not None and self._cors.is_preflight(request)):
            return refusal
        return (
            self._check_key(request)
            or _check_method(request, methods)
            or self._check_draining(request)
            or _check_content_type(request)
        )

    def tenant_of(self, request: HttpRequest) -> bytes | None:
        """The tenant of a request whose head has been checked; None where it needs no key."""
        if not request.path.startswith(_NEEDS_KEY):
            return None
        return self._keys.tenant(request.headers)

    def has_to_wait(self, request: HttpRequest) -> bool:
        """True if the request needs a running engine to which this front, which replaces another,
        is not connected yet.
        """
        if self._io.models or not request.path.startswith(_NEEDS_KEY):
            return False
        states = self.health.states_of(_RESTARTABLE)
        return len(states) >= len(_RESTARTABLE) and _HAS_SERVED.issuperset(states)

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""
        method, methods = _method_of(request), self._methods(request.path)
        assert methods is not None  # `check_head` refuses unknown paths
        if method == "OPTIONS":
            exchange.respond(self._options(request, methods))
            return
        if (refusal := self._check_draining(request)) is not None:
            exchange.refuse(refusal)
            return
        self._endpoints.handle(methods[method], request, exchange)

    def _methods(self, path: str) -> dict[str, Handler] | None:
        found = self._handlers.get(path)
        if found is None:
            for prefix, methods in self._handlers_by_prefix.items():
                if path.startswith(prefix):
                    return methods
        return found

    def _check_host(self, request: HttpRequest) -> ApiError | None:
        refusal = self._hosts.check(request)
        if refusal is None and (request.path in self._page_handlers or request.path == _LIVE):
            refusal = self._hosts.check_origin(request)
        return refusal

    def _check_key(self, request: HttpRequest) -> ApiError | None:
        if not request.path.startswith(_NEEDS_KEY):
            return None
        return self._keys.check(request.headers)

    def _check_draining(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request that would begin a stream while the server drains."""
        if not self.is_draining or request.path not in _STREAMING or request.method != "POST":
            return None
        return is_draining() if last_event_id(request) is None else None  # else it resumes a stream

    def _options(self, request: HttpRequest, methods: dict[str, Handler]) -> Response:
        head = ("HEAD",) if "GET" in methods else ()
        allowed = ", ".join((*methods, *head, "OPTIONS")).encode()
        if self._cors.is_preflight(request):
            return self._cors.preflight(request, allowed)
        return Response(204, b"", ((b"allow", allowed),))

    # ---- handlers ----------------------------------------------------------------------------

    def _get_health(self, _request: HttpRequest, exchange: Exchange) -> None:
        now = time.monotonic()
        status = self.health.status(now, is_draining=self.is_draining)
        found = self.statistics.processes.items()
        pids = {name: process.pid for name, process in found if process.pid}
        replicas = {each.shown_name: str(each.condition) for each in self._io.cluster.statuses()}
        if replicas and status == "ok" and not self._io.cluster.is_serving:
            status = "recovering"
        health = Health(
            status,
            processes=self.health.states(now) or UNSET,
            pids=pids or UNSET,
            replicas=replicas or UNSET,
        )
        exchange.respond(json_response(503 if status == "unhealthy" else 200, health))

    def _get_version(self, _request: HttpRequest, exchange: Exchange) -> None:
        numbers = (each.numbers for each in self.statistics.processes.values())
        engines = {each.gauges.engine for each in numbers if isinstance(each, CoreNumbers)}
        engine = ", ".join(sorted(engines - {""}))
        exchange.respond(json_response(200, Version(self._version, engine)))

    def _get_metrics(self, request: HttpRequest, exchange: Exchange) -> None:
        model_name = self._metrics_label
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        if self._io.cluster.statuses() and parse_qs(request.query).get("replicas") == ["all"]:
            self._get_metrics_of_all(exchange, accept)
            return
        exchange.respond(
            self._metrics.response(self.statistics, model_name, accept, self._io.cluster.statuses())
        )

    def _get_metrics_of_all(self, exchange: Exchange, accept: str) -> None:
        """Answer with what the replicas have told within a second, or ask them.

        Raises: ApiError.
        """
        if self._inspected is not None and self._clock() < self._inspected_until:
            exchange.respond(self._inspected.response(accept))
            return
        self._inspectors = [each for each in self._inspectors if each[0].is_open]
        if len(self._inspectors) >= _MAX_INSPECTORS:
            raise overloaded(f"{_MAX_INSPECTORS} requests wait for the replicas' metrics already")
        self._inspectors.append((exchange, accept))
        if not self._is_inspecting:
            self._is_inspecting = True
            self._io.inspect(_INSPECT_S, self._respond_with_all)

    def _respond_with_all(self, found: dict[str, bytes | None]) -> None:
        """Answer those that wait for the metrics of all replicas."""
        inspected = {name: _decoded(each) for name, each in found.items()}
        self._inspected = MetricsOfAll(
            self.statistics,
            self._metrics_label,
            self._io.cluster.statuses(),
            inspected,
            prefix=self._metrics_prefix,
        )
        self._inspected_until = self._clock() + _INSPECTED_S
        self._is_inspecting = False
        waiting, self._inspectors = self._inspectors, []
        for exchange, accept in waiting:
            exchange.respond(self._inspected.response(accept))

    def _get_ready(self, _request: HttpRequest, exchange: Exchange) -> None:
        if self.is_draining:
            raise is_draining()
        models = served_models(self._io)
        if not self._io.cluster.is_attached or not self.health.serves:
            raise not_ready("the engine does not respond")
        if not self._io.cluster.is_serving:
            of_these = f" of {', '.join(self._io.cluster.models_away)}" if len(models) > 1 else ""
            raise not_ready(f"no replica{of_these} takes requests now")
        names = [model.name for model in models]
        if len(names) == 1:
            ready = Health("ready", model=names[0])
        else:
            ready = Health("ready", models=names)
        exchange.respond(json_response(200, ready))

    def _get_live(self, _request: HttpRequest, exchange: Exchange) -> None:
        names = [model.name for model in self._io.models]
        model_name = ", ".join(names) or None
        exchange.respond(
            self.live.response(model_name, self.health.processes, self._io.cluster.statuses())
        )

    def _get_models(self, request: HttpRequest, exchange: Exchange) -> None:
        """Raises: ApiError."""
        models = served_models(self._io)
        names = list(dict.fromkeys(name for each in models for name in listed_names(each)))
        page = page_of(names, request.query)
        shown = [names[at] for at in page.places]
        found = [self._model_body(served_model(self._io, name), name) for name in shown]
        first, last = (found[0].id, found[-1].id) if found else (None, None)
        exchange.respond(json_response(200, Models(found, first, last, page.has_more)))

    def _get_model(self, request: HttpRequest, exchange: Exchange) -> None:
        name = unquote(request.path.removeprefix(_MODEL))
        model = served_model(self._io, name)
        exchange.respond(json_response(200, self._model_body(model, name)))

    def _get_openapi(self, _request: HttpRequest, exchange: Exchange) -> None:
        exchange.respond(Response(200, openapi.document()))

    @property
    def _metrics_label(self) -> str:
        """The model in the labels of this front's metrics; empty where it serves several."""
        names = [model.name for model in self._io.models] or [self._model_name]
        return names[0] if len(names) == 1 else ""

    def _model_body(self, model: ModelCard, name: str) -> Model:
        created_at = datetime.fromtimestamp(self._started, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        found = Model(name, self._started, model.max_model_len, name, created_at)
        if isinstance(model, AdaptedModel):
            return replace(found, root=model.adapter.path, parent=model.base)
        return found


def _check_method(request: HttpRequest, methods: dict[str, Handler] | None) -> ApiError | None:
    """404 or 405 for a request without a handler. methods: the handlers of its path."""
    if methods is None:
        message = f"no such path: {request.path[:200]}; /openapi.json lists the paths"
        return ApiError(404, message, code="not_found")
    if _method_of(request) in (*methods, "OPTIONS"):
        return None
    allowed = ", ".join(methods)
    message = f"method: got {request.method}, allowed: {allowed}"
    headers = ((b"allow", allowed.encode()),)
    return ApiError(405, message, code="method_not_allowed", headers=headers)


def _check_content_type(request: HttpRequest) -> ApiError | None:
    if request.method != "POST":
        return None
    encoding = request.headers.get(b"content-encoding", b"identity").strip().lower()
    if encoding not in (b"", b"identity"):
        what = f"content-encoding: got {encoding.decode('latin-1')[:40]!r}, allowed: identity"
        return ApiError(415, what, headers=((b"accept-encoding", b"identity"),))
    # programs may leave it out; a request from a page, which has an Origin, may not
    default = b"" if b"origin" in request.headers else b"application/json"
    given = request.headers.get(b"content-type", default)
    if given.partition(b";")[0].strip().lower() == b"application/json":
        return None
    return ApiError(415, "the body must be JSON: send the header `Content-Type: application/json`")


def _method_of(request: HttpRequest) -> str:
    """The method that handles a request: GET for HEAD."""
    return "GET" if request.method == "HEAD" else request.method


def _decoded(statistics: bytes | None) -> Statistics | None:
    """The statistics that a replica has reported; None if there are none or they cannot be
    decoded.
    """
    try:
        return msgspec.json.decode(statistics, type=Statistics) if statistics else None
    except (msgspec.MsgspecError, RecursionError):
        return None
