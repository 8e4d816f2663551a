"""The C extension writes what Python writes, byte for byte."""

from __future__ import annotations

import gc
import sys
import weakref
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.api.http.answers.test_broadcast import asked
from tests.helpers.fake_worker import Entry, deltas
from tests.helpers.http_answer import CARD, Wire
from tests.oracles.broadcast import PythonBroadcast

from slipstream.client.streams.stream_state import StreamState
from slipstream.client.streams.stream_table import ClientStreamTable
from slipstream.compiled import write_texts
from slipstream.demo_model import MODEL_PATH
from slipstream.http.answers.broadcast import Broadcast
from slipstream.http.answers.event_ids import AnswerId, EventId, StreamCursor
from slipstream.http.answers.live_answer import AnswerContext
from slipstream.http.answers.streaming import StreamedChoice, start_answer
from slipstream.http.anthropic.messages import plan_messages, read_messages
from slipstream.http.config import Limits
from slipstream.http.exchange import Exchange, HttpRequest
from slipstream.http.logprobs.vocabulary import TextsByModel, TokenText, TokenTexts
from slipstream.http.response_encoding import json_part
from slipstream.http.responses.response_plan import new_response
from slipstream.http.responses.responses_request import read_response_request
from slipstream.outputs import Delta
from slipstream_ipc.columns import pack_f32, pack_u32
from slipstream_ipc.messages import AnswerEvent, Deltas, EventKind, LogprobColumns

KINDS = ["completion", "chat", "tools", "resumable", "resumable chat", "generate", "1.0"]
BLOCKS = ["response", "message"]
NUM = 5  # streams
MANY_CALLS = EventKind.CALL_ARGUMENTS | 3 << 8
TEXTS = TextsByModel(lambda _: str(MODEL_PATH))


@cache
def demo_texts() -> TokenTexts:
    texts = TEXTS.of(CARD.name)
    texts._load()
    return texts


def planned(kind: str) -> Any:
    """The plan of a streamed answer."""
    match kind:
        case "response":
            body = read_response_request(b'{"input": "x", "stream": true}')
            event = EventId(AnswerId("resp", bytes(16)), 1, None, False, False, (StreamCursor(),))
            return new_response(body, CARD, before=event)[0]
        case "message":
            fields = {"model": CARD.name, "max_tokens": 50, "stream": True}
            fields["messages"] = [{"role": "user", "content": "x"}]
            return plan_messages(read_messages(msgspec.json.encode(fields)), CARD)
    return asked(kind)


class Front:
    """Streams that one broadcast writes, in C or in Python."""

    def __init__(self, kinds: list[str], *, is_in_c: bool) -> None:
        self.table, self.kinds = ClientStreamTable(), kinds
        self.broadcast = Broadcast() if is_in_c else PythonBroadcast()
        self.wires: list[Wire] = []
        self.states: list[StreamState] = []
        self.exchanges: list[Exchange] = []
        context = AnswerContext(self, TEXTS, Limits(), self.broadcast)
        for kind in kinds:
            wire, request = Wire(), HttpRequest()
            request.version = "1.0" if kind == "1.0" else "1.1"
            wire.exchange = Exchange(request, wire)  # type: ignore[arg-type]
            self.exchanges.append(wire.exchange)
            is_resumable = kind.startswith("resumable")
            plan = planned("tools" if kind == "resumable chat" else kind.split()[0])
            num_logprobs = 2 if "logprobs" in kind else None
            plan = replace(plan, is_resumable=is_resumable, created=1, num_logprobs=num_logprobs)
            start_answer(plan, wire.exchange, context)
            self.wires.append(wire)
            self.states += plan.states

    def submit(self, state: StreamState) -> None:
        """Ask for the stream."""
        self.table.add(state)

    def abandon(self, state: StreamState) -> None:
        """End it."""
        self.table.give_up(state, None)

    def written(self) -> list[list[bytes]]:
        """What was written to each connection, without the random ids."""
        return [
            [data.replace(state.stream_id.hex().encode(), bytes(32)) for data in wire.writes]
            for wire, state in zip(self.wires, self.states, strict=True)
        ]


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5) | st.sampled_from(
    ["", "\x7f", '"\\', "\x00\x0b\x1f\b\f\n\r\t", "\x85\u2028\u2029", "é€😀"]
)
kinds_of_text = st.sampled_from([0, EventKind.CONTENT, EventKind.REASONING, MANY_CALLS])
told = st.tuples(texts, st.lists(st.integers(0, 2**32 - 1), max_size=3), kinds_of_text)
messages = st.lists(st.lists(st.none() | told, min_size=NUM, max_size=NUM), max_size=6)


