"""An HTTP/1.1 client for load generation, and the events of a streamed answer.

- No task wakes for a piece of a body: the parser calls the sink from within
  `data_received`. General-purpose clients, which do wake one, cost two to ten times as much per
  chunk.
- Connections are kept alive and carry one exchange at a time. A kept connection that turns out to
  be closed is replaced by a new one, once, and only if no byte of an answer had arrived: the server
  never processed such a request.
- Events follow the HTML standard ("Server-sent events"): they end with an empty line, lines end
  with LF, CR LF or CR, wherever the bytes were cut. Only `data` and `id` count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import cast
from urllib.parse import SplitResult

from slipstream_bench.common.load.response_parser import MalformedResponseError, ResponseParser

Sink = Callable[[bytes], None]  # may raise RequestFailedError, which ends the exchange
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_MAX_REFUSAL_BYTES = 2**16
_OK = 200
MAX_EVENT_BYTES = 16 * 2**20  # bounds memory if an event never ends


class RequestFailedError(Exception):
    """A request without a complete answer.

    reason: the kind of failure, in snake_case (`http_503`, `connect`, `disconnected`, `timeout`,
    `malformed`, `incomplete`, `error_event`, ...). detail: the message that came with it.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class HttpClient:
    """The connections to one server. url: scheme, host and port; its path prefixes all others.

    headers: sent with every request, besides Host and Content-*.
    """

    def __init__(self, url: SplitResult, headers: Mapping[str, str]) -> None:
        assert url.hostname is not None
        self._host = url.hostname
        self._is_tls = url.scheme == "https"
        self._port = url.port or (443 if self._is_tls else 80)
        self._prefix = url.path.rstrip("/")
        lines = {"Host": url.netloc.rpartition("@")[2], **headers}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        sink: Sink,
        headers: Mapping[str, str] = NO_HEADERS,
    ) -> None:
        """Send a request and wait until its answer is complete; body pieces go to `sink`.

        headers: in addition to those of every request.

        Raises: RequestFailedError for a status other than 200 (`http_404`), or a server that cannot
        be reached (`connect`), closes the connection (`disconnected`) or does not speak HTTP
        (`malformed`).
        """
        content = f"Content-Type: application/json\r\nContent-Length: {len(body or b'')}\r\n"
        more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}{more}"
        message = (head + (content if body is not None else "") + "\r\n").encode() + (body or b"")
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                try:
                    await self._on(connection, message, sink)
                    return
                except RequestFailedError:
                    if not connection.was_silent:
                        raise
                    break
        await self._on(await self._connected(), message, sink)

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.abort()
        self._idle.clear()

    async def _connected(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._is_tls or None
            )
        except OSError as error:
            raise RequestFailedError("connect", error.strerror or str(error)) from error
        return connection

    async def _on(self, connection: _Connection, message: bytes, sink: Sink) -> None:
        try:
            await connection.exchange(message, sink)
        except BaseException:  # a cancelled exchange leaves an unread answer
            connection.abort()
            raise
        if connection.is_open:
            self._idle.append(connection)


class _Connection(asyncio.Protocol):
    """One socket and the exchange in progress on it."""

    def __init__(self) -> None:
        self._parser = ResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[None] | None = None
        self._forget()

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent on it."""
        return self._transport is not None and not self._transport.is_closing()

    def _forget(self, sink: Sink | None = None) -> None:
        self.was_silent = True  # no byte of the answer has arrived
        self._sink = sink
        self._status = 0
        self._refusal = b""
        self._parser.begin()

    async def exchange(self, message: bytes, sink: Sink) -> None:
        """Send one request and wait for its answer."""
        assert self._transport is not None
        assert self._answer is None
        self._forget(sink)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        try:
            await self._answer
        finally:
            self._answer = None

    def abort(self) -> None:
        """Close at once, without flushing."""
        if self._transport is not None:
            self._transport.abort()

    def _finish(self, error: RequestFailedError | None) -> None:
        if self._answer is None or self._answer.done():
            return
        if error is None and self._status != _OK:
            detail = " ".join(self._refusal.decode(errors="replace").split())
            error = RequestFailedError(f"http_{self._status}", detail)
        if error is None:
            self._answer.set_result(None)
        else:
            self._answer.set_exception(error)

    def _break(self, error: RequestFailedError) -> None:
        self._finish(error)
        self.abort()

    # ---- asyncio calls these -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        """Bytes have arrived."""
        self.was_silent = False
        try:
            self._parser.feed(data)
        except MalformedResponseError as error:
            self._break(RequestFailedError("malformed", str(error)))

    def connection_lost(self, error: Exception | None) -> None:
        """The socket is closed."""
        self._transport = None
        if error is not None or not self._parser.end():
            why = str(error or "the connection was closed")
            self._finish(RequestFailedError("disconnected", why))

    # ---- the parser calls these ----------------------------------------------------------------

    def on_head(self, status: int) -> None:
        """The answer's headers are complete."""
        self._status = status

    def on_body(self, piece: bytes) -> None:
        """A piece of the answer's body."""
        if self._status != _OK:
            self._refusal += piece[: _MAX_REFUSAL_BYTES - len(self._refusal)]
        elif self._sink is not None and self._answer is not None and not self._answer.done():
            try:
                self._sink(piece)
            except RequestFailedError as error:
                self._break(error)

    def on_end(self) -> None:
        """The answer is complete."""
        if not self._parser.keeps_alive and self._transport is not None:
            self._transport.close()
        self._finish(None)


class EventSplitter:
    """Splits one stream. last_id: the id of the last event that had one."""

    __slots__ = ("_rest", "last_id")

    def __init__(self) -> None:
        self._rest = b""
        self.last_id = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that this piece completes.

        Raises: RequestFailedError if an event exceeds MAX_EVENT_BYTES.
        """
        return [data for event in self._events(piece) if (data := self._data(event)) is not None]

    def _events(self, piece: bytes) -> list[bytes]:
        if self._rest:
            piece = self._rest + piece
        held = b""
        if b"\r" in piece:
            if piece.endswith(b"\r"):  # may be the first half of a CR LF
                piece, held = piece[:-1], b"\r"
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *events, rest = piece.split(b"\n\n")
        self._rest = rest + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise RequestFailedError("malformed", f"an event of more than {MAX_EVENT_BYTES} bytes")
        return events

    def feed_with_ids(self, piece: bytes) -> list[tuple[bytes, bytes]]:
        """As `feed`, each with the value of `last_id` at that event."""
        found: list[tuple[bytes, bytes]] = []
        for event in self._events(piece):
            data = self._data(event)
            if data is not None:
                found.append((self.last_id, data))
        return found

    def _data(self, event: bytes) -> bytes | None:
        if event.startswith(b"data: ") and b"\n" not in event:  # what every server sends
            return event[6:]
        lines: list[bytes] = []
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                lines.append(line[5:].removeprefix(b" "))
            elif line.startswith(b"id:"):
                self.last_id = line[3:].removeprefix(b" ")
        return b"\n".join(lines) if lines else None
