"""Parts of a front that answers are written with, without sockets."""

from __future__ import annotations

from tests.helpers.fake_worker import Entry, deltas

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.exchange import Exchange
from slipstream.http.openai.broadcast import FanOut
from slipstream.http.wire import Response
from slipstream_ipc.messages import LogprobColumns, ModelCard

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


CARD = ModelCard("a model", "nowhere", 1000, 100, ())


class Wire:
    """In a connection's place. Takes `room` bytes, then pauses its exchange until there is more."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.exchange: Exchange | None = None
        self.writes: list[bytes] = []
        self.is_dropped = False

    def write(self, data: bytes) -> None:
        """As a transport does: all of it, whatever the room."""
        self.writes.append(data)
        self.room -= len(data)
        if self.room < 0 and self.exchange is not None and not self.exchange.is_paused:
            self.exchange.pause(True)

    def read(self, num_bytes: int) -> None:
        """The client takes so much."""
        assert self.exchange is not None
        self.room = num_bytes
        self.exchange.pause(False)

    def respond(self, response: Response) -> None:
        """The whole answer."""
        self.exchange = None
        self.write(b"HTTP/1.1 200 OK\r\n\r\n" + response.body)

    def begin_stream(self) -> None:
        """A head."""
        assert self.exchange is not None
        is_chunked = self.exchange.request.version != "1.0"
        self.write(STREAM_HEAD + (b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"))

    def finish(self) -> None:
        """The answer is complete."""
        self.exchange = None

    def abort(self) -> None:
        """The client is given up."""
        self.is_dropped = True
        assert self.exchange is not None
        self.exchange.leave()


class Table:
    """An engine that is a client's table of streams."""

    def __init__(self) -> None:
        self.streams, self.fan_out = ClientStreamTable(), FanOut()

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""
        self.streams.add(state)

    def abandon(self, state: StreamState) -> None:
        """End it."""
        self.streams.give_up(state, None)

    def say(self, *entries: Entry, logprobs: LogprobColumns | None = None) -> None:
        """A message arrives."""
        assert self.streams.deliver(deltas(*entries, logprobs=logprobs))
        self.streams.wake()