@given(
    st.lists(st.sampled_from([*KINDS, *BLOCKS]), min_size=NUM, max_size=NUM),
    messages,
    st.lists(st.tuples(st.integers(0, NUM - 1), st.booleans()), max_size=6),
    st.booleans(),
)
def test_the_extension_writes_what_python_writes(
    kinds: list[str],
    messages: list[list[Any]],
    pauses: list[tuple[int, bool]],
    has_listed: bool,
) -> None:
    fronts = [Front(kinds, is_in_c=True), Front(kinds, is_in_c=False)]
    chars, tokens = [0] * NUM, [0] * NUM
    for at, message in enumerate(messages):
        entries = []
        for which, (kind, entry) in enumerate(zip(kinds, message, strict=True)):
            if entry is None:
                continue
            text, ids, text_kind = entry
            if kind in BLOCKS:
                text_kind = EventKind.CONTENT if text_kind == MANY_CALLS else text_kind
            elif kind not in ("tools", "resumable chat"):
                text_kind = 0
            own = None
            if has_listed and text_kind and text:
                own, text_kind = (AnswerEvent(EventKind.CONTENT, text),), 0
            entries.append((which, text, chars[which], tokens[which], ids, None, text_kind, own))
            chars[which] += len(text)
            tokens[which] += len(ids)
        if not entries:
            continue
        for front in fronts:
            handles = [Entry(front.states[each[0]].handle, *each[1:]) for each in entries]
            assert front.table.deliver(deltas(*handles))
            front.table.wake()
            if at < len(pauses):
                which, is_paused = pauses[at]
                exchange = front.exchanges[which]
                if exchange.is_open and exchange.is_paused != is_paused:
                    exchange.pause(is_paused)
    in_c, in_python = fronts
    assert in_c.written() == in_python.written()
    chunks = [[each.counters.num_chunks for each in front.exchanges] for front in fronts]
    assert chunks[0] == chunks[1]
    cursors = [
        [(at.num_chars, at.num_tokens, at.checksum) for at in _cursors(front)] for front in fronts
    ]
    assert cursors[0] == cursors[1]


def _cursors(front: Front) -> list[Any]:
    streams = front.broadcast._streams.values()
    return [stream.cursor for stream in streams if stream.cursor is not None]


scored_token = st.tuples(
    st.lists(st.integers(0, 600), min_size=3, max_size=3),  # many are parts of characters
    st.lists(st.floats(-20, 0, width=32) | st.just(float("-inf")), min_size=3, max_size=3),
    st.integers(1, 3),
)
one_token = st.lists(scored_token, min_size=1, max_size=1)
scored = st.tuples(texts, one_token | one_token | st.lists(scored_token, min_size=1, max_size=3))


@given(
    st.lists(
        st.sampled_from(
            ["completion logprobs", "chat logprobs", "resumable logprobs", "completion"]
        ),
        min_size=3,
        max_size=3,
    ),
    st.lists(st.lists(scored, min_size=3, max_size=3), max_size=5),
)
def test_log_probabilities_are_written_as_in_python(
    kinds: list[str], messages: list[list[Any]]
) -> None:
    fronts = [Front(kinds, is_in_c=True), Front(kinds, is_in_c=False)]
    positions = [(0, 0)] * 3
    for message in messages:
        for front in fronts:
            assert front.table.deliver(scored_deltas(front, message, positions))
            front.table.wake()
        positions = [
            (chars + len(text), num_tokens + len(tokens))
            for (chars, num_tokens), (text, tokens) in zip(positions, message, strict=True)
        ]
    assert fronts[0].written() == fronts[1].written()


