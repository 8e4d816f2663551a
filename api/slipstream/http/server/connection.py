"""One client connection: aiohttp's HTTP/1.1 protocol, with limits that hold against any client.

aiohttp parses requests, frames answers, keeps connections alive and serializes pipelined requests.
`Connection` adds:

- The head is checked before the body is read; the body is limited in size and time.
- Every phase has a deadline, which the server checks periodically (`check_deadline`).
- Bytes of pending requests are reported to the server, which bounds them over all connections.
- A client that half-closes the connection counts as disconnected.
- A stream's bytes go to the transport immediately. An answer that its client does not read is
  dropped.
- A refusal ends the connection. Input is read and discarded for up to `linger_s`, as closing with
  unread input would reset the connection and lose the refusal.

Private names of aiohttp are used here (`_messages`, `_waiter`, `_ErrInfo`, `_loop`) and in `server`
(`_handle_request`): without them, an incomplete request cannot be answered. pyproject.toml pins
aiohttp to one minor version for that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine
from contextlib import suppress
from http import HTTPStatus
from math import inf
from typing import Any, Literal, Protocol, cast

from aiohttp import EMPTY_PAYLOAD, StreamReader, hdrs, web
from aiohttp.http import (
    HttpProcessingError,
    HttpVersion,
    HttpVersion11,
    RawRequestMessage,
    StreamWriter,
)
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import _ErrInfo
from multidict import CIMultiDict

from slipstream.http.api_errors import ApiError, error_of, overloaded
from slipstream.http.config import Limits
from slipstream.http.counters import CLIENT_CLOSED, HttpCounters
from slipstream.http.exchange import Exchange, HttpRequest, client_request_id
from slipstream.http.response_encoding import EVENT_STREAM, Response
from slipstream.http.server.socket_writer import SocketWriter, writer_of
from slipstream.trusted_proxies import UNIX
from slipstream_ipc.telemetry.logs import of_requests

_READ_BYTES = 64 * 1024  # aiohttp's read buffer: above twice that it stops reading the socket
_MAX_CHUNKING = 2  # how many times larger a chunked body may be on the wire than its limit
_NEVER_S = 1e9  # disables aiohttp's keep-alive timeout
_WITH_BODY = "POST"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_SERVER = "slipstream"
_HEAD_END = b"\r\n\r\n"
_MAX_SEPARATE_HEADS = 16  # pipelined heads that are fed to aiohttp one at a time
_TOO_MANY_HEADERS = "Too many headers"  # prefix of aiohttp's message
_logger = logging.getLogger(__name__)

Phase = Literal["idle", "head", "body", "answer", "over"]


class ConnectionServer(Protocol):
    """The server, as its connections see it."""

    limits: Limits
    counters: HttpCounters
    is_draining: bool  # then each answer closes its connection

    def connected(self, connection: Connection) -> None:
        """A connection has been made."""

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended."""

    def answered(self) -> None:
        """An answer is complete."""

    def hold(self, connection: Connection, num_bytes: int) -> None:
        """A connection now holds `num_bytes` of pending requests."""

    def check_head(self, connection: Connection, request: HttpRequest) -> ApiError | None:
        """The refusal of a request, as far as its head decides; None if its body may be read."""

    def handle(self, request: HttpRequest, exchange: Exchange) -> None:
        """Answer the exchange, now or later."""


