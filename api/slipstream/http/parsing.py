"""Bytes of a connection to requests: what is right, and what has to be refused.

Owns: httptools' parser and its callbacks, the limits of sizes. Does not know: sockets, clocks,
routes, what bodies mean.

Rules:
- A refused request is handed on with its refusal, as soon as that is known and however much of it
  is still to come; nothing is read behind it: the connection ends with the answer. Nor is anything
  behind a request that ends the connection by its own wish.
- Only a POST has a body. A small one beside another method is dropped, a large one is refused at
  the head where it says how large it is.
- Nobody upgrades: who asks for it is answered in HTTP/1.1, as the standard has it.
- Sizes are of the request's own bytes. What came at once with the end of the one before, where the
  parser does not say how they are divided, is counted rather too low; no head that has come in full
  is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Literal

import httptools

from slipstream.http.config import Limits
from slipstream.http.errors import ApiError

_CHUNKING = 2  # how much larger a body may be on the wire than it is
_URL_BYTES = 64  # of a target, to find it by
_WITH_BODY = "POST"


@dataclass(slots=True, eq=False)
class Request:
    """One request. Header names are in lower case, of equal ones the last counts."""

    method: str = ""
    path: str = ""
    query: str = ""
    version: str = "1.1"
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    keep_alive: bool = False
    refusal: ApiError | None = None
    answer_headers: tuple[tuple[bytes, bytes], ...] = ()  # that its answer has, whatever that is


class RequestParser:
    """Requests of one connection, in the order in which they come.

    check_head: what is to be refused before its body is read.
    """

    def __init__(self, limits: Limits, check_head: Callable[[Request], ApiError | None]) -> None:
        self._limits = limits
        self._check_head = check_head
        self._parser = httptools.HttpRequestParser(self)
        self._ready: list[Request] = []
        self._request = Request()
        self._url = b""
        self._lines: list[tuple[bytes, bytes]] = []  # the headers as they came
        self._body = bytearray()  # in one piece: chunks may be tiny
        self._body_bytes = 0
        self._raw_bytes = 0  # of the phase
        self._is_new = False  # the phase: it has begun within the bytes that are fed
        self._head_bytes = 0  # of what may have come at once with all that follows it
        self.phase: Literal["idle", "head", "body", "over"] = (
            "idle"  # over: nothing is read any more
        )
        self.wants_continue = False  # the client holds its body back until it is told to go on
        self.has_surplus = False  # bytes have come that are not read, behind the last request

    @property
    def num_held(self) -> int:
        """Bytes of a request that is not complete, or rather more."""
        return self._raw_bytes if self.phase in ("head", "body") else 0

    def feed(self, data: bytes) -> list[Request]:
        """The requests that are complete, or refused, with this."""
        if self.phase == "over":
            self.has_surplus = True
        while data and self.phase != "over":
            try:
                self._parser.feed_data(data)
                rest = b""
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                self._refuse_rest(ApiError(400, f"this is not HTTP: {error}"))
                break
            self._check_sizes(data)
            data = rest
        ready, self._ready = self._ready, []
        return ready

    def refuse(self, refusal: ApiError) -> list[Request]:
        """What has begun, or would come next, is refused."""
        self._refuse(refusal)
        ready, self._ready = self._ready, []
        return ready

    def _check_sizes(self, data: bytes) -> None:
        limits = self._limits
        self._raw_bytes += self._num_within(data) if self._is_new else len(data)
        self._is_new = False
        if self.phase == "head" and self._raw_bytes > limits.header_bytes:
            self._refuse_head()
        elif self.phase == "body" and self._raw_bytes > (
            limits.header_bytes + _CHUNKING * self._most_bytes
        ):
            self._refuse_size()

    def _num_within(self, data: bytes) -> int:
        """How many of these bytes are the phase's, which has begun within them; or fewer."""
        if self.phase == "body":
            return self._body_bytes
        if self.phase != "head" or not self._url:
            return 0
        return len(data) - data.rfind(b" " + self._url[:_URL_BYTES])

    def _refuse(self, refusal: ApiError) -> None:
        if self.phase not in ("head", "body"):
            self._request = Request()  # the one before is complete, and not to blame
        self._body = bytearray()
        request = self._request
        request.refusal = refusal
        request.keep_alive = False
        self.phase = "over"
        self._ready.append(request)

    def _refuse_rest(self, refusal: ApiError) -> None:
        if self.phase == "over":
            self.has_surplus = True
        else:
            self._refuse(refusal)

    def _refuse_head(self) -> None:
        most = self._limits.header_bytes
        self._refuse(ApiError(431, f"the request's line and headers are larger than {most} bytes"))

    def _refuse_size(self) -> None:
        what = f"the request's body is larger than {self._most_bytes} bytes"
        if self._request.method != _WITH_BODY:
            what += f", and {self._request.method} takes none"
        self._refuse(ApiError(413, what, code="request_too_large"))

    @property
    def _most_bytes(self) -> int:
        """Of this request's body."""
        limits = self._limits
        is_read = self._request.method == _WITH_BODY
        return limits.body_bytes if is_read else min(limits.body_bytes, limits.stray_body_bytes)

    # ---- called by httptools -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.phase == "over":
            return
        self._request = Request()
        self._url = b""
        self._lines = []
        self._body = bytearray()
        self._body_bytes = self._raw_bytes = self._head_bytes = 0
        self.phase, self._is_new = "head", True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self.phase == "head":
            name = name.lower()
            if len(self._lines) >= self._limits.headers:
                what = f"the request has more than {self._limits.headers} headers"
                self._refuse(ApiError(431, what))
                return
            self._lines.append((name, value))
            self._request.headers[name] = value

    def on_headers_complete(self) -> None:
        if self.phase == "over":
            return
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            return  # the parser skips a body now; `feed` goes on with another one
        request = self._request
        request.method = self._parser.get_method().decode("ascii", "replace")
        request.version = self._parser.get_http_version()
        request.keep_alive = self._parser.should_keep_alive()
        self.phase, self._is_new = "body", True
        self._raw_bytes = 0
        if self._head_bytes + len(self._url) > self._limits.header_bytes:
            self._refuse_head()
            return
        refusal = self._path_refusal() or self._protocol_refusal() or self._check_head(request)
        if refusal is not None:
            self._refuse(refusal)
        elif int(request.headers.get(b"content-length", b"0")) > self._most_bytes:
            self._refuse_size()

    def on_body(self, data: bytes) -> None:
        if self.phase != "body":
            return
        if self._request.method == _WITH_BODY:
            self._body += data
        self._body_bytes += len(data)
        if self._body_bytes > self._most_bytes:
            self._refuse_size()

    def on_message_complete(self) -> None:
        if self.phase != "body":
            return
        self._request.body, self._body = bytes(self._body), bytearray()
        self._ready.append(self._request)
        self.phase = "idle" if self._request.keep_alive else "over"
        self.wants_continue = False

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last, less the wish to speak something else behind it."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        lines = [b"%b %b HTTP/%b" % (method, self._url, version.encode())]
        for name, value in self._lines:  # each of them: two of a name may be one too many
            if name == b"connection" and b"close" in value.lower():
                lines.append(b"connection: close")
            elif name not in (b"connection", b"upgrade"):
                lines.append(b"%b: %b" % (name, value))
        return b"\r\n".join([*lines, b"\r\n"])

    def _path_refusal(self) -> ApiError | None:
        try:
            url = httptools.parse_url(self._url)
            self._request.path = url.path.decode("ascii")
            self._request.query = (url.query or b"").decode("ascii")
        except (httptools.HttpParserInvalidURLError, AttributeError, UnicodeDecodeError):
            return ApiError(400, "the request's target is no path")
        if not self._request.path.startswith("/"):
            return ApiError(400, "the request's target is no path")
        return None

    def _protocol_refusal(self) -> ApiError | None:
        request = self._request
        if request.version not in ("1.0", "1.1"):
            return ApiError(
                HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "this server speaks HTTP/1.1 and HTTP/1.0"
            )
        if request.version == "1.1" and b"host" not in request.headers:
            return ApiError(400, "a request of HTTP/1.1 has a Host header")
        if (
            sum(name == b"host" for name, _ in self._lines) > 1
        ):  # a proxy in front may have gone by the other one
            return ApiError(400, "Host: got two of them, allowed: one")
        expected = request.headers.get(b"expect")
        if expected is not None and request.version == "1.1":
            if expected.lower() != b"100-continue":
                return ApiError(417, "this server knows no expectation but 100-continue")
            self.wants_continue = True
        return None
