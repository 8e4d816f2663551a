"""Stand-ins for a front's connection and engine, to write answers without sockets."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from tests.helpers.answer_units import AnswerUnit, entry_of
from tests.helpers.fake_worker import Entry, deltas

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.broadcast import Broadcast
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.response_encoding import EVENT_STREAM, Response
from slipstream_ipc.messages import LogprobColumns, ModelCard

STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n" % EVENT_STREAM


CARD = ModelCard("a model", "nowhere", 1000, 100, ())


class Wire:
    """A sink in place of a connection. After `room` bytes it pauses its exchange, until `read`."""

    def __init__(self) -> None:
        self.room = 1 << 30
        self.exchange: Exchange | None = None
        self.writes: list[bytes] = []
        self.is_dropped = False

    def write(self, data: bytes) -> None:
        """Take all bytes, as a transport does, and pause the exchange if `room` is exceeded."""
        self.writes.append(data)
        self.room -= len(data)
        if self.room < 0 and self.exchange is not None and not self.exchange.is_paused:
            self.exchange.pause(True)

    def read(self, num_bytes: int) -> None:
        """The client reads: there is room for `num_bytes` more, and the exchange is resumed."""
        assert self.exchange is not None
        self.room = num_bytes
        self.exchange.pause(False)

    def respond(self, response: Response) -> None:
        """Take a complete answer."""
        self.exchange = None
        self.write(b"HTTP/1.1 200 OK\r\n\r\n" + response.body)

    def begin_stream(self, content_type: bytes) -> None:
        """Write a minimal head."""
        assert self.exchange is not None
        is_chunked = self.exchange.request.version != "1.0"
        head = STREAM_HEAD.replace(EVENT_STREAM, content_type)
        self.write(head + (b"Transfer-Encoding: chunked\r\n\r\n" if is_chunked else b"\r\n"))

    def finish(self) -> None:
        """The stream is complete."""
        self.exchange = None

    def abort(self) -> None:
        """The connection is dropped."""
        self.is_dropped = True
        assert self.exchange is not None
        self.exchange.disconnect()


class Table:
    """A `StreamEngine` that is only a client's table of streams."""

    def __init__(self) -> None:
        self.streams, self.broadcast = ClientStreamTable(), Broadcast()

    def submit(self, state: StreamState) -> None:
        """Add the stream to the table."""
        self.streams.add(state)

    def abandon(self, state: StreamState) -> None:
        """Give the stream up."""
        self.streams.give_up(state, None)

    def say(self, *entries: Entry, logprobs: LogprobColumns | None = None) -> None:
        """Deliver a message of `entries`, then ring the wakeups."""
        assert self.streams.deliver(deltas(*entries, logprobs=logprobs))
        self.streams.wake()


def body_of(writes: Sequence[bytes]) -> bytes:
    """The body of an answer that a `Wire` took, without the framing of chunks."""
    head, _, body = b"".join(writes).partition(b"\r\n\r\n")
    if b"chunked" not in head:
        return body
    plain = b""
    while body and not body.startswith(b"0\r\n"):
        size, _, body = body.partition(b"\r\n")
        plain, body = plain + body[: int(size, 16)], body[int(size, 16) :]
        assert body.startswith(b"\r\n")
        body = body[2:]
    return plain


def identified_events(body: bytes) -> list[tuple[str, Any]]:
    """Server-sent events that may have ids: id ("" without one) and decoded data of each."""
    found = []
    for block in body.decode().split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        data = lines.pop("data")
        found.append((lines.pop("id", ""), data if data == "[DONE]" else json.loads(data)))
        assert not lines
    return found


class Asked:
    """A request, its table and its wire."""

    def __init__(self, plan: AnswerPlan, *, path: str = "/", version: str = "1.1") -> None:
        self.plan, self.table, self.wire = plan, Table(), Wire()
        request = HttpRequest(path=path, version=version)
        self.exchange = self.wire.exchange = Exchange(request, self.wire)  # type: ignore[arg-type]
        texts = TextsByModel(lambda _: "nowhere")
        self.texts = texts.of(plan.model)
        context = AnswerContext(self.table, texts, Limits(), self.table.broadcast)
        start_answer(plan, self.exchange, context)

    @property
    def handle(self) -> int:
        """Of the first choice's stream."""
        return self.plan.states[0].handle

    @property
    def body(self) -> bytes:
        """What has been written so far, without the head."""
        return body_of(self.wire.writes)


def say(asked: Asked, units: list[AnswerUnit], data: st.DataObject, begin: int = 0) -> None:
    """The units from `begin` on: cut into entries, several of them in a turn, with pauses."""
    unread: list[Entry] = []
    while begin < len(units) or asked.plan.states[0].end is None:
        end = data.draw(st.integers(min(begin + 1, len(units)), min(begin + 4, len(units))))
        is_last = end == len(units) and (begin == end or data.draw(st.booleans()))
        lists = data.draw(st.booleans())
        entry = entry_of(asked.handle, units, begin, end, lists_events=lists, is_last=is_last)
        unread.append(entry)
        begin = end
        if is_last or data.draw(st.booleans()):
            for each in unread:
                assert asked.table.streams.deliver(deltas(each))
            asked.table.streams.wake()
            unread.clear()
        if asked.exchange.is_open and data.draw(st.integers(0, 5)) == 0:
            asked.exchange.pause(not asked.exchange.is_paused)
    if asked.exchange.is_open and asked.exchange.is_paused:
        asked.exchange.pause(False)
