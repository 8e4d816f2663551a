"""The I/O thread of a blocking client: one thread and one socket for all of its streams.

The thread ends by `close`, or by an exception of its own; in both cases everything that waits
fails.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Container
from concurrent.futures import Future
from functools import partial
from typing import Any

import zmq

from slipstream.client.connection.cluster import Cluster
from slipstream.client.connection.link_session import GOODBYE_S
from slipstream.client.connection.mailbox import Mailbox
from slipstream.client.connection.queries import Query
from slipstream.client.streams.stream_state import StreamState
from slipstream.errors import ClosedError, EngineError, SlipstreamError
from slipstream_ipc.messages import Fault, ModelCard
from slipstream_ipc.telemetry.trace import SpanKind, Tracer
from slipstream_ipc.transport.curve import Access
from slipstream_ipc.transport.poller import Poller

_JOIN_S = 2.0


class ThreadIO:
    """Carries streams over one connection until it is closed. All methods may be called from any
    thread; only `close` blocks.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        tracer: Tracer | None = None,
        *,
        access: Access | None = None,
        fails_early: bool = False,
    ) -> None:
        """`fails_early`: see `Absence`."""
        self.address = address
        self.timeout_s = timeout_s
        self._tracer = tracer
        self._commands = Mailbox()
        self._is_closing = False
        self._ending: Callable[[], SlipstreamError] | None = None  # set when the thread has ended
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = Poller()
        self._cluster = Cluster(
            self._context,
            address,
            timeout_s,
            self._poller,
            time.monotonic(),
            access=access,
            fails_early=fails_early,
        )
        self._thread = threading.Thread(target=self._run, name="slipstream-client", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # ---- for any thread --------------------------------------------------------------------

    @property
    def models(self) -> tuple[ModelCard, ...]:
        """The models that the server last reported: one, or those of a fleet; empty before the
        first connection.
        """
        return self._cluster.models

    def connect(self) -> Future[ModelCard]:
        """A future that is done when the server answers; ConnectionLostError after `timeout_s`."""
        future: Future[ModelCard] = Future()
        future.set_running_or_notify_cancel()  # so that the caller cannot cancel it
        self._commands.post(partial(self._connect, future, time.monotonic()))
        return future

    def submit(self, state: StreamState) -> None:
        """Submit the stream's request. On a closed connection it ends with a ClosedError."""
        self._commands.post(partial(self._submit, state))

    def ask(self, query: Query, model: str = "") -> Future[Any]:
        """The future answer of the server; ConnectionLostError after `timeout_s` without one.

        model: whose replicas may answer, by its name; empty: any, or it depends on none.
        """
        future: Future[Any] = Future()
        self._commands.post(partial(self._ask, query, future, time.monotonic(), model))
        return future

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream, which then still receives its End."""
        self._commands.post(partial(self._abort, state))

    def abandon(self, state: StreamState) -> None:
        """End the stream at once, without waiting for the server."""
        self._commands.post(partial(self._abandon, state))

    def release(self, state: StreamState) -> None:
        """Abandon the stream from a finalizer."""
        self.abandon(state)

    def close(self, *, wait: bool = True) -> None:
        """End all streams, say goodbye to the server and end the thread. Idempotent.

        wait: until that is done; a silent server delays it by half a second at most.
        """
        self._commands.post(self._begin_close)
        if wait and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    # ---- commands, in the I/O thread ---------------------------------------------------------

    def _connect(self, future: Future[ModelCard], since: float) -> None:
        if self._ending is not None:
            future.set_exception(self._ending())
        else:
            self._cluster.connect(future, since)

    def _submit(self, state: StreamState) -> None:
        self._cluster.submit(state, time.monotonic())
        if self._ending is not None:
            self._cluster.end_all(self._ending)

    def _ask(self, query: Query, future: Future[Any], since: float, model: str) -> None:
        self._cluster.ask(query, future, since, self._commands.post, model)
        if self._ending is not None:
            self._cluster.end_all(self._ending)

    def _abort(self, state: StreamState) -> None:
        self._cluster.abort(state)

    def _abandon(self, state: StreamState) -> None:
        self._cluster.abandon(state)

    def _begin_close(self) -> None:
        self._is_closing = True

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        ending: Callable[[], SlipstreamError]
        ending = partial(ClosedError, Fault("engine", "the client was closed"))
        poller = self._poller
        try:
            poller.register(self._commands.fd, zmq.POLLIN)
            while not self._is_closing:
                arrived = dict(poller.poll(int(self._cluster.tick_s * 1e3)))
                is_rung = self._commands.fd in arrived
                self._commands.run(is_rung=is_rung)
                self._turn(None if is_rung else arrived)
            poller.unregister(self._commands.fd)
            self._cluster.end_all(ending)
            _say_goodbye(self._cluster, poller)
        except Exception as error:
            why = f"the client's I/O thread failed: {type(error).__name__}: {error}"
            ending = partial(EngineError, Fault("engine", why))
        finally:
            self._ending = ending
            self._cluster.end_all(ending)
            self._commands.end()
            self._context.destroy(linger=0)
            if self._tracer is not None:
                self._tracer.close()
            atexit.unregister(self.close)

    def _turn(self, arrived: Container[object] | None) -> None:
        begin_ns = time.monotonic_ns()
        has_deltas = self._cluster.turn(time.monotonic(), arrived)
        if self._tracer is not None and has_deltas:
            self._tracer.add(SpanKind.CLIENT, begin_ns, time.monotonic_ns())


def _say_goodbye(cluster: Cluster, poller: zmq.Poller) -> None:
    deadline = time.monotonic() + GOODBYE_S
    while not cluster.say_goodbye(now := time.monotonic()) and now < deadline:
        poller.poll(1 + int((deadline - now) * 1e3))
    cluster.close()