def scored_deltas(
    front: Front, message: list[tuple[str, list[Any]]], positions: list[tuple[int, int]]
) -> Deltas:
    """A message of a text and tokens for each stream: with three candidates where it shows them."""
    widths = [3 if "logprobs" in kind else 0 for kind in front.kinds]
    tokens = [
        token for width, (_, found) in zip(widths, message, strict=True) if width for token in found
    ]
    are_equal = all(widths)
    found = LogprobColumns(
        3 if are_equal else 0,
        pack_f32(np.array([values for _, values, _ in tokens])),
        pack_u32(np.array([ids for ids, _, _ in tokens])),
        pack_u32([rank for *_, rank in tokens]),
        b"" if are_equal else pack_u32(widths),
    )
    entries = [
        Entry(state.handle, text, *position, [ids[0] for ids, *_ in of_entry])
        for state, (text, of_entry), position in zip(front.states, message, positions, strict=True)
    ]
    return deltas(*entries, logprobs=found)


@pytest.mark.parametrize("kind", ["completion logprobs", "chat logprobs"])
@pytest.mark.parametrize("others", [[], ["completion"], ["completion logprobs", "chat logprobs"]])
def test_several_tokens_of_one_stream_leave_the_others_to_the_extension(
    monkeypatch: pytest.MonkeyPatch, kind: str, others: list[str]
) -> None:
    """Also beside streams without log-probabilities, or of the other kind."""
    left: list[str] = []
    write_delta = StreamedChoice.write_delta

    def counted(choice: StreamedChoice, delta: Delta, part: bytes) -> None:
        left.append(delta.text)
        write_delta(choice, delta, part)

    monkeypatch.setattr(StreamedChoice, "write_delta", counted)
    front = Front([kind] * 3 + others, is_in_c=True)
    token = [40, 40, 42], [-1.0, -1.0, -3.0], 1
    for at in range(3):  # the first chunks of all streams are Python's
        message = [("a", [token]), ("bb", [token, token]), ("c", [token])]
        positions = [(at, at), (2 * at, 2 * at), (at, at)]
        message += [("d", [token]) for _ in others]
        positions += [(at, at) for _ in others]
        assert front.table.deliver(scored_deltas(front, message, positions))
        front.table.wake()
    assert left.count("bb") > left.count("c")
    assert left[-1] == "bb"


@pytest.mark.parametrize("is_in_c", [True, False])
def test_a_token_that_cannot_be_shown_fails_the_streams_that_show_it(
    monkeypatch: pytest.MonkeyPatch, is_in_c: bool
) -> None:
    text_of = TokenTexts.of

    def broken(texts: TokenTexts, token_id: int) -> TokenText:
        if token_id == 10**6:
            raise ValueError("broken")
        return text_of(texts, token_id)

    monkeypatch.setattr(TokenTexts, "of", broken)
    front = Front(["completion", "completion logprobs", "completion"], is_in_c=is_in_c)
    for at, own in enumerate([1, 10**6]):
        found = LogprobColumns(2, bytes(24), pack_u32([2, 1, own, 1, 3, 1]), pack_u32([1, 1, 1]))
        entries = [Entry(state.handle, "ab"[at], at, at, [1]) for state in front.states]
        assert front.table.deliver(deltas(*entries, logprobs=found))
        front.table.wake()
    last = [writes[-1] for writes in front.written()]
    assert [b'"text":"b"' in each for each in last] == [True, False, True]
    assert b"internal server error" in last[1]


class _Stream:
    """What the extension reads of a `BroadcastStream`."""

    def __init__(self, **fields: Any) -> None:
        self.exchange = self
        self.is_ready = self.is_text_only = True
        self.deltas: list[Any] = []
        self.before, self.after, self.repeat = b"<", b">\r\n", b""
        self.numbers, self.after_number = None, b""
        self.frames: dict[int, Any] = {}
        self.cursor = None
        self.counters = self
        self.num_chunks = 0
        self.sent: list[bytes] = []
        self.send: Any = self.sent.append
        self.failures = 0
        self.__dict__.update(fields)

    def on_exception(self) -> None:
        """Count."""
        self.failures += 1


def write(streams: list[Any], texts: list[Any], left: bytearray, **columns: bytes) -> None:
    ids = columns.get("ids", bytes(4 * len(texts)))
    kinds, counts = columns.get("kinds", b""), columns.get("counts", b"")
    write_texts(streams, texts, None, None, kinds, ids, counts, b"", b"", b"", left)


