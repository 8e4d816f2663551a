"""The listening end: every connection, its clock and its end.

Owns: the listener, the connections, the time limits' clock, the shutdown. Does not know: HTTP, what
requests ask for.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from functools import partial

from slipstream.http.app import App
from slipstream.http.config import Limits
from slipstream.http.connection import Connection, Exchange
from slipstream.http.errors import ApiError
from slipstream.http.parsing import Request

_TICK_S = 0.5  # how late a time limit may be noticed
_BACKLOG = 2048  # connections that the kernel holds for us


class Server:
    """Serves `app` until it is closed; the running event loop's."""

    def __init__(self, app: App, limits: Limits) -> None:
        self._app = app
        self.limits = limits
        self._connections: set[Connection] = set()
        self._is_empty = asyncio.Event()
        self.is_draining = False
        self._loop = asyncio.get_running_loop()
        self._listener: asyncio.Server | None = None
        self._ticker = self._loop.call_later(_TICK_S, self._tick)

    async def listen(self, host: str, port: int) -> int:
        """Accept connections; the port. Raises: OSError."""
        _allow_many_connections()
        self._listener = await self._loop.create_server(
            partial(Connection, self), host, port, backlog=_BACKLOG
        )
        bound: int = self._listener.sockets[0].getsockname()[1]
        return bound

    def connected(self, connection: Connection) -> None:
        """There is a new connection."""
        self._connections.add(connection)

    def disconnected(self, connection: Connection) -> None:
        """It has ended."""
        self._connections.discard(connection)
        if not self._connections:
            self._is_empty.set()

    def check_head(self, request: Request) -> ApiError | None:
        """What is to be refused before its body is read."""
        return self._app.check_head(request)

    def handle(self, request: Request, exchange: Exchange) -> None:
        """See to it that the exchange gets its answer, now or later."""
        self._app.handle(request, exchange)

    def stop_listening(self) -> None:
        """No new connections, and no new request on one that is there."""
        self.is_draining = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections):
            connection.drain()

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

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK_S, self._tick)
        now = self._loop.time()
        for connection in list(self._connections):
            connection.check_deadline(now)


def _allow_many_connections() -> None:
    """Each takes a descriptor, and the usual limit is meant for programs that use select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
