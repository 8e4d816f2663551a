"""The HTTP server: accepts connections, checks their deadlines, bounds their memory, shuts down.

- New requests are begun in time slices (`time_slice`): a thousand that arrive at once do not delay
  running streams. Each tenant has a lane for requests with small bodies and one for those with
  large ones, and paths that need no key have lanes of their own.
- `_RESERVED_DESCRIPTORS` are kept free of connections, for the process's other sockets and files.
- At the limit of connections, a new one replaces the one that has been idle longest.
- Pending requests are bounded over all connections (`requests_bytes`): above that, the connection
  that holds most is refused, of the tenant whose connections hold most.
- While draining, connections are still accepted and answered, for /health, /metrics and the like.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from functools import partial
from operator import attrgetter
from typing import Any, Protocol, cast

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from slipstream.http.api_errors import ApiError, overloaded
from slipstream.http.config import Limits
from slipstream.http.counters import HttpCounters
from slipstream.http.exchange import Exchange, HttpRequest, nothing_to_free
from slipstream.http.server.connection import Connection
from slipstream.http.time_slice import TimeSlicedQueue
from slipstream.stack.children.listeners import Acceptor, Listeners
from slipstream_ipc.process import BEAT_S, next_multiple
from slipstream_ipc.telemetry.statistics import FrontNumbers
from slipstream_ipc.transport.connections import raise_file_limit

_TICK_S = BEAT_S  # resolution of deadlines
_RESERVED_DESCRIPTORS = 128  # libzmq aborts the process if it gets none for its sockets
_LARGE_BODY_BYTES = 2**16  # of a request that waits in its tenant's second lane
_MALFORMED = "UNKNOWN"  # the method that aiohttp gives a request it cannot parse
_REQUEST_CODE = web.RequestHandler._handle_request.__code__
_NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())  # aiohttp puts a dict into a malformed one

Lane = tuple[bytes | None, bool]  # a tenant, and whether the body is large


class Application(Protocol):
    """The application that the server serves."""

    is_draining: bool

    def pattern_of(self, path: str) -> str:
        """The label that a path is counted under."""

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request, as far as its head decides; None if its body may be read."""

    def tenant_of(self, request: HttpRequest) -> bytes | None:
        """The tenant of a request whose head has been checked; None where it needs no key."""

    def has_to_wait(self, request: HttpRequest) -> bool:
        """True if the request must not be handled before the next `Server.begin_waiting`."""

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""


