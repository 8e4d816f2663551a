"""Answers with log-probabilities are written in pieces: in order, as their clients read, and for
nobody else's loss.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.fake_worker import Entry
from tests.helpers.http_answer import CARD, Table, Wire, body_of
from tests.helpers.patience import Patience

from slipstream import delta_batch
from slipstream.http import time_slice
from slipstream.http.answers import live_answer, streaming
from slipstream.http.answers.answer_plan import AnswerPlan
from slipstream.http.answers.event_ids import AnswerId, EventId, EventIdWriter, StreamCursor
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.endpoints.resume import plan_resumed_stream
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.held_logprobs import HeldLogprobs
from slipstream.http.logprobs.vocabulary import TextsByModel, TokenText, TokenTexts
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.responses.response_plan import new_response
from slipstream.http.responses.responses_request import read_response_request
from slipstream.http.shares import Shares
from slipstream.http.time_slice import TimeSlicedQueue
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import Accepted, End, EventKind, LogprobColumns

K = 2


def response_plan(*, is_stream: bool) -> AnswerPlan:
    given = {"input": "x", "top_logprobs": K, "max_output_tokens": 500, "store": False}
    body = json.dumps({**given, "stream": is_stream}).encode()
    return new_response(read_response_request(body), CARD)[0]


def chat_plan(*, is_stream: bool = False) -> AnswerPlan:
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": K}
    return plan_chat(read_chat(json.dumps({**chat, "stream": is_stream}).encode()), CARD)


def held_plan(num_bytes: int) -> AnswerPlan:
    """A plan whose answer may gather columns of so many bytes."""
    return replace(chat_plan(), most_tokens=num_bytes // (8 * (K + 1)))


class Asked:
    """A request whose stream says tokens 0, 1, 2, … as a test tells it to."""

    def __init__(
        self,
        plan: AnswerPlan,
        slices: TimeSlicedQueue | None = None,
        *,
        tenant: bytes = b"",
        takes_pieces: bool = True,
        version: str = "1.1",
        room: Shares | None = None,
    ) -> None:
        self.plan, self.table, self.wire = plan, Table(), Wire()
        request, wire = HttpRequest(tenant=tenant, version=version), self.wire
        self.exchange = Exchange(request, wire, takes_pieces=takes_pieces)
        wire.exchange = self.exchange
        self.slices = slices or TimeSlicedQueue()
        where = (TextsByModel(lambda _: "nowhere"), Limits(), self.table.broadcast, self.slices)
        context = AnswerContext(self.table, *where, logprob_shares=room or Shares.of_logprobs())
        start_answer(plan, self.exchange, context)
        [self._state] = plan.states
        self._num_tokens = 0

    @property
    def is_asked(self) -> bool:
        """Whether the stream has been submitted."""
        return self._state.handle >= 0

    def say(self, kind: int, num: int, reason: str | None = None) -> None:
        """So many tokens, each a character of this kind; with a reason, the last ones."""
        begin = self._num_tokens
        if not begin:
            self.table.streams.accept(Accepted(self._state.handle, pack_u32([1])))
        self._num_tokens += num
        ids = range(begin, self._num_tokens)
        text = "".join(chr(0x100 + token_id) for token_id in ids)
        end = End(reason, self._num_tokens) if reason else None  # type: ignore[arg-type]
        entry = Entry(self._state.handle, text, begin, begin, ids, end, kind)
        candidates = [each for token_id in ids for each in (token_id, *range(500, 500 + K))]
        values = pack_f32([-1.0] * len(candidates))
        columns = LogprobColumns(K + 1, values, pack_u32(candidates), pack_u32([K + 1] * num))
        self.table.say(entry, logprobs=columns)

    async def end(self) -> None:
        """Let the loop turn until the exchange is closed."""
        patience = Patience()
        while self.exchange.is_open:
            patience.check()
            await asyncio.sleep(0)

    @property
    def body(self) -> bytes:
        return body_of(self.wire.writes)


def tokens_of(logprobs: list[Any]) -> list[int]:
    return [int(each["token"].removeprefix("token_id:")) for each in logprobs]


STEPS = st.lists(
    st.tuples(
        st.sampled_from([EventKind.CONTENT, EventKind.REASONING]),
        st.integers(1, 4),
        st.sampled_from(["", "turn", "turns", "rest", "read"]),
    ),
    min_size=1,
    max_size=12,
)


@given(steps=STEPS, has_ids=st.booleans())
def test_nothing_overtakes_what_is_written_in_pieces(steps: Any, has_ids: bool) -> None:
    """A delta that comes meanwhile is behind it, whether the client reads or not."""
    expected: list[tuple[int, list[int]]] = []
    at = 0
    for kind, num, _ in steps:
        if not expected or expected[-1][0] != kind:
            expected.append((kind, []))
        expected[-1][1].extend(range(at, at + num))
        at += num

    async def main() -> bytes:
        plan = replace(response_plan(is_stream=True), is_resumable=has_ids)
        asked = Asked(plan)
        for number, (kind, num, then) in enumerate(steps):
            asked.say(kind, num, "stop" if number == len(steps) - 1 else None)
            match then:
                case "turn":
                    await asyncio.sleep(0)
                case "turns":
                    while asked.slices.is_busy:  # noqa: ASYNC110  (it has the loop turn)
                        await asyncio.sleep(0)
                case "rest":
                    asked.wire.room = 0
                case "read" if asked.exchange.is_open:
                    asked.wire.read(1 << 30)
        if asked.exchange.is_open:
            asked.wire.read(1 << 30)
        await asked.end()
        return asked.body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_batch, "_PART", 1)
        patch.setattr(time_slice, "SLICE_S", 0.0)
        events = [
            json.loads(line[6:])
            for line in asyncio.run(main()).decode().split("\n")
            if line.startswith("data: ")
        ]
    numbers = [event["sequence_number"] for event in events]
    assert numbers == sorted(numbers)
    texts = [""] * len(expected)
    for event in events:
        if event["type"].endswith("text.delta"):
            texts[event["output_index"]] += event["delta"]
    assert texts == ["".join(chr(0x100 + each) for each in ids) for _, ids in expected]
    contents = [ids for kind, ids in expected if kind == EventKind.CONTENT]
    done = [event for event in events if event["type"] == "response.output_text.done"]
    assert [tokens_of(event["logprobs"]) for event in done] == contents
    items = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert items == events[-1]["response"]["output"]
    shown = [item["content"][0]["logprobs"] for item in items if item["type"] == "message"]
    assert [tokens_of(each) for each in shown] == contents


@pytest.mark.parametrize("make", [chat_plan, lambda: response_plan(is_stream=True)])
def test_for_who_does_not_read_nothing_is_made_and_others_go_on(
    make: Callable[[], AnswerPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that waits, with most of its answer, holds columns and no one up."""
    monkeypatch.setattr(delta_batch, "_PART", 1)
    monkeypatch.setattr(live_answer, "_WHOLE_BYTES", 0)
    most_bytes = 1000  # of a piece

    async def main() -> None:
        slices = TimeSlicedQueue()
        waits, reads = Asked(make(), slices), Asked(make(), slices)
        for each in (waits, reads):
            each.wire.room = 1 << 30 if each is reads else 3000
            for number in range(50):
                each.say(EventKind.CONTENT, 2, "stop" if number == 49 else None)
        await reads.end()
        assert not slices.is_busy
        assert waits.exchange.is_open
        assert -most_bytes < waits.wire.room < 0
        num_before = len(waits.wire.writes)
        waits.wire.read(100)
        while slices.is_busy:  # noqa: ASYNC110  (it has the loop turn)
            await asyncio.sleep(0)
        assert len(waits.wire.writes) > num_before
        assert waits.exchange.is_open
        waits.wire.read(1 << 30)
        await waits.end()
        last = [each.body.rpartition(b"data: ")[2] for each in (waits, reads)]
        assert len(last[0]) == len(last[1])

    asyncio.run(main())


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("make", [chat_plan, lambda: response_plan(is_stream=False)])
def test_a_large_answer_is_sent_as_it_is_made(
    make: Callable[[], AnswerPlan], version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_batch, "_PART", 1)

    async def written(most_bytes: int, **given: Any) -> list[bytes]:
        monkeypatch.setattr(live_answer, "_WHOLE_BYTES", most_bytes)
        asked = Asked(make(), version=version, **given)
        asked.say(EventKind.CONTENT, 40)
        asked.say(EventKind.CONTENT, 40, "length")
        await asked.end()
        return asked.wire.writes

    [whole] = asyncio.run(written(1 << 30))
    [same] = asyncio.run(written(4000, takes_pieces=False))
    pieces = asyncio.run(written(4000))
    assert len(pieces) > 60
    assert max(map(len, pieces)) < 5000
    assert b"Content-Type: application/json" in pieces[0]
    expected = json.loads(body_of([whole]))
    for found in (json.loads(body_of([same])), json.loads(body_of(pieces))):
        assert found.keys() == expected.keys()
        for name in ("choices", "usage", "status"):
            assert found.get(name) == expected.get(name)
        assert len(json.dumps(found)) == len(json.dumps(expected))


