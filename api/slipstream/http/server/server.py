"""The HTTP server: accepts connections, checks their deadlines, bounds their memory, shuts down.

- New requests are begun in time slices (`time_slice`): a thousand that arrive at once do not delay
  running streams.
- `_RESERVED_DESCRIPTORS` are kept free of connections, for the process's other sockets and files.
- At the limit of connections, a new one replaces the one that has been idle longest.
- Pending requests are bounded over all connections (`requests_bytes`): above that, the connection
  that holds most is refused.
- While draining, connections are still accepted and answered, for /health, /metrics and the like.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

from aiohttp import StreamReader, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http import HttpVersion10, HttpVersion11, RawRequestMessage
from multidict import CIMultiDict, CIMultiDictProxy

from slipstream.http.config import Limits
from slipstream.http.counters import HttpCounters
from slipstream.http.errors import ApiError, overloaded
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.server.connection import Connection
from slipstream.http.time_slice import Share
from slipstream.stack.children.listeners import Listeners, Taker
from slipstream_ipc.telemetry.statistics import FrontNumbers
from slipstream_ipc.transport.connections import raise_file_limit

_TICK_S = 0.5  # resolution of deadlines
_RESERVED_DESCRIPTORS = 128  # libzmq aborts the process if it gets none for its sockets
_MALFORMED = "UNKNOWN"  # the method that aiohttp gives a request it cannot parse
_NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())  # aiohttp puts a dict into a malformed one


class Application(Protocol):
    """What the server serves."""

    is_draining: bool

    def pattern_of(self, path: str) -> str:
        """The label that a path is counted under."""

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """The refusal of a request, as far as its head decides; None if its body may be read."""

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
        self._new = Share()  # requests to begin
        self._is_empty = asyncio.Event()
        self.is_draining = False
        self._is_quiet = asyncio.Event()  # set while draining, once no connection is busy
        self._ending: Connection | None = None  # being closed to make room for a new one
        self._num_held = 0  # bytes of pending requests
        self._is_making_room = False
        self._loop = asyncio.get_running_loop()
        self._taker: Taker | None = None
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
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
        self._taker = Taker(listeners, new, most, self._end_one, self._tls, handshake_s)

    def connected(self, connection: Connection) -> None:
        """A connection has been made."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended."""
        self._connections.discard(connection)
        self.hold(connection, 0)
        if self._taker is not None:
            self._taker.release()
        if not self._connections:
            self._is_empty.set()
        self.answered()

    def answered(self) -> None:
        """An answer is complete, or its client has disconnected."""
        if self.is_draining and not any(each.is_busy for each in self._connections):
            self._is_quiet.set()

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """A connection now holds `num_bytes` of pending requests."""
        self._num_held += num_bytes - connection.num_held
        connection.num_held = num_bytes
        if self._num_held > self.limits.requests_bytes and not self._is_making_room:
            self._is_making_room = True
            self._make_room()
            self._is_making_room = False

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """See `Application`."""
        return self._app.check_head(request)

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Queue a request; `app` handles it in a later time slice."""
        self._num_held += len(request.body)
        self._new.add(partial(self._begin, request, exchange))

    async def drain(self) -> None:
        """Begin no more streams; wait until all running answers have been sent."""
        self.is_draining = self._app.is_draining = True
        self.answered()
        await self._is_quiet.wait()

    def stop_listening(self) -> None:
        """Accept no connections, and no more requests on the open ones."""
        self.is_draining = True
        if self._taker is not None:
            self._taker.close()
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

    def _begin(self, request: HttpRequest, exchange: Exchange) -> bool:
        num_bytes = len(request.body)
        if exchange.is_open:
            self._app.handle(request, exchange)
        request.body = b""  # free it: the answer may take long
        self._num_held -= num_bytes
        return False

    def _end_one(self) -> bool:
        """Close the connection that has been idle longest. Returns whether one is closing."""
        if self._ending in self._connections:
            return True
        idle = [each for each in self._connections if not each.is_busy]
        self._ending = min(idle, key=attrgetter("idle_since"), default=None)
        if self._ending is not None:
            self._ending.make_way()
        return self._ending is not None

    def _make_room(self) -> None:
        while self._num_held > self.limits.requests_bytes and self._connections:
            largest = max(self._connections, key=attrgetter("num_held"))
            if not largest.num_held:
                break  # the rest is queued in `_new`
            largest.give_up(overloaded("the server holds too much of incomplete requests"))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)
        self.answered()  # write buffers may have emptied meanwhile


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
