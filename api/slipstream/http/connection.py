"""One client's connection: requests in, answers out, one after the other.

Owns: the transport, the order of answers, time limits, back-pressure, the connection's end. Does
not know: how requests are read (`parsing`), what they ask for (`app`), who makes answers.

Rules:
- One exchange at a time. Requests sent ahead wait. A few are read, so that a client's end is seen
  behind them; then nothing more is until they have been begun.
- What has been read and not begun counts towards a bound over all connections; the one that holds
  most is refused when it is reached, so that who needs little is served.
- A client that ends its half of the connection has left: what was asked for on it is called off.
- What is unsent stays small: `Exchange.is_paused` says that no more is taken for now, and no
  exchange is begun meanwhile. Who takes nothing of it for long is dropped, who reads slowly is not.
- A refusal ends the connection; until the client has stopped sending, or for a moment at least,
  what it sends is still read, or its end would destroy the refusal on its way.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Protocol, cast

from slipstream.http import wire
from slipstream.http.config import Limits
from slipstream.http.counters import GONE, Counters
from slipstream.http.errors import ApiError, overloaded
from slipstream.http.parsing import Request, RequestParser
from slipstream.http.wire import Response

_PIECE_BYTES = 4096  # read at a time, while more requests may begin in it
_LARGE_PIECE_BYTES = 64 * 1024  # of a body
_MOST_WAITING = 16  # requests; what follows is held as it came
_REQUEST_BYTES = 1024  # that a waiting one takes besides its body


class Host(Protocol):
    """What a connection needs of its server."""

    limits: Limits
    counters: Counters
    is_draining: bool  # each answer says that the connection ends with it
    is_stopping: bool  # nothing more is begun

    def connected(self, connection: Connection) -> None:
        """There is a new connection."""

    def disconnected(self, connection: Connection) -> None:
        """It has ended."""

    def answered(self) -> None:
        """An answer is complete."""

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """It holds so many bytes of requests that have not been begun."""

    def check_head(self, request: Request) -> ApiError | None:
        """What is to be refused before its body is read."""

    def handle(self, request: Request, exchange: Exchange) -> None:
        """See to it that the exchange gets its answer, now or later."""


class Exchange:
    """A request that waits for its answer: `respond`, or `begin_stream`, `write` and `finish`.

    send: a chunk of the stream, framed and counted by who calls it; allowed while `is_ready`.
    on_gone: called when the client leaves before the answer is complete. on_writable: called when
    the transport takes more again. All calls but those do nothing once the client has gone.
    """

    def __init__(
        self, request: Request, connection: Connection, counters: Counters | None = None
    ) -> None:
        self.request = request
        self.counters = counters or Counters()
        self.is_ready = False  # a chunk may be sent by `send`
        self.send: Callable[[bytes], None]
        self.is_paused = False  # the client reads too slowly: hold back what can be held
        self.has_begun = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._connection: Connection | None = connection
        self._is_chunked = request.version != "1.0"

    @property
    def is_open(self) -> bool:
        """Whether the client is there, and the answer is not complete."""
        return self._connection is not None

    def respond(self, response: Response) -> None:
        """The whole answer."""
        connection, request = self._connection, self.request
        if connection is None:
            return
        self.counters.answered(request.path, response.status)
        keep_alive = connection.keeps_alive(request)
        connection.write(
            wire.response_bytes(
                response,
                time.time(),
                keep_alive=keep_alive,
                version=request.version,
                with_body=request.method != "HEAD",
                headers=request.answer_headers,
            )
        )
        self._end(connection, keep_alive)

    def begin_stream(self) -> None:
        """The head of a stream of events."""
        connection, request = self._connection, self.request
        if connection is None:
            return
        self.has_begun = True
        self.is_ready = self._is_chunked and not self.is_paused
        self.send = connection.write
        self.counters.begun(request.path)
        request.keep_alive = self._is_chunked and connection.keeps_alive(request)
        connection.write(
            wire.stream_head(
                time.time(),
                keep_alive=request.keep_alive,
                version=request.version,
                headers=request.answer_headers,
            )
        )

    def write(self, events: bytes) -> None:
        """Events of the stream that has begun."""
        connection = self._connection
        if connection is not None:
            if self._is_chunked:
                events = b"%x\r\n%b\r\n" % (len(events), events)  # `wire.chunk`, without a call
            connection.write(events)
            self.counters.num_chunks += 1

    def finish(self) -> None:
        """The stream has been told to its end."""
        if self._connection is not None:
            if self._is_chunked:
                self._connection.write(wire.LAST_CHUNK)
            self._end(self._connection, self.request.keep_alive)

    def drop(self) -> None:
        """End the connection without a word."""
        if self._connection is not None:
            self._connection.abort()

    def leave(self) -> None:
        """The client has gone."""
        if self.has_begun and self._connection is not None:
            self.counters.ended()
        elif self._connection is not None:
            self.counters.answered(self.request.path, GONE)
        self._connection, self.is_ready = None, False
        if self.on_gone is not None:
            self.on_gone()

    def pause(self, is_paused: bool) -> None:
        """The transport takes no more, or takes more again."""
        self.is_paused = is_paused
        self.is_ready = self.has_begun and self._is_chunked and not is_paused and self.is_open
        if not is_paused and self.on_writable is not None:
            self.on_writable()

    def _end(self, connection: Connection, keep_alive: bool) -> None:
        self._connection, self.is_ready = None, False
        if self.has_begun:
            self.counters.ended()
        connection.exchange_ended(keep_alive)


class Connection(asyncio.Protocol):
    """See the module."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._limits = host.limits
        self._parser = RequestParser(host.limits, host.check_head)
        self._waiting: deque[Request] = deque()
        self._unread = b""  # behind them
        self._ahead_bytes = 0  # that came while an answer is not complete
        self.num_held = 0  # as the host knows it
        self._body_until = inf  # when the body that comes now has to be there
        self._exchange: Exchange | None = None
        self._is_paused = self._is_closing = False
        self.deadline = inf  # of the loop's clock; the server looks at it now and then
        self.idle_since = 0.0  # when it was opened, or its last answer complete
        self._num_unsent = 0  # when it was set; where less is then, the reader has as long again
        self.write: Callable[[bytes], None]  # to the transport

    # ---- called by the event loop ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop has a class of its own
        self._loop = asyncio.get_running_loop()
        self.write = self._transport.write
        self._transport.set_write_buffer_limits(self._limits.write_buffer_bytes)
        self.idle_since = time.monotonic()
        self._host.connected(self)
        self._set_deadline(self._limits.header_s)

    def data_received(self, data: bytes) -> None:
        if self._is_closing:
            return
        is_ahead = self._exchange is not None or self._is_paused or bool(self._waiting)
        before = self._parser.phase
        self._unread += data
        self._read()
        if not is_ahead:
            if self._parser.phase != before:
                self._wait_for_more()
            elif before == "body":
                self._wait_for_body()
        self._go_on()
        if is_ahead or self._waiting:
            self._ahead_bytes += len(data)
            self._hold_back()

    def eof_received(self) -> bool:
        self._leave()
        return False  # the transport closes, once it has sent what it has

    def connection_lost(self, _error: Exception | None) -> None:
        self._host.disconnected(self)
        self._leave()

    def pause_writing(self) -> None:
        self._is_paused = True
        self._wait_for_reader()
        if self._exchange is not None:
            self._exchange.pause(True)

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._exchange is not None:
            self.deadline = inf
            self._exchange.pause(False)
        elif not self._is_closing:
            self._wait_for_more()
        self._go_on()

    # ---- called by the server ----------------------------------------------------------------

    def check_deadline(self, now: float) -> None:
        """Do what is due when the time is over."""
        if now < self.deadline:
            return
        if self._is_closing or self._is_paused:
            if self._transport.get_write_buffer_size() < self._num_unsent:
                self._wait_for_reader()
            else:
                self.abort()
        elif self._parser.phase in ("head", "body") and self._exchange is None:
            self._waiting += self._parser.refuse(ApiError(408, "the request did not come in time"))
            self._go_on()
            self._tell_held()
        else:
            self._close()

    def make_way(self) -> None:
        """Another connection takes the place of this one, which has no exchange."""
        if self._is_closing:
            self.abort()
        elif self._parser.phase in ("head", "body"):
            self.give_up(overloaded("the server has as many connections as it may have"))
        else:
            self._close()

    def give_up(self, refusal: ApiError) -> None:
        """What has come and has not been begun is refused, as there is no room for it."""
        self._waiting.clear()
        self._unread = b""
        self._waiting += self._parser.refuse(refusal)
        self._go_on()
        self._tell_held()

    @property
    def is_busy(self) -> bool:
        """Whether there is an answer that is not complete, or has not left."""
        has_work = self._exchange is not None or bool(self._waiting)
        return has_work or self._transport.get_write_buffer_size() > 0

    def stop(self) -> None:
        """The server stops: nothing new is begun here."""
        self._waiting.clear()
        self._unread = b""
        if self._exchange is None and not self._is_closing:
            self._close()

    def abort(self) -> None:
        """End the connection now, and drop what is unsent."""
        self._transport.abort()
        self._leave()

    # ---- called by the exchange --------------------------------------------------------------

    def keeps_alive(self, request: Request) -> bool:
        """Whether the connection outlives the answer to this request."""
        return request.keep_alive and not self._host.is_draining

    def exchange_ended(self, keep_alive: bool) -> None:
        """The answer is complete."""
        exchange, self._exchange = self._exchange, None
        assert exchange is not None
        self.idle_since = time.monotonic()
        self._host.answered()
        if exchange.request.refusal is not None or (self._parser.has_surplus and not keep_alive):
            self._linger()
        elif not keep_alive or self._host.is_stopping:
            self._close()
        else:
            if not self._is_paused:
                self._wait_for_more()
            if self._waiting or self._ahead_bytes or self._parser.wants_continue:
                self._loop.call_soon(self._go_on)  # not deeper and deeper, in a pipeline

    # ---- within ------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin the next exchange, if there is one to begin, and room for its answer."""
        if self._exchange is not None or self._is_closing or self._is_paused:
            return
        if self._waiting:
            request = self._waiting.popleft()
            self._exchange = exchange = Exchange(request, self, self._host.counters)
            self.deadline = inf
            self._read()
            self._go_on_reading()
            if request.refusal is not None:
                exchange.respond(request.refusal.response())
            else:
                self._host.handle(request, exchange)
            return
        self._go_on_reading()
        if self._parser.wants_continue:
            self._parser.wants_continue = False
            self.write(wire.CONTINUE)

    def _read(self) -> None:
        """Make requests of what has come, a few of them."""
        while self._unread and len(self._waiting) < _MOST_WAITING:
            size = _LARGE_PIECE_BYTES if self._parser.phase == "body" else _PIECE_BYTES
            piece, self._unread = self._unread[:size], self._unread[size:]
            self._waiting += self._parser.feed(piece)
        self._tell_held()

    def _hold_back(self) -> None:
        """Leave the rest unread where much has come that has not been begun."""
        is_much = bool(self._unread) or self._ahead_bytes > self._limits.ahead_bytes
        if is_much and not self._is_closing:
            self._transport.pause_reading()

    def _go_on_reading(self) -> None:
        """Where nothing waits any more."""
        if not self._waiting and not self._unread:
            self._ahead_bytes = 0
            self._transport.resume_reading()

    def _tell_held(self) -> None:
        num = self._parser.num_held + len(self._unread)
        for request in self._waiting:
            num += _REQUEST_BYTES + len(request.body)
        if num != self.num_held:
            self._host.hold(self, num)

    def _wait_for_more(self) -> None:
        limits, phase = self._limits, self._parser.phase
        if phase == "body":
            self._body_until = self._loop.time() + limits.body_s
            self._wait_for_body()
        else:
            within = {"idle": limits.idle_s, "head": limits.header_s}
            self._set_deadline(within.get(phase, limits.linger_s))

    def _wait_for_body(self) -> None:
        self._set_deadline(self._limits.body_stall_s)
        self.deadline = min(self.deadline, self._body_until)

    def _wait_for_reader(self) -> None:
        self._set_deadline(self._limits.stall_s, self._transport.get_write_buffer_size())

    def _set_deadline(self, seconds: float, num_unsent: int = 0) -> None:
        self.deadline = self._loop.time() + seconds
        self._num_unsent = num_unsent

    def _leave(self) -> None:
        """The client is not there any more."""
        self._is_closing = True
        self._set_deadline(self._limits.linger_s)
        self._waiting.clear()
        self._unread = b""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.leave()

    def _close(self) -> None:
        """Once what is unsent has left."""
        self._is_closing = True
        self._wait_for_reader()
        self._transport.close()

    def _linger(self) -> None:
        self._is_closing = True
        self._set_deadline(self._limits.linger_s)
        if self._transport.can_write_eof():
            self._transport.write_eof()
            self._transport.resume_reading()