@pytest.mark.parametrize("make", [chat_plan, lambda: response_plan(is_stream=False)])
def test_what_waits_for_the_end_keeps_no_message_alive(make: Callable[[], AnswerPlan]) -> None:
    """A message has the log-probabilities of all streams, and one of these may go on for long."""

    async def main() -> None:
        asked = Asked(make())
        for number in range(5):
            assert [each.logprobs for each in asked.plan.states[0].deltas] == [None] * number
            asked.say(EventKind.CONTENT, 3, "stop" if number == 4 else None)
        await asked.end()
        body = json.loads(asked.body)
        shown = body["choices"][0]["logprobs"] if "choices" in body else body["output"][0]
        found = shown["content"] if "choices" in body else shown["content"][0]["logprobs"]
        assert tokens_of(found) == list(range(15))

    asyncio.run(main())


def test_an_answer_that_fails_while_it_is_sent_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has been sent of it is no answer, and nothing may make it look like one."""
    monkeypatch.setattr(delta_batch, "_PART", 1)
    monkeypatch.setattr(live_answer, "_WHOLE_BYTES", 1000)

    async def main() -> None:
        asked = Asked(chat_plan())
        made = live_answer.LiveAnswer.respond_in_pieces

        def broken(live: Any, pieces: Any) -> Any:
            def some() -> Any:
                for number, piece in enumerate(pieces):
                    if number > 20:
                        raise ValueError("broken")
                    yield piece

            return made(live, some())

        monkeypatch.setattr(live_answer.LiveAnswer, "respond_in_pieces", broken)
        asked.say(EventKind.CONTENT, 40, "stop")
        await asked.end()
        assert asked.wire.is_dropped
        assert not asked.slices.is_busy

    asyncio.run(main())


def test_an_event_that_fails_while_it_is_written_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's event within it would be read as a part of it."""
    monkeypatch.setattr(delta_batch, "_PART", 1)
    monkeypatch.setattr(streaming, "_MOST_AT_ONCE", 0)
    text_of = TokenTexts.of

    def of(self: TokenTexts, token_id: int) -> TokenText:
        if token_id == 6:
            raise ValueError("not even a name")
        return text_of(self, token_id)

    monkeypatch.setattr(TokenTexts, "of", of)

    async def main() -> None:
        asked = Asked(chat_plan(is_stream=True))
        asked.say(EventKind.CONTENT, 1)
        asked.wire.room = 0
        asked.exchange.pause(True)
        for _ in range(2):  # late, so that they become one event
            asked.say(EventKind.CONTENT, 4)
        asked.wire.read(1 << 30)
        await asked.end()
        assert not asked.slices.is_busy
        assert asked.wire.is_dropped
        assert b"token_id:5" in asked.body.rpartition(b"\n\n")[2]
        assert b"error" not in asked.body

    asyncio.run(main())


