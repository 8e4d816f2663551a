"""The listening end: every connection, the clock of their deadlines, the bytes they hold, the end.

- New requests take a share of a turn of the loop (`shares`), the rest waits for the next turn: a
  thousand that come at once do not delay running streams.
- Idle connections, however many, leave this process descriptors of its own.
- With as many connections as there may be, a new one takes the place of the one that has been idle
  for longest.
- What all connections hold of requests that have not been begun is bounded (`requests_bytes`):
  where there is more, the connection that holds most is refused.
- While it drains, connections are taken and answered, for those that ask how it is.
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

_TICK_S = 0.5  # how late a deadline may be noticed
_RESERVED_DESCRIPTORS = 128  # for all else: libzmq ends a process that has none for its sockets
_MALFORMED = "UNKNOWN"  # aiohttp's method of what could not be read
_NO_HEADERS = CIMultiDictProxy(CIMultiDict[str]())  # which has a dict there


class Application(Protocol):
    """What is served."""

    is_draining: bool

    def pattern_of(self, path: str) -> str:
        """What a path counts as."""

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """What is to be refused before its body is read."""

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """See to it that the exchange gets its answer, now or later."""


class Server:
    """Serves `app` until it is closed; the running event loop's.

    tls: for every connection; None speaks plain HTTP. options: of aiohttp's connections.
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
        self._new = Share()  # requests that are to be begun
        self._is_empty = asyncio.Event()
        self.is_draining = False
        self._is_quiet = asyncio.Event()  # while it drains: no answer is on its way
        self._ending: Connection | None = None  # to make room for another
        self._num_held = 0  # bytes of requests that have not been begun
        self._is_making_room = False
        self._loop = asyncio.get_running_loop()
        self._taker: Taker | None = None
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        self._aiohttp = web.Server(_answer, request_factory=_request)
        self._options = {"access_log": None, "loop": self._loop, **options}

    def numbers(self) -> FrontNumbers:
        """What was counted, as of now."""
        return self.counters.numbers(len(self._connections))

    def listen(self, listeners: Listeners) -> None:
        """Take connections from these, which are ours from now on."""
        most = min(self.limits.connections, max(1, raise_file_limit() - _RESERVED_DESCRIPTORS))
        new: Callable[[], Connection] = partial(Connection, self._aiohttp, self, **self._options)
        handshake_s = self.limits.header_s
        self._taker = Taker(listeners, new, most, self._end_one, self._tls, handshake_s)

    def connected(self, connection: Connection) -> None:
        """There is a new connection."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """It has ended."""
        self._connections.discard(connection)
        self.hold(connection, 0)
        if self._taker is not None:
            self._taker.release()
        if not self._connections:
            self._is_empty.set()
        self.answered()

    def answered(self) -> None:
        """An answer is complete, or there is no one left to have it."""
        if self.is_draining and not any(each.is_busy for each in self._connections):
            self._is_quiet.set()

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """It holds so many bytes of requests that have not been begun."""
        self._num_held += num_bytes - connection.num_held
        connection.num_held = num_bytes
        if self._num_held > self.limits.requests_bytes and not self._is_making_room:
            self._is_making_room = True
            self._make_room()
            self._is_making_room = False

    def check_head(self, request: HttpRequest) -> ApiError | None:
        """What is to be refused before its body is read."""
        return self._app.check_head(request)

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """See to it that the exchange gets its answer, now or later."""
        self._num_held += len(request.body)
        self._new.add(partial(self._begin, request, exchange))

    async def drain(self) -> None:
        """Begin nothing that lasts; wait until all answers that run have left."""
        self.is_draining = self._app.is_draining = True
        self.answered()
        await self._is_quiet.wait()

    def stop_listening(self) -> None:
        """No new connections, and no new request on one that is there."""
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
        """Once all answers have left, or `drain_s` is over."""
        self._ticker.cancel()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.empty(), self.limits.drain_s)
        for connection in list(self._connections):
            connection.abort()

    def _begin(self, request: HttpRequest, exchange: Exchange) -> bool:
        num_bytes = len(request.body)
        if exchange.is_open:  # else nothing is to be answered
            self._app.handle(request, exchange)
        request.body = b""  # it has been read, and its answer may take long
        self._num_held -= num_bytes
        return False  # that was all of it

    def _end_one(self) -> bool:
        """End the connection that has been idle for longest; whether one ends."""
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
                break  # the rest is about to be begun
            largest.give_up(overloaded("the server holds too much of incomplete requests"))

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)
        self.answered()  # to the last byte


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
    """As aiohttp makes it, but that no answer speaks another version than HTTP/1.0 and HTTP/1.1."""
    assert isinstance(protocol, Connection)
    protocol.version = message.version
    if message.method == _MALFORMED:
        message = message._replace(version=HttpVersion11, headers=_NO_HEADERS)
    elif message.version not in (HttpVersion10, HttpVersion11):
        message = message._replace(version=HttpVersion11)
    return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())
