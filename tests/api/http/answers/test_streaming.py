"""Answers without a connection: what is begun for whom, and what a slow reader costs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tests.helpers.fake_worker import Entry, end_of
from tests.helpers.http_answer import CARD, Asked, Table, Wire, identified_events
from tests.helpers.http_front import events_of
from tests.helpers.patience import Patience

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.answers import streaming
from slipstream.http.answers.event_ids import (
    AnswerId,
    EventId,
    EventIdWriter,
    StreamCursor,
)
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.endpoints.resume import plan_resumed_stream
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.history.token_log import history_checksum
from slipstream_ipc.messages import Accepted, LogprobColumns, Superseded, UnknownStreams

CHAT_OF_TWO = AnswerId("chatcmpl", b"1" * 16, 1, 2)


class Engine:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.submitted: list[StreamState] = []

    def submit(self, state: StreamState) -> None:
        self.submitted.append(state)

    def abandon(self, state: StreamState) -> None:
        self.submitted.remove(state)


@pytest.mark.parametrize("is_stream", [b"true", b"false"])
def test_nothing_runs_for_who_left_before_it_could_begin(is_stream: bytes) -> None:
    """A request for log-probabilities waits for the vocabulary; its client may not."""
    body = b'{"prompt": "x", "logprobs": 1, "stream": %b}' % is_stream
    plan = plan_completion(read_completion(body), CARD)
    connection: Any = SimpleNamespace()
    exchange, engine = Exchange(HttpRequest(), connection), Engine()
    exchange.disconnect()
    limits = Limits(held_bytes=1000)
    start_answer(plan, exchange, AnswerContext(engine, TextsByModel(lambda _: "nowhere"), limits))
    assert engine.submitted == []


def test_choices_that_another_front_goes_on_with_are_not_ended_by_this_one() -> None:
    """Its client comes for one after the other, and the first was taken over already."""
    body = b'{"prompt": "x", "n": 40, "stream": true}'
    plan = replace(plan_completion(read_completion(body), CARD), is_resumable=True)
    wire, engine, table = Wire(), Engine(), ClientStreamTable()

    async def main() -> None:
        exchange = Exchange(HttpRequest(), wire)
        start_answer(
            plan, exchange, AnswerContext(engine, TextsByModel(lambda _: "nowhere"), Limits())
        )
        for state in plan.states:
            table.add(state)
        table.supersede(Superseded(plan.states[0].handle))
        table.wake()
        assert not exchange.is_open
        assert engine.submitted == plan.states

    asyncio.run(main())


def streamed(
    table: Table, wire: Wire, held_bytes: int, num_logprobs: int | None = None
) -> StreamState:
    """A streamed answer that has been begun."""
    asks = b'"logprobs": %d,' % num_logprobs if num_logprobs is not None else b""
    body = b'{"prompt": "x", %s "stream": true}' % asks
    plan = plan_completion(read_completion(body), CARD)
    request = HttpRequest()
    request.version = "1.0"  # without chunks around the events
    wire.exchange = Exchange(request, wire)  # type: ignore[arg-type]
    limits = Limits(held_bytes=held_bytes)
    context = AnswerContext(table, TextsByModel(lambda _: "nowhere"), limits, table.broadcast)
    start_answer(plan, wire.exchange, context)
    return plan.states[0]


def text_of(writes: list[bytes]) -> str:
    body = b"".join(writes).partition(b"\r\n\r\n")[2]
    return "".join(event["choices"][0]["text"] for event in events_of(body) if event != "[DONE]")


def test_a_slow_reader_is_told_in_portions_and_what_it_holds_is_merged() -> None:
    table, wire, quick = Table(), Wire(), Wire()
    slow = streamed(table, wire, held_bytes=1 << 20)
    other = streamed(table, quick, held_bytes=1 << 20)
    piece = "0123456789abcdef" * 8
    wire.room = 0
    for at in range(3000):
        table.say(
            Entry(slow.handle, piece, at * len(piece), at, ids=[at]),
            Entry(other.handle, "y", at, ids=[at]),
        )
    assert len(text_of(quick.writes)) == 3000  # nobody waits for the slow one
    assert len(quick.writes) == 3001
    assert len(wire.writes) == 2  # the head, and what filled it
    assert len(slow.deltas) < 400
    told = len(wire.writes)
    while slow.deltas:
        wire.read(1)
        [write] = wire.writes[told:]
        told += 1
        # a portion and, at most, one merged delta more
        assert len(write) < 2**16 + 2000 * len(piece)
    end = end_of("x" * 3000)
    table.say(Entry(slow.handle, "", 3000 * len(piece), 3000, ids=[], end=end))
    assert wire.writes[-1] != b"data: [DONE]\n\n"  # there is no room for it yet
    wire.read(1 << 30)
    assert text_of(wire.writes) == piece * 3000
    assert wire.writes[-1] == b"data: [DONE]\n\n"
    assert not wire.is_dropped


def test_log_probabilities_of_a_slow_reader_are_all_told() -> None:
    table, wire = Table(), Wire()
    state = streamed(table, wire, held_bytes=1 << 20, num_logprobs=1)
    wire.room = 0
    num = 1000
    for at in range(num):
        columns = LogprobColumns(2, pack_f32([-at, -0.5]), pack_u32([at, 5000]), pack_u32([2]))
        table.say(Entry(state.handle, "x", at, ids=[at]), logprobs=columns)
    end = end_of("x" * num, "length")
    table.say(Entry(state.handle, "", num, num, ids=[], end=end))
    assert len(wire.writes) == 2
    while not wire.is_dropped and wire.exchange is not None:
        wire.read(1)
    events = events_of(b"".join(wire.writes).partition(b"\r\n\r\n")[2])
    values = [v for e in events[:-1] for v in e["choices"][0]["logprobs"]["token_logprobs"]]
    assert values == [float(-at) for at in range(num)]
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert len(events) < 20


@pytest.mark.parametrize(("num_logprobs", "most"), [(None, 10_000), (4, 153)])
def test_who_holds_too_much_is_dropped(num_logprobs: int | None, most: int) -> None:
    """Log-probabilities count as what they become on their way out."""
    table, wire = Table(), Wire()
    state = streamed(table, wire, held_bytes=50_000, num_logprobs=num_logprobs)
    wire.room = 0
    num_said = 0
    while not wire.is_dropped:
        columns = None
        if num_logprobs is not None:
            columns = LogprobColumns(5, pack_f32([0] * 5), pack_u32(range(5)), pack_u32([1]))
        table.say(Entry(state.handle, "x", num_said, ids=[1]), logprobs=columns)
        num_said += 1
        assert num_said <= most + 2  # the first is told, and the last is too much
    assert num_said == most + 2
    assert state.is_over


def resumed(
    *cursors: StreamCursor, answer: AnswerId = CHAT_OF_TWO, num_logprobs: int | None = None
) -> Asked:
    """An answer, a chat of two choices, that its client goes on with at another front."""
    last = EventIdWriter(EventId(answer, 5, num_logprobs, True, False, cursors, False, 123)).line()
    headers = {b"accept": b"text/event-stream", b"last-event-id": last[len(b"id: ") :].strip()}
    plan = plan_resumed_stream(HttpRequest("GET", f"/v1/streams/{answer}", headers=headers), CARD)
    asked = Asked(plan)
    for state in plan.states:
        state.was_sent = True
    return asked


def test_a_choice_whose_end_the_client_has_may_be_forgotten() -> None:
    """The others go on, and the prompt is counted by one of them."""
    checksum = history_checksum(pack_u32([7, 8]), 0)
    asked = resumed(StreamCursor(4, 4, 77, has_ended=True), StreamCursor(2, 2, checksum))
    gone, other = asked.plan.states
    asked.table.streams.lose(UnknownStreams((gone.handle,)))
    asked.table.streams.accept(Accepted(other.handle, pack_u32([1, 2, 3])))
    asked.table.streams.wake()
    end = end_of("abcd")
    asked.table.say(Entry(other.handle, "cd", 2, ids=[9, 10], end=end))
    *chunks, usage, done = [data for _, data in identified_events(asked.body)]
    assert done == "[DONE]"
    assert usage["usage"]["prompt_tokens"] == 3
    assert usage["usage"]["completion_tokens"] == 8
    assert [choice["index"] for chunk in chunks for choice in chunk["choices"]] == [1]
    assert [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]] == ["stop"]


def test_usage_of_a_prompt_that_is_forgotten_is_not_made_up() -> None:
    asked = resumed(StreamCursor(4, 4, 77, has_ended=True), StreamCursor(2, 2, 9, has_ended=True))
    handles = tuple([state.handle for state in asked.plan.states])
    asked.table.streams.lose(UnknownStreams(handles))
    asked.table.streams.wake()
    assert json.loads(asked.body)["error"]["code"] == "unknown_stream"


def test_an_error_is_behind_what_is_written_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_MOST_AT_ONCE", 0)

    async def main() -> Asked:
        cursors = StreamCursor(4, 4, 77, has_ended=True), StreamCursor()
        answer = AnswerId("cmpl", b"1" * 16, 2, 1)
        asked = resumed(*cursors, answer=answer, num_logprobs=0)
        gone, other = asked.plan.states
        asked.table.streams.lose(UnknownStreams((gone.handle,)))
        asked.table.streams.accept(Accepted(other.handle, pack_u32([1, 2, 3])))
        asked.table.streams.wake()
        entry = Entry(other.handle, "cd", ids=[9, 10], end=end_of("cd"))
        columns = LogprobColumns(1, pack_f32([-1, -1]), pack_u32([9, 10]), pack_u32([1, 1]))
        asked.table.say(entry, logprobs=columns)
        patience = Patience()
        while asked.exchange.is_open:
            patience.check()
            await asyncio.sleep(0)
        return asked

    *chunks, failed = [data for _, data in identified_events(asyncio.run(main()).body)]
    [choice] = [each for chunk in chunks for each in chunk["choices"]]
    assert (choice["text"], choice["finish_reason"]) == ("cd", "stop")
    assert choice["logprobs"]["token_logprobs"] == [-1, -1]
    assert failed["error"]["code"] == "unknown_stream"


def test_choices_beside_one_that_cannot_be_resumed_go_on_for_who_comes_again() -> None:
    async def main() -> None:
        asked = resumed(StreamCursor(4, 4, 77), StreamCursor(2, 2, 99))
        lost, other = asked.plan.states
        asked.table.streams.lose(UnknownStreams((lost.handle,)))
        asked.table.streams.accept(Accepted(other.handle, pack_u32([1, 2, 3])))
        asked.table.streams.wake()
        assert not asked.exchange.is_open
        assert not other.is_over

    asyncio.run(main())
