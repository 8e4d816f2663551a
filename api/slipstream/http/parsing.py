"""Bytes of a connection to requests: what is right, and what has to be refused.

Owns: httptools' parser and its callbacks, the limits of sizes. Does not know: sockets, clocks,
routes, what bodies mean.

Rules:
- A refused request is handed on with its refusal, as soon as that is known and however much of it
  is still to come; nothing is read behind it: the connection ends with the answer.
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
        self._has_two_hosts = False
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._raw_bytes = 0  # of the phase
        self._is_new = False  # the phase: it has begun within the bytes that are fed
        self._head_bytes = 0  # of what may have come at once with all that follows it
        self.phase: Literal["idle", "head", "body", "over"] = (
            "idle"  # over: nothing is read any more
        )
        self.wants_continue = False  # the client holds its body back until it is told to go on

    def feed(self, data: bytes) -> list[Request]:
        """The requests that are complete, or refused, with this."""
        while data and self.phase != "over":
            try:
                self._parser.feed_data(data)
                rest = b""
            except httptools.HttpParserUpgrade as upgrade:
                rest = self._head_without_upgrade() + data[upgrade.args[0] :]
                self._parser = httptools.HttpRequestParser(self)
            except httptools.HttpParserError as error:
                self._refuse(ApiError(400, f"this is not HTTP: {error}"))
                break
            self._check_sizes(data)
            data = rest
        ready, self._ready = self._ready, []
        return ready

    def refuse_late(self) -> list[Request]:
        """What has begun and has not come in time is refused."""
        self._refuse(ApiError(408, "the request did not come in time"))
        ready, self._ready = self._ready, []
        return ready

    def _check_sizes(self, data: bytes) -> None:
        limits = self._limits
        self._raw_bytes += self._num_within(data) if self._is_new else len(data)
        self._is_new = False
        if self.phase == "head" and self._raw_bytes > limits.header_bytes:
            self._refuse_head()
        elif self.phase == "body" and self._raw_bytes > (
            limits.header_bytes + _CHUNKING * limits.body_bytes
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
        request = self._request
        request.refusal = refusal
        request.keep_alive = False
        self.phase = "over"
        self._ready.append(request)

    def _refuse_head(self) -> None:
        most = self._limits.header_bytes
        self._refuse(ApiError(431, f"the request's line and headers are larger than {most} bytes"))

    def _refuse_size(self) -> None:
        what = f"the request's body is larger than {self._limits.body_bytes} bytes"
        self._refuse(ApiError(413, what, code="request_too_large"))

    # ---- called by httptools -----------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.phase == "over":
            return
        self._request = Request()
        self._url = b""
        self._has_two_hosts = False
        self._body = []
        self._body_bytes = self._raw_bytes = self._head_bytes = 0
        self.phase, self._is_new = "head", True

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self.phase == "head":
            name = name.lower()
            self._has_two_hosts |= name == b"host" and name in self._request.headers
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
        elif int(request.headers.get(b"content-length", b"0")) > self._limits.body_bytes:
            self._refuse_size()

    def on_body(self, data: bytes) -> None:
        if self.phase != "body":
            return
        self._body.append(data)
        self._body_bytes += len(data)
        if self._body_bytes > self._limits.body_bytes:
            self._refuse_size()

    def on_message_complete(self) -> None:
        if self.phase != "body":
            return
        self._request.body = b"".join(self._body)
        self._body = []
        self._ready.append(self._request)
        self.phase = "idle"
        self.wants_continue = False

    def _head_without_upgrade(self) -> bytes:
        """The head that was read last, less the wish to speak something else behind it."""
        method, version = self._parser.get_method(), self._parser.get_http_version()
        headers = self._request.headers
        wishes = headers.pop(b"connection", b"").lower()
        headers.pop(b"upgrade", None)
        if b"close" in wishes:
            headers[b"connection"] = b"close"
        lines = [b"%b %b HTTP/%b" % (method, self._url, version.encode())]
        lines += [b"%b: %b" % header for header in headers.items()]
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
        if self._has_two_hosts:  # a proxy in front may have gone by the other one
            return ApiError(400, "Host: got two of them, allowed: one")
        expected = request.headers.get(b"expect")
        if expected is not None and request.version == "1.1":
            if expected.lower() != b"100-continue":
                return ApiError(417, "this server knows no expectation but 100-continue")
            self.wants_continue = True
        return None
