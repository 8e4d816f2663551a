"""A few streams' tokens go the scalar way: the same messages, to the byte, as the columns' way."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages import (
    Admit,
    AnswerSettings,
    LogprobColumns,
    RepetitionDetection,
    SamplingParams,
)
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import RowSet
from slipstream_worker.clients import deltas
from slipstream_worker.clients.deltas_scalar import build_few, due_few
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.stream import Reader, Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

EOS = 0
E_ACUTE = "é".encode()
PIECES = [b"", b"a", b"b", b"ab", b" ", E_ACUTE[:1], E_ACUTE[1:], E_ACUTE, b"z" * 4000]
THINK, THOUGHT, CALL, CALLED = range(len(PIECES), len(PIECES) + 4)
DELIMITERS = [b"<think>", b"</think>", b"<tool_call>", b"</tool_call>"]
PIECES += [*DELIMITERS, b'{"name": "f", "arguments": {"x": "', b'"}}', b"\n", b"<"]
BEYOND = len(PIECES) + 3  # an id without a token
FACTORY = TableDetokenizerFactory(
    TokenTable(mode="bytelevel", pieces=PIECES, special=[EOS]),
    {piece.decode(): THINK + at for at, piece in enumerate(DELIMITERS)},
)
FORMAT = find_format("qwen3+hermes")
assert FORMAT is not None
TOKENS = st.sampled_from([1, 1, 1, 2, 2, 3, 4, 5, 6, 7, EOS, BEYOND, *range(THINK, len(PIECES))])
DETECTIONS = [
    RepetitionDetection(max_pattern_size=1, min_count=2),
    RepetitionDetection(max_pattern_size=4, min_pattern_size=2, min_count=2),
]


@st.composite
def registrations(draw: st.DrawFn) -> Admit:
    params = SamplingParams(
        stop=tuple(draw(st.lists(st.text("abé ", min_size=1, max_size=3), max_size=2))),
        min_tokens=draw(st.integers(0, 3)),
        skip_special_tokens=draw(st.booleans()),
        stream_interval=draw(st.sampled_from([1, 1, 3])),
        repetition_detection=draw(st.sampled_from([None, None, *DETECTIONS])),
    )
    stops = draw(st.sampled_from([(), (EOS,), (2,)]))
    answer = draw(st.sampled_from([None, AnswerSettings(FORMAT.name, digest(FORMAT))]))
    most = draw(st.integers(1, 30))
    return Admit(b"", pack_u32([1]), params, stops, 0, most, answer=answer)


class World:
    """Some streams, and the way that their tokens go."""

    def __init__(self, admits: list[Admit], *, is_few: bool, has_table: bool = True) -> None:
        self.columns = StreamColumns(FACTORY.fast_table if has_table else None)
        self.is_few = is_few
        self.streams: list[WorkerStream] = []
        for number, admit in enumerate(admits):
            stream = WorkerStream(bytes([number]), Stage.RUNNING, registration=admit)
            stream.output = open_output(admit, FACTORY)
            stream.interval = admit.params.stream_interval
            stream.reader = Reader(b"client", 100 + number)
            self.columns.open(stream, admit)
            self.columns.handles[stream.worker_row] = 100 + number
            self.streams.append(stream)

    def push(self, numbers: list[int], ids: list[int]) -> list[int]:
        """One token of each of these streams; which had to be looked at."""
        columns, streams = self.columns, [self.streams[number] for number in numbers]
        worker_rows = [stream.worker_row for stream in streams]
        if self.is_few:
            care = columns.append_few(worker_rows, ids)
        else:
            needs = columns.append(
                RowSet(np.array(worker_rows, np.int64)), None, np.array(ids, np.uint32)
            )
            care = np.flatnonzero(needs).tolist()
        for at in care:
            if columns.is_fast[worker_rows[at]]:
                columns.make_slow(streams[at], columns.num_tokens(streams[at]) - 1)
                columns.record_harmless(streams[at], streams[at].output, ids[at])
            streams[at].output.push([ids[at]])
        return care

    def send(self, *, urgent: bool) -> tuple[object, list[int], bool] | None:
        """The next message, whose end is in it, and whether it is all that was due."""
        columns = self.columns
        numbers = sorted(stream.worker_row for stream in self.streams)
        worker_rows = np.array(numbers, np.int64)
        dirty = worker_rows[columns.is_dirty[worker_rows]]
        fast = deltas.due_fast(columns, RowSet(dirty[columns.is_fast[dirty]]), urgent=urgent)
        slow_worker_rows = dirty[~columns.is_fast[dirty]].tolist()
        leaves_now = deltas.is_urgent if urgent else deltas.is_due
        slow = [
            s
            for s in (columns.streams[worker_row] for worker_row in slow_worker_rows)
            if leaves_now(s)
        ]
        if self.is_few:
            spans, also_slow = due_few(columns, numbers, urgent=urgent)
            assert also_slow == slow_worker_rows
            assert [worker_row for worker_row, _, _ in spans] == fast.tolist()
            built = build_few(columns, spans, slow) if spans or slow else None
        else:
            built = deltas.build(columns, fast, slow) if len(fast) or slow else None
        if built is None:
            return None
        built.commit(columns)
        return built.message, [stream.worker_row for stream in built.slow.ended], built.is_all

    def state(self) -> list[object]:
        """All that the next message depends on."""
        columns = self.columns
        names = ("is_fast", "is_dirty", "sent_tokens", "sent_chars", "_sets", "kinds")
        cursors = [stream.reader.cursor for stream in self.streams]
        ends = [stream.output.end for stream in self.streams]
        ids = [columns.token_ids(stream).tolist() for stream in self.streams]
        return [*(getattr(columns, name).tolist() for name in names), cursors, ends, ids]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_few_streams_have_the_same_messages_as_many(data: st.DataObject) -> None:
    admits = data.draw(st.lists(registrations(), min_size=1, max_size=5))
    has_table = data.draw(st.sampled_from([True, True, True, False]))
    worlds = [World(admits, is_few=is_few, has_table=has_table) for is_few in (False, True)]
    for _ in range(data.draw(st.integers(1, 25))):
        going = [n for n, s in enumerate(worlds[0].streams) if s.output.end is None]
        chosen = [n for n in going if data.draw(st.booleans())]
        ids = [data.draw(TOKENS) for _ in chosen]
        if chosen:
            assert worlds[0].push(chosen, ids) == worlds[1].push(chosen, ids)
        if data.draw(st.booleans()):
            urgent = data.draw(st.booleans())
            assert worlds[0].send(urgent=urgent) == worlds[1].send(urgent=urgent)
        assert worlds[0].state() == worlds[1].state()


def test_a_long_history_goes_over_pages_and_new_worker_rows_have_cells_of_their_own() -> None:
    admits = [Admit(b"", pack_u32([1]), SamplingParams(), (), 0, 10_000)] * 70  # columns grow at 64
    worlds = [World(admits, is_few=is_few) for is_few in (False, True)]
    for step in range(200):
        ids = [1 + (step + n) % 4 for n in (0, 69)]
        assert worlds[0].push([0, 69], ids) == worlds[1].push([0, 69], ids)
        if step % 3 == 0:
            sent = worlds[0].send(urgent=False)
            assert sent is not None
            assert sent == worlds[1].send(urgent=False)
    assert worlds[0].state() == worlds[1].state()


@pytest.fixture
def fast_world() -> World:
    """Two streams whose lines are fast."""
    admits = [
        Admit(b"", pack_u32([1]), SamplingParams(logprobs=n), (), 0, 10**6) for n in (None, 0)
    ]
    world = World(admits, is_few=True)
    for stream in world.streams:
        world.columns.make_fast(stream, stream.reader.cursor)
    return world


def spans_of(world: World, number: int) -> list[tuple[int, int, int]]:
    return due_few(world.columns, [world.streams[number].worker_row], urgent=False)[0]


def test_log_probabilities_are_for_the_columns_way(fast_world: World) -> None:
    fast_world.push([0], [1])
    assert build_few(fast_world.columns, spans_of(fast_world, 0), []) is not None
    worker_row = RowSet(np.array([fast_world.streams[1].worker_row]))
    four = bytes(4)
    fast_world.columns.logprobs.append_columns(
        worker_row, None, LogprobColumns(1, four, four, four)
    )
    fast_world.push([1], [1])
    spans = spans_of(fast_world, 1)
    assert spans
    assert build_few(fast_world.columns, spans, []) is None


def test_more_than_a_message_may_hold_is_for_the_columns_way(fast_world: World) -> None:
    stream = fast_world.streams[0]
    num = MESSAGE_BUDGET_BYTES // 12 + 1
    fast_world.columns.tokens.extend(stream.worker_row, np.ones(num, np.uint32))
    fast_world.columns.is_dirty[stream.worker_row] = True
    spans = spans_of(fast_world, 0)
    assert spans == [(stream.worker_row, 0, num)]
    assert build_few(fast_world.columns, spans, []) is None
