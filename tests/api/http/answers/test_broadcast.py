"""Messages told to many streams at once say what each of them would be told alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.helpers.fake_worker import Entry, deltas, end_of
from tests.helpers.http_answer import CARD, Wire, body_of

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.http.answers.broadcast import Broadcast
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import start_answer
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel
from slipstream.http.native.generate import plan_generation, read_generate
from slipstream.http.planning.chat import plan_chat, read_chat
from slipstream.http.planning.completions import plan_completion, read_completion
from slipstream_ipc.messages import AnswerEvent, End, EventKind

NUM = 4  # streams
PIECES = ["", "a", "\x7f", 'say "', "\u2028\x85", "é€", ",", "\\"]
LOOK = {"type": "function", "function": {"name": "look"}}
KINDS = ["completion", "chat", "resumable", "generate", "whole", "1.0"]


class Front:
    """Streams over one table. Together, or each by itself: then it is in nobody's company."""

    def __init__(self, kinds: list[str], *, together: bool) -> None:
        self.table, shared = ClientStreamTable(), Broadcast()
        self.wires: list[Wire] = []
        self.states: list[StreamState] = []
        for kind in kinds:
            broadcast = shared if together else Broadcast()
            wire, request = Wire(), HttpRequest()
            request.version = "1.0" if kind == "1.0" else "1.1"
            wire.exchange = Exchange(request, wire)  # type: ignore[arg-type]
            plan = replace(asked(kind), is_resumable=kind == "resumable")
            texts = TextsByModel(lambda _: "nowhere")
            start_answer(plan, wire.exchange, AnswerContext(self, texts, Limits(), broadcast))
            self.wires.append(wire)
            self.states += plan.states

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""
        self.table.add(state)

    def abandon(self, state: StreamState) -> None:
        """End it."""
        self.table.give_up(state, None)

    def received(self, index: int) -> tuple[str, list[str]]:
        """A stream's text, and how it went on behind its last text."""
        return body_text(self.wires[index].writes)


def asked(kind: str) -> Any:
    if kind == "chat":
        body = b'{"messages": [{"role": "user", "content": "x"}], "stream": true}'
        return plan_chat(read_chat(body), CARD)
    if kind == "tools":
        body = {"messages": [{"role": "user", "content": "x"}], "tools": [LOOK], "stream": True}
        return plan_chat(read_chat(msgspec.json.encode(body)), CARD)
    if kind == "generate":
        return plan_generation(*read_generate(b'{"text": "x", "stream": true}'), CARD)
    stream = b"false" if kind == "whole" else b"true"
    return plan_completion(read_completion(b'{"prompt": "x", "stream": %b}' % stream), CARD)


def body_text(writes: list[bytes]) -> tuple[str, list[str]]:
    """The text of all events, and those of the last event's fields that say how it ended."""
    if not writes:
        return "", []
    body = body_of(writes)
    if b"text/event-stream" not in b"".join(writes).partition(b"\r\n\r\n")[0]:
        (choice,) = msgspec.json.decode(body)["choices"]
        return choice["text"], [choice["finish_reason"]]
    text, ends = "", []
    for event in body.decode().split("\n\n")[:-1]:
        *marks, line = event.split("\n")
        content = line.removeprefix("data: ")
        if content == "[DONE]":
            ends.append(content)
            continue
        (choice,) = msgspec.json.decode(content)["choices"]
        received = choice.get("text", choice.get("delta", {}).get("content"))
        text += received or ""
        if choice["finish_reason"] is not None:
            ends += [choice["finish_reason"], *(mark.rpartition("/")[2] for mark in marks)]
    return text, ends


Told = tuple[int, int, bool]  # which stream, which piece, whether it ends with it


@st.composite
def turns(draw: st.DrawFn) -> list[list[list[Told]]]:
    """Turns of messages of entries; a stream is in a message once."""
    entry = st.tuples(
        st.integers(0, NUM - 1),
        st.integers(0, len(PIECES) - 1),
        st.integers(0, 9).map(lambda n: not n),
    )
    message = st.lists(entry, min_size=1, max_size=NUM, unique_by=lambda told: told[0])
    return draw(st.lists(st.lists(message, min_size=1, max_size=3), max_size=8))