def test_a_client_that_leaves_while_it_is_written_costs_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delta_batch, "_PART", 1)
    monkeypatch.setattr(time_slice, "SLICE_S", 0.0)

    async def main() -> None:
        asked = Asked(response_plan(is_stream=True))
        asked.say(EventKind.CONTENT, 40, "stop")
        for _ in range(5):
            await asyncio.sleep(0)
        assert asked.slices.is_busy
        asked.exchange.disconnect()
        num = len(asked.wire.writes)
        await asyncio.sleep(0)
        assert not asked.slices.is_busy
        assert len(asked.wire.writes) == num

    asyncio.run(main())


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize(
    "make",
    [chat_plan, lambda: response_plan(is_stream=False), lambda: response_plan(is_stream=True)],
)
def test_nothing_is_held_of_an_answer_that_is_over(
    make: Callable[[], AnswerPlan], leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor until the garbage collector comes, and also where a client has left that did not read."""
    monkeypatch.setattr(delta_batch, "_PART", 1)
    monkeypatch.setattr(live_answer, "_WHOLE_BYTES", 0)

    def num_held() -> int:
        found = (each for each in gc.get_objects() if type(each) is HeldLogprobs)
        return sum([each.num_tokens for each in found])

    async def main() -> None:
        asked = Asked(make())
        asked.say(EventKind.CONTENT, 20)
        assert num_held() == 20
        asked.wire.room = 3000 if leaves else 1 << 30
        asked.say(EventKind.CONTENT, 20, "stop")
        if leaves:
            while asked.slices.is_busy:  # noqa: ASYNC110  (it has the loop turn)
                await asyncio.sleep(0)
            assert num_held() == 40
            asked.exchange.disconnect()
        else:
            await asked.end()
            await asyncio.sleep(0)
        assert num_held() == 0

    gc.collect()
    gc.disable()
    try:
        asyncio.run(main())
    finally:
        gc.enable()


def test_answers_that_gather_much_wait_for_room_of_their_tenant() -> None:
    """A hundred at once would gather hundreds of MiB; what is small waits for nobody."""

    async def main() -> None:
        room = Shares(1_000_000, num_tenants=2)
        many = [Asked(held_plan(240_000), tenant=b"a", room=room) for _ in range(9)]
        assert [each.is_asked for each in many] == [True] * 2 + [False] * 7
        others = [Asked(held_plan(240_000), tenant=b"b", room=room) for _ in range(3)]
        assert [each.is_asked for each in others] == [True] * 2 + [False]
        assert Asked(held_plan(100), tenant=b"a", room=room).is_asked
        assert Asked(chat_plan(is_stream=True), tenant=b"a", room=room).is_asked
        many[2].exchange.disconnect()  # it waits
        for number, free in enumerate((3, 4, 5, 6, 7, 8, None, None)):
            done = many[number + (number > 1)]
            done.say(EventKind.CONTENT, 1, "stop")
            await done.end()
            done.exchange.release()  # as its connection does once the answer has been sent
            assert free is None or many[free].is_asked
        assert not many[2].is_asked
        assert room.num_bytes == 2 * 240_000  # of the other tenant
        for each in others:
            each.exchange.disconnect()
        assert room.num_bytes == 0

    asyncio.run(main())


def test_room_is_asked_for_as_much_as_an_answer_may_gather() -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": K}

    def num_held(**given: Any) -> int:
        return plan_chat(read_chat(json.dumps({**chat, **given}).encode()), CARD).num_held

    assert num_held(max_tokens=50, n=2) == 2 * 50 * (K + 1)
    assert num_held(max_tokens=50, stream=True) == 0
    assert num_held(logprobs=False, top_logprobs=0) == 0
    assert num_held(max_tokens=50, prompt_logprobs=1) > 50 * (K + 1)
    assert num_held() <= CARD.max_model_len * (K + 1)
    assert response_plan(is_stream=True).num_held == CARD.max_model_len * (K + 1)


@pytest.mark.parametrize(("kind", "num"), [("resp", CARD.max_model_len * (K + 1)), ("chatcmpl", 0)])
def test_who_comes_back_asks_for_room_again(kind: str, num: int) -> None:
    """It gave its room back as it left, and a response is read from its beginning."""
    answer = AnswerId(kind, bytes(16))
    known = EventId(answer, 0, K, False, False, (StreamCursor(),))
    writer = EventIdWriter(known)
    line = (writer.advance_to(0, 0, 0) if kind == "resp" else writer.line()).decode()
    headers = {b"last-event-id": line.removeprefix("id: ").strip().encode()}
    request = HttpRequest("GET", f"/v1/streams/{answer}", headers=headers)
    assert plan_resumed_stream(request, CARD).num_held == num
