"""The I/O engine of a client: one thread, one socket, every stream.

Owns: the thread, the attach, what is sent and when, and how long a missing server is waited for.
Does not know: who reads (threads or tasks), how outputs look.

Rules (STREAMS I and II):
- Deltas are acknowledged when they lie in their streams' queues, and pings are answered here: a
  reader's pause is no death of the client. Queues have no bound yet: a reader that never reads
  costs memory, here and nowhere else.
- A server that is away for `timeout_s` ends whatever waits, and is waited for anew by whatever
  comes next. The thread itself ends by `close` alone.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from secrets import token_bytes

import zmq

from slipstream.commands import Commands
from slipstream.errors import ClosedError, ConnectionLostError, EngineError, SlipstreamError
from slipstream.outbox import Outbox
from slipstream.stream_table import StreamState, StreamTable
from slipstream_ipc.attach import Attacher
from slipstream_ipc.codec import client_codec
from slipstream_ipc.errors import ProtocolError
from slipstream_ipc.messages import (
    Accepted,
    ClientToWorker,
    Deltas,
    Fault,
    Goodbye,
    ModelCard,
    Refusal,
    Rejected,
    UnknownStreams,
    Welcome,
    WorkerToClient,
)

_TICK_MS = 250  # how late a heartbeat or a deadline may be noticed
_MAX_BREACHES = 3
_GOODBYE_S = 0.5
_JOIN_S = 2.0

_WHAT_TO_DO = (
    "start one with scripts/launch or `slipstream serve`, or say where it is "
    "(the address argument or $SLIPSTREAM_ADDRESS)"
)


@dataclass(eq=False, slots=True)
class _Caller:
    """Somebody who waits for the server to be there."""

    future: Future[ModelCard]
    since: float


class ClientIO:
    """Serves streams over one connection until it is closed. Every method may be called from any
    thread, and none but `close` waits.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.timeout_s = timeout_s
        self.model: ModelCard | None = None  # as the server said last
        self._table = StreamTable()
        self._callers: list[_Caller] = []
        self._outbox = Outbox(self._table)
        self._lost_at: float | None = None
        self._num_breaches = 0  # of the protocol, since a message was good
        self._commands = Commands()
        self._is_closing = False
        self._ending: Callable[[], SlipstreamError] | None = None  # set when the thread is done
        self._thread = threading.Thread(target=self._run, name="slipstream-client", daemon=True)
        atexit.register(self.close)
        self._thread.start()

    # ---- for any thread --------------------------------------------------------------------

    def connect(self) -> Future[ModelCard]:
        """Done when the server is there; ConnectionLostError after `timeout_s`."""
        future: Future[ModelCard] = Future()
        future.set_running_or_notify_cancel()  # or an impatient caller could cancel it under us
        self._commands.post(partial(self._begin_connect, _Caller(future, time.monotonic())))
        return future

    def submit(self, state: StreamState) -> None:
        """Ask for the stream. Where nothing can be asked any more it ends with a ClosedError."""
        self._commands.post(partial(self._begin_stream, state))

    def abort(self, state: StreamState) -> None:
        """Ask the server to end the stream; its End is still to come."""
        self._commands.post(partial(self._begin_abort, state))

    def abandon(self, state: StreamState) -> None:
        """End the stream at once: nobody reads it any more."""
        self._commands.post(partial(self._give_up, state))

    def close(self, *, wait: bool = True) -> None:
        """Tell the server goodbye, end all streams and the thread. Idempotent.

        wait: until it is done, which the server's silence can delay for half a second.
        """
        self._commands.post(self._begin_close)
        if wait and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    # ---- commands, in the I/O thread ---------------------------------------------------------

    def _begin_connect(self, caller: _Caller) -> None:
        if self._ending is not None:
            caller.future.set_exception(self._ending())
        elif self._attacher.is_attached and self.model is not None:
            caller.future.set_result(self.model)
        else:
            self._callers.append(caller)

    def _begin_stream(self, state: StreamState) -> None:
        state.submitted_at = time.monotonic()
        if self._ending is not None:
            self._table.give_up(state, self._ending())
            self._table.wake()
            return
        self._table.add(state)
        self._outbox.submit(state)

    def _begin_abort(self, state: StreamState) -> None:
        if not state.was_sent:
            self._table.give_up(state, None)
        elif not state.is_over and not state.is_abort_wanted:
            state.is_abort_wanted = True
            self._outbox.abort(state)

    def _give_up(self, state: StreamState) -> None:
        if not state.is_over:
            self._table.give_up(state, None)
            self._outbox.abort(state)

    def _begin_close(self) -> None:
        self._is_closing = True

    # ---- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ending: Callable[[], SlipstreamError]
        ending = partial(ClosedError, Fault("engine", "the client was closed"))
        try:
            self._poller = zmq.Poller()
            self._poller.register(self._commands.fd, zmq.POLLIN)
            now = time.monotonic()
            self._attacher: Attacher[ClientToWorker, WorkerToClient, StreamState | None] = Attacher(
                context,
                self.address,
                client_codec(),
                self._poller,
                identity=token_bytes(16),
                now=now,
            )
            self._lost_at = now
            while not self._is_closing:
                self._turn()
            self._poller.unregister(self._commands.fd)
            self._end_all(ending)
            self._say_goodbye()
        except Exception as error:
            why = f"the client's I/O thread failed: {type(error).__name__}: {error}"
            ending = partial(EngineError, Fault("engine", why))
        finally:
            self._ending = ending
            self._end_all(ending)
            self._commands.end()
            context.destroy(linger=0)
            atexit.unregister(self.close)

    def _turn(self) -> None:
        events = self._poller.poll(_TICK_MS)
        now = time.monotonic()
        self._commands.run(is_rung=(self._commands.fd, zmq.POLLIN) in events)
        self._receive(now)
        self._attacher.beat(now)
        if self._attacher.is_attached:
            self._lost_at = None
            self._outbox.flush(self._attacher.send)
        else:
            self._count_absence(now)
        self._table.wake()

    def _receive(self, now: float) -> None:
        table = self._table
        for body in self._attacher.receive(now):
            try:
                match body:
                    case Deltas():
                        if not table.deliver(body):
                            self._attacher.attach(now)
                        self._num_breaches = 0
                    case Accepted():
                        table.accept(body)
                    case Rejected():
                        table.reject(body)
                    case UnknownStreams():
                        table.lose(body)
                    case Welcome():
                        self._greet(body.model)
                    case Refusal():
                        self._fail_waiting(partial(SlipstreamError, body.fault))
                        if self._attacher.is_attached:  # else `beat` tries again, without haste
                            self._attacher.attach(now)
            except ProtocolError as error:
                self._note_breach(error)
                self._attacher.attach(now)
        for state in self._attacher.take_receipts():
            if state is not None:
                table.forget(state)

    def _note_breach(self, error: ProtocolError) -> None:
        """A new attach may help, but not for ever."""
        self._num_breaches += 1
        if self._num_breaches >= _MAX_BREACHES:
            self._num_breaches = 0
            why = f"the server does not keep to the protocol: {error}"
            self._fail_waiting(partial(EngineError, Fault("engine", why)))

    def _greet(self, model: ModelCard) -> None:
        self.model = model
        callers, self._callers = self._callers, []
        for caller in callers:
            caller.future.set_result(model)
        self._outbox.refill()

    def _count_absence(self, now: float) -> None:
        """End what has waited for `timeout_s`, all of them without a server."""
        if self._lost_at is None:
            self._lost_at = now
        latest = now - self.timeout_s
        if self._lost_at > latest:
            return
        was_there = self.model is not None
        what = (
            "the Slipstream server has been gone from" if was_there else "no Slipstream server at"
        )
        why = f"{what} {self.address} for {self.timeout_s:g} s: {_WHAT_TO_DO}"
        error = partial(ConnectionLostError, Fault("engine", why))
        for state in self._table.streams:
            if state.submitted_at <= latest:
                self._table.give_up(state, error())
        for caller in list(self._callers):
            if caller.since <= latest:
                self._callers.remove(caller)
                caller.future.set_exception(error())

    def _fail_waiting(self, error: Callable[[], SlipstreamError]) -> None:
        callers, self._callers = self._callers, []
        for caller in callers:
            caller.future.set_exception(error())
        self._table.give_up_all(error)

    def _end_all(self, error: Callable[[], SlipstreamError]) -> None:
        self._fail_waiting(error)
        self._table.wake()

    def _say_goodbye(self) -> None:
        """Until the server has acknowledged it, is gone, or has been silent for too long."""
        attacher = self._attacher
        epoch = attacher.epoch
        deadline = time.monotonic() + _GOODBYE_S
        is_said = False
        while attacher.is_attached and attacher.epoch == epoch:
            is_said = is_said or attacher.send(Goodbye(), None)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or (is_said and attacher.num_unacked == 0):
                break
            self._poller.poll(1 + int(left_s * 1000))
            for _ in attacher.receive(time.monotonic()):
                pass
        attacher.close()