class Server:
    """Serves `app` in the running event loop until it is closed.

    tls: applies to every connection; None serves plain HTTP. options: of aiohttp's connections.
    """

    def __init__(
        self,
        app: Application,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        **options: Any,
    ) -> None:
        self._app = app
        self.limits = limits
        self.counters = HttpCounters(app.pattern_of)
        self._tls = tls
        self._connections: set[Connection] = set()
        self._new_requests = TimeSlicedQueue()  # requests to begin
        self._waiting: list[tuple[HttpRequest, Exchange, Lane]] = []
        self._is_empty = asyncio.Event()
        self.is_draining = False
        self._is_drained = asyncio.Event()  # set while draining, once no connection is busy
        self._evicted: Connection | None = None  # being closed to make room for a new one
        self._num_held = 0  # bytes of pending requests
        self._held: Counter[bytes | None] = Counter()  # of them, by tenant
        self._is_refusing = False
        self._loop = asyncio.get_running_loop()
        # aiohttp's task of each request costs 12 µs (decision 023)
        self._loop.set_task_factory(_task)
        self._acceptor: Acceptor | None = None
        self._ticker = self._call_tick()
        self._aiohttp = web.Server(_answer, request_factory=_request)
        self._options = {"access_log": None, "loop": self._loop, **options}

    def numbers(self) -> FrontNumbers:
        """The current values of the counters."""
        return self.counters.numbers(len(self._connections))

    def listen(self, listeners: Listeners) -> None:
        """Accept connections on `listeners`, which the server owns from now on."""
        most = min(self.limits.connections, max(1, raise_file_limit() - _RESERVED_DESCRIPTORS))
        new: Callable[[], Connection] = partial(Connection, self._aiohttp, self, **self._options)
        handshake_s = self.limits.header_s
        self._acceptor = Acceptor(listeners, new, most, self._evict_idlest, self._tls, handshake_s)

    def use_tls(self, tls: ssl.SSLContext) -> None:
        """Use another context, for the connections to come. It serves TLS already."""
        self._tls = tls
        if self._acceptor is not None:
            self._acceptor.tls = tls

    def connected(self, connection: Connection) -> None:
        """A connection has been made."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self.hold(connection, 0)
        if self._acceptor is not None:
            self._acceptor.release()
        if not self._connections:
            self._is_empty.set()
        self.answered()

    def answered(self) -> None:
        """An answer is complete, or its client has disconnected."""
        if self.is_draining and not any(each.is_busy for each in self._connections):
            self._is_drained.set()

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """A connection now holds `num_bytes` of pending requests."""
        self._add_held(connection.tenant, num_bytes - connection.num_held)
        connection.num_held = num_bytes
        if self._num_held > self.limits.requests_bytes and not self._is_refusing:
            self._is_refusing = True
            self._refuse_largest()
            self._is_refusing = False

    def check_head(self, connection: Connection, request: HttpRequest) -> ApiError | None:
        """See `Application`. What the connection holds counts as the tenant's from now on."""
        refusal = self._app.check_head(request)
        tenant = None if refusal is not None else self._app.tenant_of(request)
        request.tenant = tenant
        if tenant != connection.tenant:
            num_bytes = connection.num_held
            self._add_held(connection.tenant, -num_bytes)
            connection.tenant = tenant
            self._add_held(tenant, num_bytes)
        return refusal

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Queue a request; `app` handles it in a later time slice."""
        tenant, num_bytes = request.tenant, len(request.body)
        self._add_held(tenant, num_bytes)
        request.free = partial(self._free, request)
        lane = tenant, num_bytes > _LARGE_BODY_BYTES
        self._new_requests.add(partial(self._begin, request, exchange, lane), lane)

    def begin_waiting(self) -> None:
        """Let the application handle the requests that had to wait."""
        waiting, self._waiting = self._waiting, []
        for request, exchange, lane in waiting:
            self._new_requests.add(partial(self._begin_now, request, exchange), lane)

    async def drain(self) -> None:
        """Begin no more streams; wait until all running answers have been sent."""
        self.is_draining = self._app.is_draining = True
        self.answered()
        await self._is_drained.wait()

    def stop_listening(self) -> None:
        """Accept no connections, and no more requests on the open ones."""
        self.is_draining = True
        if self._acceptor is not None:
            self._acceptor.close()
        for connection in list(self._connections):
            connection.stop()

    async def empty(self) -> None:
        """Wait until there are no connections."""
        if self._connections:
            self._is_empty.clear()
            await self._is_empty.wait()

    async def close(self) -> None:
        """Wait up to `drain_s` for connections to end, then abort the rest."""
        self._ticker.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.empty(), self.limits.drain_s)
        for connection in list(self._connections):
            connection.abort()

    def _begin(self, request: HttpRequest, exchange: Exchange, lane: Lane) -> bool:
        if self._app.has_to_wait(request):
            self._waiting.append((request, exchange, lane))
            return False
        return self._begin_now(request, exchange)

    def _begin_now(self, request: HttpRequest, exchange: Exchange) -> bool:
        if exchange.is_open:
            self._app.handle(request, exchange)
        if not (request.keeps_body and exchange.is_open):
            request.free()  # the answer may take long
        return False

    def _free(self, request: HttpRequest) -> None:
        num_bytes, request.body = len(request.body), b""
        request.free = nothing_to_free
        self._add_held(request.tenant, -num_bytes)

    def _add_held(self, tenant: bytes | None, num_bytes: int) -> None:
        self._num_held += num_bytes
        self._held[tenant] += num_bytes
        if not self._held[tenant]:
            del self._held[tenant]

    def _evict_idlest(self) -> bool:
        """Close the connection that has been idle longest. Returns whether one is closing."""
        if self._evicted in self._connections:
            return True
        idle = [each for each in self._connections if not each.is_busy]
        self._evicted = min(idle, key=attrgetter("idle_since"), default=None)
        if self._evicted is not None:
            self._evicted.evict()
        return self._evicted is not None

    def _refuse_largest(self) -> None:
        while self._num_held > self.limits.requests_bytes and self._connections:
            holding = [each for each in self._connections if each.num_held]
            if not holding:
                break  # the rest is queued in `_new_requests`
            largest = max(holding, key=lambda each: (self._held[each.tenant], each.num_held))
            largest.refuse(overloaded("the server holds too many bytes of pending requests"))

    def _call_tick(self) -> asyncio.TimerHandle:
        return self._loop.call_at(next_multiple(self._loop.time(), _TICK_S), self._tick)

    def _tick(self) -> None:
        self._ticker = self._call_tick()
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)
        self.answered()  # write buffers may have emptied meanwhile


def _task(
    loop: asyncio.AbstractEventLoop,
    coroutine: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
    **options: Any,
) -> asyncio.Future[Any]:
    """A task factory that runs aiohttp's task of a request within that of its connection.

    aiohttp awaits it at once, and each task costs turns of the loop. From Python 3.12 on aiohttp
    starts it eagerly, past the factory.
    """
    if getattr(coroutine, "cr_code", None) is _REQUEST_CODE:
        return cast(asyncio.Future[Any], coroutine)
    return asyncio.Task(coroutine, loop=loop, **options)


async def _answer(message: web.BaseRequest) -> web.StreamResponse:
    connection = message.protocol
    assert isinstance(connection, Connection)
    return await connection.answer(message)


def _request(
    message: RawRequestMessage,
    payload: StreamReader,
    protocol: web.RequestHandler,
    writer: AbstractStreamWriter,
    task: asyncio.Task[None],
) -> web.BaseRequest:
    """aiohttp's request, its version forced to HTTP/1.0 or 1.1, as the answer repeats it."""
    assert isinstance(protocol, Connection)
    protocol.version = message.version
    if message.method == _MALFORMED:
        message = message._replace(version=HttpVersion11, headers=_NO_HEADERS)
    elif message.version not in (HttpVersion10, HttpVersion11):
        message = message._replace(version=HttpVersion11)
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