@given(
    turns(),
    st.lists(st.sampled_from(KINDS), min_size=NUM, max_size=NUM)
    | st.sampled_from(KINDS).map(lambda kind: [kind] * NUM),
    st.lists(st.tuples(st.integers(0, NUM - 1), st.booleans()), max_size=8),
    st.booleans(),
    st.booleans(),
)
def test_all_at_once_says_what_each_alone_says(
    turns: list[list[list[Told]]],
    kinds: list[str],
    pauses: list[tuple[int, bool]],
    repeats: bool,
    fails: bool,
) -> None:
    """Whatever is read in one turn, who has no room, and what is repeated."""
    fronts = [Front(kinds, together=True), Front(kinds, together=False)]
    texts, nums, over = [""] * NUM, [0] * NUM, [False] * NUM
    for at, turn in enumerate(turns):
        for number, message in enumerate(turn):
            told = [each for each in message if not over[each[0]]]
            if not told:
                continue
            entries = []
            for which, piece, ends in told:
                text, chars, tokens = PIECES[piece], len(texts[which]), nums[which]
                if repeats and number and chars:
                    text, chars, tokens = texts[which][-1] + text, chars - 1, tokens
                texts[which] += PIECES[piece]
                nums[which] += 1
                over[which] = ends
                reason = "error" if fails and ends else "stop"
                end = End(reason, nums[which]) if ends else None
                entries.append((which, text, chars, tokens, end))
            for front in fronts:
                front.table.deliver(
                    deltas(
                        *(
                            Entry(front.states[which].handle, text, chars, tokens, [7], end)
                            for which, text, chars, tokens, end in entries
                        )
                    )
                )
        for front in fronts:
            front.table.wake()
            if at < len(pauses):
                which, is_paused = pauses[at]
                exchange = front.wires[which].exchange
                if exchange is not None and exchange.is_paused != is_paused:
                    exchange.pause(is_paused)
    for front in fronts:
        for wire in front.wires:
            if wire.exchange is not None and wire.exchange.is_paused:
                wire.exchange.pause(False)
        front.table.wake()
    for which, kind in enumerate(kinds):
        if fails and over[which]:
            assert fronts[0].wires[which].writes[-1:] == fronts[1].wires[which].writes[-1:]
            continue
        received = fronts[0].received(which)
        assert received == fronts[1].received(which)
        if kind != "whole" or over[which]:
            assert received[0] == texts[which]
        assert bool(received[1]) == over[which]
    assert fronts[0].table.streams == [
        state for state, is_over in zip(fronts[0].states, over, strict=True) if not is_over
    ]


def test_a_message_alone_in_its_turn_is_written_once_to_each() -> None:
    front = Front(["completion", "chat", "resumable"], together=True)
    for tokens in range(3):
        told = [Entry(state.handle, "x", tokens, tokens, [7]) for state in front.states]
        assert front.table.deliver(deltas(*told))
        front.table.wake()
    assert [len(wire.writes) for wire in front.wires] == [4, 5, 4]  # with head, and chat's role
    assert all(not state.deltas for state in front.states)


def test_a_stream_with_events_changes_nothing_for_the_others() -> None:
    kinds = ["completion", "chat", "resumable", "generate", "tools"]
    front = Front(kinds, together=True)
    *others, read = front.states
    events = (AnswerEvent(EventKind.CONTENT, "y"),)
    for tokens, (kind, own) in enumerate([(0, events), (EventKind.CONTENT, None)] * 2):
        told = [Entry(state.handle, "x", tokens, tokens, [7]) for state in others]
        told.insert(tokens, Entry(read.handle, "y", tokens, tokens, [7], None, kind, own))
        assert front.table.deliver(deltas(*told))
        front.table.wake()
    assert [len(wire.writes) for wire in front.wires] == [5, 6, 5, 5, 6]
    received = [front.received(which)[0] for which in range(5)]
    assert received == ["xxxx", "xxxx", "xxxx", "xxxx", "yyyy"]
    assert all(not state.deltas for state in front.states)
    broadcast = front.states[0].group
    assert isinstance(broadcast, Broadcast)
    assert all(stream.frames.keys() == {0} for stream in broadcast._found if stream.state != read)


def test_messages_of_one_turn_leave_in_one_chunk() -> None:
    front = Front(["completion", "chat"], together=True)
    for tokens in range(4):
        told = [Entry(state.handle, "x", tokens, tokens, [7]) for state in front.states]
        assert front.table.deliver(deltas(*told))
        if tokens in (0, 3):
            front.table.wake()
    assert [len(wire.writes) for wire in front.wires] == [3, 4]
    assert [front.received(which)[0] for which in range(2)] == ["xxxx", "xxxx"]


def test_a_fault_in_one_stream_is_its_own(caplog: pytest.LogCaptureFixture) -> None:
    front = Front(["completion"] * 3, together=True)

    def broken(_data: bytes) -> None:
        raise OSError("this one is broken")

    for tokens in range(3):
        told = [Entry(state.handle, "x", tokens, tokens, [7]) for state in front.states]
        assert front.table.deliver(deltas(*told))
        front.table.wake()
        exchange = front.wires[1].exchange
        if exchange is not None:
            exchange.send = broken
    assert [front.received(which)[0] for which in (0, 2)] == ["xxx", "xxx"]
    assert b'"error"' in b"".join(front.wires[1].writes)
    assert front.states[1].is_over
    assert "this one is broken" in caplog.text


def test_ends_leave_nothing_behind() -> None:
    front, broadcast = Front([], together=True), Broadcast()
    for _ in range(3):
        wire = Wire()
        wire.exchange = Exchange(HttpRequest(), wire)  # type: ignore[arg-type]
        plan = asked("completion")
        context = AnswerContext(front, TextsByModel(lambda _: "nowhere"), Limits(), broadcast)
        start_answer(plan, wire.exchange, context)
        [state] = plan.states
        assert front.table.deliver(deltas(Entry(state.handle, "x", ids=[7], end=end_of("x"))))
        front.table.wake()
    assert (broadcast.states, broadcast._streams) == ({}, {})