def test_numbers_are_asked_for_texts_alone() -> None:
    class Numbers:
        grown: ClassVar[list[str]] = []

        def grow(self, text: str) -> int:
            self.grown.append(text)
            return 10 ** len(self.grown) * (-1 if text == "-" else 1)

    stream = _Stream(numbers=Numbers(), after_number=b":")
    write([stream] * 5, ["a", "", "a\ud800", "bc", "-"], bytearray(5))
    assert stream.sent == [b"6\r\n<10:a>\r\n", b"8\r\n<100:bc>\r\n"]
    assert Numbers.grown == ["a", "bc", "-"]
    assert stream.failures == 1


@pytest.mark.parametrize("is_in_c", [True, False])
def test_a_responses_events_have_the_numbers_of_their_last_characters(is_in_c: bool) -> None:
    front = Front(["response"], is_in_c=is_in_c)
    [state], [exchange] = front.states, front.exchanges
    parts = ["a", "bc", "", "d", "é\n", "f"]
    for at, text in enumerate(parts):
        exchange.pause(at == 3)
        num_chars = len("".join(parts[:at]))
        assert front.table.deliver(deltas(Entry(state.handle, text, num_chars, at, [1])))
        front.table.wake()
        [stream] = front.broadcast._streams.values()
        assert stream.is_text_only
    events = b"".join(front.wires[0].writes).split(b"\n\n")
    bodies = [event.partition(b"\ndata: ")[2] for event in events if b"output_text.delta" in event]
    found = [(body["sequence_number"], body["delta"]) for body in map(msgspec.json.decode, bodies)]
    assert found == [(4, "a"), (6, "bc"), (7, "d"), (9, "é\n"), (10, "f")]
    assert stream.numbers.open_block.text == "abcdé\nf"


@given(texts)
def test_texts_are_escaped_as_msgspec_does(text: str) -> None:
    stream = _Stream()
    write([stream], [text], bytearray(1))
    part = json_part(text)
    assert stream.sent == ([b"%x\r\n<%b>\r\n" % (len(part) + 2, part)] if part else [])


def test_what_utf8_has_no_form_for_is_left() -> None:
    stream, left = _Stream(), bytearray(1)
    write([stream], ["a\ud800"], left)
    assert (stream.sent, left) == ([], b"\1")


@pytest.mark.parametrize(
    "columns",
    [{"ids": bytes(4)}, {"kinds": bytes(4)}, {"counts": bytes(12)}, {"counts": b"\xff" * 8}],
)
def test_columns_that_do_not_match_are_refused(columns: dict[str, bytes]) -> None:
    streams = [_Stream(), _Stream()]
    with pytest.raises(ValueError, match=r"lengths|fewer"):
        write(streams, ["a", "b"], bytearray(2), **columns)
    with pytest.raises(ValueError, match="lengths"):
        write(streams, ["a", "b"], bytearray(1))
    with pytest.raises(TypeError):
        write(streams, ["a", b"b"], bytearray(2))


def test_a_wrong_attribute_is_the_streams_own_whatever_python_has_looked_up() -> None:
    """A look-up of an attribute that types have not been asked for lately clears an exception."""
    streams = [_Stream(before="no bytes"), _Stream()]
    sys._clear_type_cache()
    write(streams, ["a"] * 2, bytearray(2))
    assert [(each.failures, each.sent) for each in streams] == [(1, []), (0, [b"3\r\n<a>\r\n"])]


def test_a_failure_is_the_streams_own() -> None:
    def broken(_data: bytes) -> None:
        raise OSError("broken")

    def interrupted(_data: bytes) -> None:
        raise KeyboardInterrupt

    streams = [_Stream(), _Stream(send=broken), _Stream(before="no bytes"), _Stream()]
    write(streams, ["a"] * 4, bytearray(4))
    assert [stream.failures for stream in streams] == [0, 1, 1, 0]
    assert [len(stream.sent) for stream in streams] == [1, 0, 0, 1]
    with pytest.raises(KeyboardInterrupt):
        write([_Stream(send=interrupted)], ["a"], bytearray(1))


def test_nothing_is_kept_alive() -> None:
    stream = _Stream()
    stream.send = None  # fails
    write([stream, stream], ["a" * 1000, "b"], bytearray(2))
    seen = weakref.ref(stream)
    del stream
    gc.collect()
    assert seen() is None