class Connection(web.RequestHandler):
    """One client connection: see the module. phase: in `over`, input is ignored."""

    def __init__(self, manager: web.Server, server: ConnectionServer, **options: Any) -> None:
        limits = server.limits
        super().__init__(
            manager,
            keepalive_timeout=_NEVER_S,
            max_line_size=limits.header_bytes,
            max_field_size=limits.header_bytes,
            max_headers=limits.headers,
            lingering_time=0,  # `finish_response` lingers, after malformed requests too
            read_bufsize=_READ_BYTES,
            auto_decompress=False,
            **options,
        )
        self._server = server
        self._limits = limits
        self.write: SocketWriter
        self.peer = ""  # the client's address, or `unix`
        self.has_tls = False
        # phase and deadlines
        self.phase: Phase = "idle"
        self.deadline = inf  # in the loop's time
        self.idle_since = 0.0  # time.monotonic() when it was opened, or at its last answer's end
        self._body_deadline = inf
        self._num_unsent = 0  # at `deadline`, fewer unsent bytes than this extend the deadline
        self._linger_ended: asyncio.Future[None] | None = None  # while it lingers
        # input
        self.num_held = 0  # bytes of pending requests, as reported to the server
        self.tenant: bytes | None = None  # of the request that was read last; set by the server
        self._ignores_input = False
        self._error: ApiError | None = None  # the input could not be parsed
        self._num_raw_bytes = 0  # of the head or the body that is being read
        self._num_head_bytes = 0  # of them, of a head that is not complete
        self._max_raw_bytes = 0  # of the body
        self._payload: StreamReader = EMPTY_PAYLOAD  # of the request that was read last
        self._asks_to_close = False  # the request that was read last ends the connection
        self._body: StreamReader | None = None  # while it is read
        # the request that is being answered
        self.version = HttpVersion11  # as received; `server` changes unknown ones
        self._request = HttpRequest()
        self._closes_http_1_0 = False  # it is HTTP/1.0, and does not ask to keep the connection
        self._aiohttp_request: web.BaseRequest | None = None  # while an exchange may answer it
        self._exchange: Exchange | None = None
        self._answered: Exchange | None = None  # the last one, until its answer has been sent
        self._response: asyncio.Future[web.StreamResponse] | None = None  # the complete answer
        self._stream_response: web.StreamResponse | None = None  # the head of a streamed answer

    # ---- called by the event loop ------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # aiohttp drops its reference early
        self._transport.set_write_buffer_limits(self._limits.write_buffer_bytes)
        self.write = writer_of(self._transport)
        peername = transport.get_extra_info("peername")  # None once the client has left
        self.peer = peername[0] if isinstance(peername, tuple) else UNIX
        self.has_tls = transport.get_extra_info("sslcontext") is not None
        self.idle_since = time.monotonic()
        self._server.connected(self)
        self._set_deadline(self._limits.header_s)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            return
        self._feed(data)
        if not data:
            return  # aiohttp resumes parsing what it has buffered
        self._hold(self.num_held + len(data))
        self._num_raw_bytes += len(data)
        if self.phase == "body":
            self._check_body()
        elif self.phase == "over":
            return  # `_hold` has refused it
        elif self._messages:
            if self.phase != "answer":
                self.phase, self.deadline = "answer", inf
        elif self.phase == "idle":
            self.phase = "head"
            self._set_deadline(self._limits.header_s)
        if self._num_head_bytes > self._limits.header_bytes:
            self._ignores_input = True
            what = f"the request's line and headers exceed {self._limits.header_bytes} bytes"
            self._queue_refusal(ApiError(431, what))

    def eof_received(self) -> None:
        self._on_disconnect()
        self.force_close()

    def connection_lost(self, exc: BaseException | None) -> None:
        self.write.detach()
        super().connection_lost(exc)
        self._on_disconnect()
        self._payload = EMPTY_PAYLOAD  # it refers to this connection
        self._server.disconnected(self)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()
        if self._exchange is not None:
            self._exchange.pause(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None:
            self.deadline = inf
            self._exchange.pause(False)

    # ---- called by the server ----------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True if an answer is incomplete or unsent."""
        has_work = self.phase == "answer" or self._exchange is not None
        return has_work or self._transport.get_write_buffer_size() > 0

    def check_deadline(self, now: float) -> None:
        """Refuse, abort or hang up if the deadline has passed; now: in the loop's time."""
        if now < self.deadline:
            return
        if self.phase == "over" or self.writing_paused:
            if self._transport.get_write_buffer_size() < self._num_unsent:
                self._wait_for_reader()
            else:
                self.abort()
        elif self.phase in ("head", "body"):
            self.refuse(ApiError(408, "the request was not received in time"))
        else:
            self._hang_up()

    def evict(self) -> None:
        """Close this connection, which has no exchange, to make room for a new one."""
        if self.phase == "over":
            self.abort()
        elif self.phase in ("head", "body"):
            self.refuse(overloaded("the server has reached its limit of connections"))
        else:
            self._hang_up()

    def refuse(self, refusal: ApiError) -> None:
        """Refuse the oldest pending request, drop the others, and ignore further input."""
        self._messages.clear()
        if self._body is not None and not self._body.is_eof():
            self._body.set_exception(refusal)
        else:
            self._queue_refusal(refusal)
        self.phase, self._ignores_input = "over", True
        if self._exchange is None:
            self._wait_for_reader()
        self._hold(0)

    def stop(self) -> None:
        """The server stops: finish the running answer, if any, and close."""
        if self.phase == "answer" or self._exchange is not None:
            self.close()
        elif self.phase != "over":
            self._hang_up()

    def abort(self) -> None:
        """Close the connection now and drop unsent bytes."""
        self._transport.abort()
        self._on_disconnect()

    # ---- called by the exchange --------------------------------------------------------------

    def respond(self, response: Response) -> None:
        """Send a complete answer."""
        self._exchange = None
        self._set_answer(self._complete(response, self._request))

    def begin_stream(self, content_type: bytes, /) -> None:
        """Send the head of a stream immediately."""
        request, aiohttp_request = self._request, self._aiohttp_request
        assert aiohttp_request is not None
        headers = self._headers(request)
        headers[hdrs.CONTENT_TYPE] = content_type.decode()
        if content_type == EVENT_STREAM:
            headers[hdrs.CACHE_CONTROL] = "no-cache"
            headers["X-Accel-Buffering"] = "no"  # keeps nginx from buffering events
        self._stream_response = stream = web.StreamResponse(headers=headers)
        if request.version != "1.0":
            stream.enable_chunked_encoding()
        if request.version == "1.0" or self._closes_after:
            stream.force_close()
        with suppress(ConnectionResetError):  # it is closing, and its end will be told
            _run_now(stream.prepare(aiohttp_request))
        self.write.wait()

    def finish(self) -> None:
        """End the stream."""
        self._exchange = None
        assert self._aiohttp_request is not None
        assert self._stream_response is not None
        with suppress(ConnectionResetError):  # see `begin_stream`
            cast(StreamWriter, self._aiohttp_request.writer).set_eof()
        self._set_answer(self._stream_response)

    # ---- called by aiohttp -------------------------------------------------------------------

    async def answer(self, message: web.BaseRequest) -> web.StreamResponse:
        """aiohttp's request handler: check the head, read the body, wait for the answer."""
        self._request = request = _request_of(message, self.version)
        self._closes_http_1_0 = request.version == "1.0" and not message.keep_alive
        if self._transport.is_closing():
            return self._unsent()
        try:
            refusal = self._protocol_refusal(request) or self._server.check_head(self, request)
            if refusal is not None:
                return self._refusal(refusal, request)
            request.body = await self._read_body(message.content, request)
        except ApiError as error:
            return self._refusal(error, request)
        except ConnectionError:
            return self._unsent()
        rest = max(self._num_head_bytes, self.num_held - len(request.body))
        self._hold(rest if self._messages else self._num_head_bytes)
        self.phase, self.deadline = "answer", inf
        self._response = self._loop.create_future()
        self._exchange = self._answered = exchange = Exchange(request, self, self._server.counters)
        exchange.is_paused = self.writing_paused
        self._aiohttp_request = message
        self._server.handle(request, exchange)
        response = await self._response
        # they refer to this connection: it would have to wait for the garbage collector
        self._aiohttp_request = self._stream_response = self._response = None
        return response

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to malformed input, or to an exception of the server."""
        if self._transport.is_closing() or request.writer.output_size:
            raise ConnectionResetError
        own_id = _new_id()
        if isinstance(exc, HttpProcessingError):
            refusal = _syntax_refusal(exc)
        elif isinstance(exc, ApiError):
            refusal = exc
        else:
            what, extra = (request.method, request.path), of_requests(own_id)
            _logger.error("%s %s failed", *what, exc_info=exc, extra=extra)
            refusal = error_of(exc or Exception(), {})
        return self._refusal(refusal, HttpRequest(version="1.1", id=own_id))

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send the answer, then wait for the next request or linger."""
        exchange, self._answered = self._answered, None
        try:
            resp, is_lost = await super().finish_response(request, resp, start_time)
            if is_lost:
                return resp, is_lost
            if self.writing_paused:
                await request.writer.drain()
        finally:
            if exchange is not None:
                exchange.release()
        self.idle_since = time.monotonic()
        if not resp.keep_alive:
            await self._linger()
        elif self.phase != "over":  # else a refusal is queued
            self._wait_for_more()
        self._server.answered()
        return resp, is_lost

    # ---- within ------------------------------------------------------------------------------

    def _feed(self, data: bytes) -> None:
        """Feed aiohttp one head at a time: on an error it drops the heads parsed before it."""
        begin = 0
        while not self._ignores_input and len(self._messages) < _MAX_SEPARATE_HEADS:
            end = data.find(_HEAD_END, begin) + len(_HEAD_END)
            if end < len(_HEAD_END) or end == len(data):
                break
            # decision 023
            self._feed_piece(data[begin:end])
            begin = end
        if not self._ignores_input:
            self._feed_piece(data[begin:])

    def _feed_piece(self, data: bytes) -> None:
        num, is_in_body = len(self._messages), not self._payload.is_eof()
        super().data_received(data)
        if len(self._messages) == num:
            self._num_head_bytes = 0 if is_in_body else self._num_head_bytes + len(data)
            return
        message, self._payload = self._messages[-1]
        self._num_head_bytes = 0
        if isinstance(message, RawRequestMessage):
            self._asks_to_close = message.should_close
            return
        self._messages.pop()
        # stop feeding: aiohttp would report the same error again and again
        self._ignores_input, self._error = (
            True,
            _syntax_refusal(cast(HttpProcessingError, message.exc)),
        )
        message.exc.__traceback__ = None  # its frames refer to this connection, and to it
        if not (is_in_body or self._asks_to_close):
            self._queue_refusal(self._error)

    def _protocol_refusal(self, request: HttpRequest) -> ApiError | None:
        if sum(map(len, request.headers.values())) > self._limits.header_bytes:
            what = f"the request's headers exceed {self._limits.header_bytes} bytes"
            return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what)
        if not request.path.startswith("/"):
            return ApiError(400, "the request's target is not a path")
        if request.version not in ("1.0", "1.1"):
            what = f"HTTP version: got {request.version}, allowed: 1.0, 1.1"
            return ApiError(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, what)
        expected = request.headers.get(b"expect")
        if (
            expected is not None
            and request.version == "1.1"
            and expected.lower() != b"100-continue"
        ):
            return ApiError(417, "Expect: allowed: 100-continue")
        return None

    async def _read_body(self, content: StreamReader, request: HttpRequest) -> bytes:
        """Read the body; b"" if the method takes none. Raises: ApiError, ConnectionError."""
        is_read = request.method == _WITH_BODY
        limits = self._limits
        most = limits.body_bytes if is_read else min(limits.body_bytes, limits.stray_body_bytes)
        if int(request.headers.get(b"content-length", b"0")) > most:
            raise _too_large(request, most)
        if not content.is_eof():
            if self._error is not None:
                raise self._error
            self.phase, self._body, self._num_raw_bytes = "body", content, 0
            self._max_raw_bytes = limits.header_bytes + _MAX_CHUNKING * most
            self._body_deadline = self._loop.time() + limits.body_s
            self._wait_for_body()
            if b"expect" in request.headers and request.version != "1.0":
                self._transport.write(_CONTINUE)  # it may hold the answer before
        body = bytearray()  # not a list of chunks, which may be tiny
        num_read = 0
        try:
            while data := await content.readany():
                num_read += len(data)
                if num_read > most:
                    raise _too_large(request, most)
                if is_read:
                    body += data
        except BaseException:
            body.clear()  # the exception's traceback would keep it alive
            raise
        finally:
            self._body = None
        return bytes(body)

    def _check_body(self) -> None:
        if self._num_raw_bytes > self._max_raw_bytes:
            what = "the request's body has too many chunks"
            self.refuse(ApiError(413, what, code="request_too_large"))
        elif self._error is not None and self._body is not None and not self._body.is_eof():
            self.refuse(self._error)  # aiohttp's C parser does not fail the body by itself
        else:
            self._wait_for_body()

    def _queue_refusal(self, refusal: ApiError) -> None:
        info = _ErrInfo(refusal.status, refusal, str(refusal))
        self._messages.append((info, EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _refusal(self, refusal: ApiError, request: HttpRequest) -> web.StreamResponse:
        self._server.counters.answered(request.path, refusal.status)
        self.phase, self._ignores_input = "over", True
        self._hold(0)
        self._wait_for_reader()
        response = self._complete(refusal.response(request.path, request.id), request)
        response.force_close()
        return response

    def _complete(self, response: Response, request: HttpRequest) -> web.StreamResponse:
        headers = self._headers(request)
        for name, value in response.headers:
            headers[_header_name(name)] = value.decode("latin-1")
        if response.status == HTTPStatus.NO_CONTENT:
            whole = web.Response(status=response.status, headers=headers)
        else:
            headers[hdrs.CONTENT_TYPE] = response.content_type.decode()
            whole = web.Response(body=response.body, status=response.status, headers=headers)
        if self._closes_after:
            whole.force_close()
        return whole

    def _unsent(self) -> web.StreamResponse:
        """The answer that is counted and logged for a client that has left."""
        return web.Response(status=CLIENT_CLOSED, headers={"X-Request-Id": self._request.id})

    @property
    def _closes_after(self) -> bool:
        """True if the server closes the connection after this answer.

        After a request with an Upgrade header it does: aiohttp loses input that follows its body.
        """
        return self._server.is_draining or b"upgrade" in self._request.headers

    def _headers(self, request: HttpRequest) -> CIMultiDict[str]:
        headers = CIMultiDict({hdrs.SERVER: _SERVER, "X-Request-Id": request.id})
        if self._closes_http_1_0:
            headers[hdrs.CONNECTION] = "close"  # the default of HTTP/1.0, unknown to some clients
        for name, value in request.answer_headers:
            headers.add(_header_name(name), value.decode("latin-1"))
        return headers

    def _set_answer(self, response: web.StreamResponse) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_result(response)

    def _hold(self, num_bytes: int) -> None:
        if num_bytes != self.num_held:
            self._server.hold(self, num_bytes)

    def _wait_for_more(self) -> None:
        """Set phase and deadline after an answer."""
        if self._messages:
            return
        if self._num_head_bytes:
            self.phase = "head"
            self._set_deadline(self._limits.header_s)
        else:
            self.phase = "idle"
            self._set_deadline(self._limits.idle_s)

    def _wait_for_body(self) -> None:
        self._set_deadline(self._limits.body_stall_s)
        self.deadline = min(self.deadline, self._body_deadline)

    def _wait_for_reader(self) -> None:
        self._set_deadline(self._limits.stall_s, self._transport.get_write_buffer_size())

    def _set_deadline(self, seconds: float, num_unsent: int = 0) -> None:
        self.deadline = self._loop.time() + seconds
        self._num_unsent = num_unsent

    def _on_disconnect(self) -> None:
        """The client has disconnected."""
        self.phase, self._ignores_input = "over", True
        self._wait_for_reader()
        self._hold(0)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.disconnect()
        self._set_answer(self._unsent())
        if self._body is not None and not self._body.is_eof():
            self._body.set_exception(ConnectionResetError())
        if self._linger_ended is not None and not self._linger_ended.done():
            self._linger_ended.set_result(None)

    def _hang_up(self) -> None:
        """Close the connection once unsent bytes have been sent."""
        self.phase, self._ignores_input = "over", True
        self._wait_for_reader()
        if self._body is not None:
            self._body.set_exception(ConnectionResetError())
        self.force_close()

    async def _linger(self) -> None:
        """Half-close if possible; discard input until the client closes or `linger_s` is over."""
        is_refused, self.phase, self._ignores_input = self.phase == "over", "over", True
        transport = self._transport
        if transport.is_closing() or not (is_refused or transport.can_write_eof()):
            return
        if transport.get_write_buffer_size():
            self._wait_for_reader()
        else:
            self._set_deadline(self._limits.linger_s)
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()
        self._linger_ended = self._loop.create_future()
        self._server.answered()
        await self._linger_ended


def _request_of(message: web.BaseRequest, given: HttpVersion) -> HttpRequest:
    """The request as the endpoints see it. given: its version. A target that is not ASCII gives
    the path "".
    """
    raw = {name.lower(): value for name, value in message.raw_headers}
    request_id = client_request_id(raw) or _new_id()
    version = f"{given.major}.{given.minor}"
    url = message.rel_url
    path, query = url.raw_path, url.raw_query_string
    if not (path.isascii() and query.isascii()):
        path = ""
    return HttpRequest(message.method, path, query, version, raw, id=request_id)


def _new_id() -> str:
    return os.urandom(16).hex()


def _too_large(request: HttpRequest, most: int) -> ApiError:
    what = f"the request's body is larger than {most} bytes"
    if request.method != _WITH_BODY:
        what += f", and {request.method} takes none"
    return ApiError(413, what, code="request_too_large")


def _header_name(name: bytes) -> str:
    return name.decode("ascii")


def _syntax_refusal(error: HttpProcessingError) -> ApiError:
    """The refusal of input that aiohttp cannot parse."""
    if isinstance(error, LineTooLong) or error.message.startswith(_TOO_MANY_HEADERS):
        what = "the request's line or headers are too large"
        return ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what)
    first, *_ = error.message.splitlines() or [""]
    return ApiError(400, f"malformed HTTP: {first.strip(': ')}")


def _run_now(coroutine: Coroutine[Any, Any, object]) -> None:
    """Run a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()
    raise RuntimeError("aiohttp waits before it sends a head")
