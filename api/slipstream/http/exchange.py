"""A request, and the way back for its answer, as the endpoints see them.

What reads requests and carries answers is a `Sink`: a connection of the HTTP server, or a caller in
this process. Endpoints know neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from slipstream.http.counters import GONE, HttpCounters
from slipstream.http.wire import Headers, Response


@dataclass(slots=True, eq=False)
class HttpRequest:
    """One request. Header names are in lower case, of equal ones the last counts."""

    method: str = ""
    path: str = ""
    query: str = ""
    version: str = "1.1"
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    id: str = ""  # X-Request-Id, the client's or made here
    answer_headers: Headers = ()  # of its answer, whatever that is


class Sink(Protocol):
    """Takes one answer: `respond`, or `begin_stream`, `write` as often as needed, and `finish`."""

    def respond(self, response: Response) -> None:
        """The whole answer."""

    def begin_stream(self) -> None:
        """The head of a stream of events, at once."""

    def write(self, data: bytes, /) -> None:
        """Bytes of the stream, at once."""

    def finish(self) -> None:
        """The stream is complete."""

    def abort(self) -> None:
        """The answer ends here, incomplete."""


class Exchange:
    """A request that waits for its answer: `respond`, or `begin_stream`, `write` and `finish`.

    send: a chunk of the stream, framed and counted by the caller; allowed while `is_ready`.
    on_gone: called when the client leaves before the answer is complete. on_writable: called when
    the sink takes more again. All calls but those do nothing once the client has gone.
    """

    def __init__(
        self, request: HttpRequest, sink: Sink, counters: HttpCounters | None = None
    ) -> None:
        self.request = request
        self.counters = counters or HttpCounters()
        self.is_ready = False  # a chunk may be sent by `send`
        self.send: Callable[[bytes], None]
        self.is_paused = False  # the client reads too slowly: hold back what can be held
        self.has_begun = False
        self.on_gone: Callable[[], None] | None = None
        self.on_writable: Callable[[], None] | None = None
        self._sink: Sink | None = sink
        self._is_chunked = request.version != "1.0"

    @property
    def is_open(self) -> bool:
        """Whether the client is there, and the answer is not complete."""
        return self._sink is not None

    def respond(self, response: Response) -> None:
        """The whole answer."""
        sink = self._sink
        if sink is not None:
            self.counters.answered(self.request.path, response.status)
            self._sink = None
            sink.respond(response)

    def begin_stream(self) -> None:
        """The head of a stream of events."""
        sink = self._sink
        if sink is None:
            return
        self.has_begun = True
        self.is_ready = self._is_chunked and not self.is_paused
        self.send = sink.write
        self.counters.begun(self.request.path)
        sink.begin_stream()

    def write(self, events: bytes) -> None:
        """Events of the stream that has begun."""
        sink = self._sink
        if sink is not None:
            if self._is_chunked:
                events = b"%x\r\n%b\r\n" % (len(events), events)
            sink.write(events)
            self.counters.num_chunks += 1

    def finish(self) -> None:
        """The stream is complete."""
        sink = self._sink
        if sink is not None:
            self._sink, self.is_ready = None, False
            self.counters.ended()
            sink.finish()

    def drop(self) -> None:
        """End the answer without a word."""
        if self._sink is not None:
            self._sink.abort()

    def leave(self) -> None:
        """The client has gone."""
        if self._sink is None:
            return
        self._sink, self.is_ready = None, False
        if self.has_begun:
            self.counters.ended()
        else:
            self.counters.answered(self.request.path, GONE)
        if self.on_gone is not None:
            self.on_gone()

    def pause(self, is_paused: bool) -> None:
        """The sink takes no more, or takes more again."""
        self.is_paused = is_paused
        self.is_ready = self.has_begun and self._is_chunked and not is_paused and self.is_open
        if not is_paused and self.on_writable is not None:
            self.on_writable()
