"""A client's connection driven by an event loop: no thread, no hand-over, no task to a stream.

Owns: when the session gets its turn. Does not know: the protocol (`client_session`), what bells do.

Rules:
- Everything happens in the loop's thread: a stream's bell (`bells`) is rung inside a turn, and may
  submit and abandon streams there; what it asks for is sent in the turn after.
- ZeroMQ's descriptor is an edge: it says that something happened, and sending takes that away too.
  So after every turn the socket itself is asked whether there is more to read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from slipstream.client_session import GOODBYE_S, TICK_S, ClientSession
from slipstream.errors import ClosedError
from slipstream.questions import Question
from slipstream.stream_state import StreamState
from slipstream_ipc.messages import Fault, ModelCard
from slipstream_ipc.trace import Span, Tracer


class LoopIO:
    """Serves streams over one connection, in the running event loop, until it is closed."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        tracer: Tracer | None = None,
        *,
        outlives_server: bool = True,
    ) -> None:
        """`outlives_server`: see `ClientSession`."""
        self._tracer = tracer
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = _LoopPoller(self._loop, self._turn)
        self._session = ClientSession(
            *(self._context, address, timeout_s, self._poller, time.monotonic()),
            outlives_server=outlives_server,
        )
        self._is_turn_due = False
        self._is_closed = False
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._schedule()

    @property
    def model(self) -> ModelCard | None:
        """What the server serves, as it said last."""
        return self._session.model

    @property
    def is_attached(self) -> bool:
        """Whether a server is there, as far as we know."""
        return self._session.is_attached

    async def connect(self) -> ModelCard:
        """Wait until the server is there; ConnectionLostError after `timeout_s`."""
        future: Future[ModelCard] = Future()
        future.set_running_or_notify_cancel()
        self._session.connect(future, time.monotonic())
        return await asyncio.wrap_future(future)

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""
        self._session.submit(state, time.monotonic())
        self._schedule()

    def ask(self, question: Question) -> Future[Any]:
        """Done when the server has answered, in the loop's thread; ConnectionLostError."""
        future: Future[Any] = Future()
        if self._is_closed:
            future.set_exception(ClosedError(Fault("engine", "the client was closed")))
            return future
        self._session.ask(question, future, time.monotonic(), _call)
        self._schedule()
        return future

    def abandon(self, state: StreamState) -> None:
        """End the stream at once: nobody reads it any more."""
        self._session.abandon(state)
        self._schedule()

    async def close(self) -> None:
        """End all streams, each by a ClosedError, and tell the server goodbye: half a second at
        most. Idempotent.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._ticker.cancel()
        self._session.end_all(partial(ClosedError, Fault("engine", "the client was closed")))
        deadline = self._loop.time() + GOODBYE_S
        while not self._session.say_goodbye(time.monotonic()):
            if not await self._poller.wait(deadline - self._loop.time()):
                break
        self._session.close()
        self._context.destroy(linger=0)
        if self._tracer is not None:
            self._tracer.close()

    def _turn(self) -> None:
        self._is_turn_due = False
        if self._is_closed:
            return
        begin_ns = time.monotonic_ns()
        has_deltas = self._session.turn(time.monotonic())
        if self._tracer is not None and has_deltas:
            self._tracer.add(Span.CLIENT, begin_ns, time.monotonic_ns())
        if self._poller.has_more():
            self._schedule()

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._turn()

    def _schedule(self) -> None:
        if not self._is_turn_due:
            self._is_turn_due = True
            self._loop.call_soon(self._turn)


def _call(command: Callable[[], None]) -> None:
    command()  # futures are cancelled in the loop's thread, which is the one that asks


class _LoopPoller(zmq.Poller):
    """Calls back when a socket that is registered may have something."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_news: Callable[[], None]) -> None:
        super().__init__()
        self._loop = loop
        self._on_news = on_news
        self._fds: dict[Any, int] = {}  # by socket
        self._waiter: asyncio.Future[bool] | None = None

    def register(self, socket: Any, flags: int = zmq.POLLIN) -> None:
        self._fds[socket] = int(socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._fds[socket], self._on_edge)

    def unregister(self, socket: Any) -> None:
        self._loop.remove_reader(self._fds.pop(socket))

    def has_more(self) -> bool:
        """Whether something can be read."""
        return any(int(s.getsockopt(zmq.EVENTS)) & zmq.POLLIN for s in self._fds)

    async def wait(self, timeout_s: float) -> bool:
        """Until there may be something, which is not told to anybody else; False: there is not."""
        if self.has_more():
            return True
        self._waiter = self._loop.create_future()
        timer = self._loop.call_later(max(0.0, timeout_s), self._wake, False)
        try:
            return await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _on_edge(self) -> None:
        if self._waiter is not None:
            self._wake(True)
        else:
            self._on_news()

    def _wake(self, is_news: bool) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(is_news)
