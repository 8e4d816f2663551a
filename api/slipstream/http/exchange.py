"""A request and the exchange that takes its answer, as the endpoints see them.

The answer goes to a `Sink`: a connection of the HTTP server, or a caller in this process. Endpoints
do not depend on which.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.http.api_errors import ApiError
from slipstream.http.counters import CLIENT_CLOSED, HttpCounters
from slipstream.http.response_encoding import EVENT_STREAM, Headers, Response
from slipstream.http.shares import Share

_IS_ID = re.compile(r"[!-~]{1,128}")


def client_request_id(headers: dict[bytes, bytes]) -> str | None:
    """The X-Request-Id among a request's headers; None if there is none that may be one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _IS_ID.fullmatch(given) else None


def nothing_to_free() -> None:
    """The body is not counted, or not any more."""


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. Header names are in lower case; of repeated headers the last one counts.

    tenant: None for a path that needs no key. keeps_body: set by a handler that needs the body
    after its return, and calls `free` itself. free: drops the body, whose bytes count among those
    of pending requests until then.
    """

    method: str = ""
    path: str = ""
    query: str = ""
    version: str = "1.1"
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    id: str = ""  # X-Request-Id: the client's, or generated
    answer_headers: Headers = ()  # sent with any answer to this request
    tenant: bytes | None = None
    keeps_body: bool = False
    free: Callable[[], None] = nothing_to_free

    def take_id(self, wanted: str | None) -> None:
        """Take the id that the body gives, unless the header gives one, or it cannot be one."""
        if (
            wanted is not None
            and _IS_ID.fullmatch(wanted)
            and client_request_id(self.headers) is None
        ):
            self.id = wanted


class Sink(Protocol):
    """Takes one answer: `respond`, or `begin_stream`, any number of `write`, and `finish`."""

    def respond(self, response: Response) -> None:
        """Send a complete answer."""

    def begin_stream(self, content_type: bytes, /) -> None:
        """Send the head of a stream of this type immediately."""

    def write(self, data: bytes, /) -> None:
        """Send bytes of the stream immediately."""

    def finish(self) -> None:
        """End the stream."""

    def abort(self) -> None:
        """End the answer incomplete."""


class Exchange:
    """A request and its pending answer: `respond` or `refuse`, or a stream of `write`s.

    send: writes a chunk that the caller has framed and counted; allowed while `is_ready`.
    takes_pieces: a complete answer, too, may be sent as a stream of pieces.
    on_disconnect: called when the client disconnects before the answer is complete. on_writable:
    called when backpressure ends. share: of the front's budget, given back once the answer is sent,
    as is logprob_share: of its budget of log-probabilities, or waited for.
    After a disconnect, the methods do nothing.
    """

    __slots__ = (
        "_is_chunked",
        "_is_held",
        "_sink",
        "counters",
        "has_begun",
        "is_paused",
        "is_ready",
        "logprob_share",
        "on_disconnect",
        "on_writable",
        "request",
        "send",
        "share",
        "takes_pieces",
    )

    def __init__(
        self,
        request: HttpRequest,
        sink: Sink,
        counters: HttpCounters | None = None,
        *,
        takes_pieces: bool = True,
    ) -> None:
        self.request = request
        self.takes_pieces = takes_pieces
        self.counters = counters or HttpCounters()
        self.is_ready = False  # `send` may be called
        self.send: Callable[[bytes], None]
        self.is_paused = False  # backpressure: the client reads too slowly
        self.has_begun = False
        self.on_disconnect: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self.share: Share | None = None
        self.logprob_share: Share | None = None
        self._sink: Sink | None = sink
        self._is_held = False
        self._is_chunked = request.version != "1.0"

    @property
    def is_open(self) -> bool:
        """True if the client is connected and the answer incomplete."""
        return self._sink is not None

    def give_back(self, all_but: int = 0) -> None:
        """Give the share back, all but so many bytes. Without any, the answer has left, or its
        client has.
        """
        if self.share is not None:
            self.share.shrink(all_but)
            if not all_but:
                self.share = None

    def keep_logprob_share(self, share: Share) -> None:
        """Keep a share, which may still be waited for, until the answer has left."""
        if self.is_open:
            self.logprob_share = share
        else:
            share.shrink(0)

    def release(self) -> None:
        """Give all shares back: the answer has left, or its client has."""
        self.give_back()
        if self.logprob_share is not None:
            self.logprob_share.shrink(0)
            self.logprob_share = None

    def respond(self, response: Response) -> None:
        """Send a complete answer."""
        sink = self._sink
        if sink is not None:
            self.counters.answered(self.request.path, response.status)
            self._sink = None
            sink.respond(response)

    def refuse(self, error: ApiError) -> None:
        """Send an error as the complete answer."""
        self.respond(error.response(self.request.path, self.request.id))

    def begin_stream(self, content_type: bytes = EVENT_STREAM) -> None:
        """Send the head of a stream, of events unless `content_type` says otherwise."""
        sink = self._sink
        if sink is None:
            return
        self.has_begun = True
        self.send = sink.write
        self._set_ready()
        self.counters.begun(self.request.path)
        sink.begin_stream(content_type)

    def write(self, events: bytes) -> None:
        """Send events, if any; the stream has begun."""
        sink = self._sink
        if sink is not None and events:  # an empty chunk would be the last
            if self._is_chunked:
                events = b"%x\r\n%b\r\n" % (len(events), events)
            sink.write(events)
            self.counters.num_chunks += 1

    def finish(self) -> None:
        """End the stream."""
        sink = self._sink
        if sink is not None:
            self._sink, self.is_ready = None, False
            self.counters.ended()
            sink.finish()

    def drop(self) -> None:
        """Abort the answer, incomplete."""
        if self._sink is not None:
            self._sink.abort()

    def disconnect(self) -> None:
        """The client has disconnected."""
        if self._sink is None:
            return
        self._sink, self.is_ready = None, False
        if self.has_begun:
            self.counters.ended()
        else:
            self.counters.answered(self.request.path, CLIENT_CLOSED)
        self.request.free()
        self.release()
        if self.on_disconnect is not None:
            self.on_disconnect()

    def pause(self, is_paused: bool) -> None:
        """Backpressure of the sink begins or ends."""
        self.is_paused = is_paused
        self._set_ready()
        if not is_paused and self.on_writable is not None:
            self.on_writable()

    def hold(self, is_held: bool) -> None:
        """Chunks are written by `write` alone while something is written in pieces."""
        self._is_held = is_held
        self._set_ready()

    def _set_ready(self) -> None:
        may_send = self.has_begun and self.is_open and self._is_chunked
        self.is_ready = may_send and not (self.is_paused or self._is_held)


Handler = Callable[[HttpRequest, Exchange], None]  # answers the exchange, now or later
