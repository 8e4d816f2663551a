"""A client's connection driven by an asyncio event loop, without threads or a task for each stream.

- Everything runs in the loop's thread. A stream's wakeup is rung inside a turn and may submit and
  abandon streams there; their messages are sent in the next turn. Only `release` and
  `close_from_anywhere`, which finalizers call, may be called from other threads.
- A ZeroMQ socket's descriptor is edge-triggered, and sending clears the edge too. So after each
  turn the socket is asked whether there is more to read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from slipstream.client.connection.cluster import Cluster, Statements
from slipstream.client.connection.link_session import GOODBYE_S
from slipstream.client.connection.queries import Query
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ClosedError, EngineError, SlipstreamError
from slipstream_ipc.messages import Fault, ModelCard
from slipstream_ipc.process import next_multiple
from slipstream_ipc.telemetry.trace import SpanKind, Tracer
from slipstream_ipc.transport.curve import Access


class LoopIO:
    """Carries streams over one connection, in the running event loop, until it is closed.

    cluster: others only read what it knows of the server.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        tracer: Tracer | None = None,
        *,
        access: Access | None = None,
        outlives_server: bool = True,
        fails_early: bool = False,
    ) -> None:
        """`outlives_server`, `fails_early`: see `Absence`."""
        self._tracer = tracer
        self.loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = _LoopPoller(self.loop, self._turn)
        self.cluster = Cluster(
            self._context,
            address,
            timeout_s,
            self._poller,
            time.monotonic(),
            access=access,
            outlives_server=outlives_server,
            fails_early=fails_early,
        )
        self._is_turn_due = False
        self._is_closed = False
        self._closing: asyncio.Task[None] | None = None  # a reference, as the loop keeps none
        self._ticker = self._call_tick()
        self._schedule()

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that the server last reported: one, or those of a fleet; empty before the
        first connection.
        """
        return self.cluster.models

    def inspect(self, within_s: float, use: Callable[[Statements], None]) -> None:
        """Ask the replicas of a fleet for their statistics; see `Cluster.inspect`. `use` is
        called within `within_s`.
        """
        if self.cluster.is_fleet and not self._is_closed:
            give_up = self.cluster.inspect(use, time.monotonic())
            self.loop.call_later(within_s, give_up)
            self._schedule()
        else:
            use({})

    def find_model(
        self, stream_id: bytes, scope: bytes, within_s: float, use: Callable[[str], None]
    ) -> None:
        """Call `use`, within `within_s`, with the name of the model that computes a stream; empty
        where there is one model, or no replica knows the stream.
        """
        if self.cluster.is_fleet and not self._is_closed:
            give_up = self.cluster.find_model(stream_id, scope, use, time.monotonic())
            self.loop.call_later(within_s, give_up)
            self._schedule()
        else:
            use("")

    async def connect(self) -> ModelCard:
        """Wait until the server answers.

        Raises: ConnectionLostError after `timeout_s`; ClosedError; SlipstreamError where the server
        refuses the connection.
        """
        if self._is_closed:
            raise _closed()
        future: Future[ModelCard] = Future()
        future.set_running_or_notify_cancel()  # so that a cancelled caller cannot cancel it
        self.cluster.connect(future, time.monotonic())
        return await asyncio.wrap_future(future)

    def submit(self, state: StreamState) -> None:
        """Submit the stream's request. On a closed connection it ends with a ClosedError."""
        self.cluster.submit(state, time.monotonic())
        if self._is_closed:
            self.cluster.end_all(_closed)
        self._schedule()

    def ask(self, query: Query, model: str = "") -> Future[Any]:
        """The future answer of the server, or a ConnectionLostError. Set in the loop's thread.

        model: whose replicas may answer, by its name; empty: any, or it depends on none.
        """
        future: Future[Any] = Future()
        if self._is_closed:
            future.set_exception(_closed())
            return future
        self.cluster.ask(query, future, time.monotonic(), _call, model)
        self._schedule()
        return future

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream, which then still receives its End."""
        self.cluster.abort(state)
        self._schedule()

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for the server."""
        self.cluster.abandon(state)
        self._schedule()

    def release(self, state: StreamState) -> None:
        """Abandon the stream from a finalizer: from any thread, at any moment."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.loop.call_soon_threadsafe(self.abandon, state)  # decision 027

    async def close(self) -> None:
        """End all streams with a ClosedError and say goodbye to the server. Idempotent.

        Waits at most GOODBYE_S for the acknowledgement.
        """
        if self._is_closed:
            return
        self._begin_close()
        try:
            deadline = self.loop.time() + GOODBYE_S
            while not self.cluster.say_goodbye(time.monotonic()):
                if not await self._poller.wait(deadline - self.loop.time()):
                    break
        finally:
            self._end_close()

    def close_from_anywhere(self) -> None:
        """Close from any thread, also after the loop has ended. Idempotent."""
        if self.loop.is_running():
            self.loop.call_soon_threadsafe(self._close_soon)
        elif not self._is_closed:
            self._begin_close()
            deadline = time.monotonic() + GOODBYE_S
            while not self.cluster.say_goodbye(now := time.monotonic()) and now < deadline:
                self._poller.block(deadline - now)
            self._end_close()

    def _close_soon(self) -> None:
        self._closing = self.loop.create_task(self.close())

    def _begin_close(self) -> None:
        self._is_closed = True
        self._ticker.cancel()
        self.cluster.end_all(_closed)

    def _end_close(self) -> None:
        self.cluster.close()
        self._context.destroy(linger=0)
        if self._tracer is not None:
            self._tracer.close()

    def _turn(self, arrived: Container[object] | None = None) -> None:
        """arrived: see `Cluster.turn`."""
        if arrived is None:
            self._is_turn_due = False
        if self._is_closed:
            return
        begin_ns = time.monotonic_ns()
        try:
            has_deltas = self.cluster.turn(time.monotonic(), arrived)
        except Exception as error:  # our own fault: end all streams, so that none waits for ever
            why = f"the client's connection failed: {type(error).__name__}: {error}"
            self.cluster.end_all(partial(EngineError, Fault("engine", why)))
            raise
        if self._tracer is not None and has_deltas:
            self._tracer.add(SpanKind.CLIENT, begin_ns, time.monotonic_ns())
        if self._poller.has_more():
            self._schedule()
        if self.cluster.is_in_doubt:
            self._ticker.cancel()
            self._ticker = self._call_tick()

    def _call_tick(self) -> asyncio.TimerHandle:
        return self.loop.call_at(next_multiple(self.loop.time(), self.cluster.tick_s), self._tick)

    def _tick(self) -> None:
        self._ticker = self._call_tick()
        self._turn()

    def _schedule(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self.loop.call_soon(self._turn)


def _closed() -> SlipstreamError:
    return ClosedError(Fault("engine", "the client was closed"))


def _call(command: Callable[[], None]) -> None:
    command()  # futures are cancelled in the loop's thread already


class _LoopPoller(zmq.Poller):
    """A poller that calls back when what is registered may be ready."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, on_news: Callable[[tuple[object]], None]
    ) -> None:
        """on_news: called with the socket or the descriptor."""
        super().__init__()
        self._loop = loop
        self._on_news = on_news
        self._zmq_fds: dict[Any, int] = {}  # by socket
        self._fds: dict[int, int] = {}  # with their flags
        self._waiter: asyncio.Future[bool] | None = None

    def register(self, socket: Any, flags: int = zmq.POLLIN) -> None:
        if isinstance(socket, int):
            fd, before = socket, self._fds.get(socket, 0)
            self._fds[fd] = flags
        else:
            fd, before = int(socket.getsockopt(zmq.FD)), 0
            self._zmq_fds[socket] = fd
        if self._loop.is_closed():
            return
        if not before:
            self._loop.add_reader(fd, self._on_edge, socket)
        if flags & ~before & zmq.POLLOUT:
            self._loop.add_writer(fd, self._on_edge, socket)
        elif before & ~flags & zmq.POLLOUT:
            self._loop.remove_writer(fd)

    def unregister(self, socket: Any) -> None:
        if isinstance(socket, int):
            fd, flags = socket, self._fds.pop(socket)
        else:
            fd, flags = self._zmq_fds.pop(socket), zmq.POLLIN
        if not self._loop.is_closed():
            self._loop.remove_reader(fd)
            if flags & zmq.POLLOUT:
                self._loop.remove_writer(fd)

    def has_more(self) -> bool:
        """True if a ZeroMQ socket has a message that its descriptor will not report."""
        return any(int(s.getsockopt(zmq.EVENTS)) & zmq.POLLIN for s in self._zmq_fds)

    def block(self, timeout_s: float) -> None:
        """Wait for a message, blocking; for use where no loop runs."""
        writable = [fd for fd, flags in self._fds.items() if flags & zmq.POLLOUT]
        zmq.select([*self._zmq_fds, *self._fds], writable, [], max(0.0, timeout_s))

    async def wait(self, timeout_s: float) -> bool:
        """Wait until a socket may be readable, in place of the callback; False on a timeout."""
        if self.has_more():
            return True
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, timeout_s), self._wake, False)
        try:
            return await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _on_edge(self, source: object) -> None:
        if self._waiter is not None:
            self._wake(True)
        else:
            self._on_news((source,))

    def _wake(self, is_news: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_news)
