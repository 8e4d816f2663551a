"""The loops in C against the reference: the same checks, and the same messages, to the byte."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.admits import admit_of
from tests.oracles.row_loops import ReferenceLoops

from slipstream_ipc.columns import check_deltas, pack_u32
from slipstream_ipc.formats.answer_format import digest
from slipstream_ipc.formats.table import find_format
from slipstream_ipc.messages import (
    Admit,
    AnswerSettings,
    LogprobColumns,
    RepetitionDetection,
    SamplingParams,
)
from slipstream_ipc.row_set import RowSet
from slipstream_ipc.telemetry.statistics import WorkerGauges
from slipstream_worker.clients import deltas
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.detokenizer.text_columns import TextColumns
from slipstream_worker.streams import stream_columns
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.row_loops import RowLoops, Views, new_row_loops
from slipstream_worker.streams.slow_path import push_slow
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
LoopsOf = Callable[[Views, TextColumns | None], RowLoops | ReferenceLoops]
BOTH: tuple[LoopsOf, ...] = (ReferenceLoops, new_row_loops)
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
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        detokenize=draw(st.sampled_from([True, True, False])),
    )
    stops = draw(st.sampled_from([(), (EOS,), (2,)]))
    answer = draw(st.sampled_from([None, AnswerSettings(FORMAT.name, digest(FORMAT))]))
    most = draw(st.integers(1, 30))
    return admit_of(b"", pack_u32([1]), params, stops, 0, most, answer=answer)


class World:
    """Some streams, and the loops that their tokens go through."""

    def __init__(
        self, admits: list[Admit], loops: LoopsOf = new_row_loops, *, has_table: bool = True
    ) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stream_columns, "new_row_loops", loops)
            self.columns = StreamColumns(FACTORY.fast_table if has_table else None)
            self.streams = [self.opened(number, admit) for number, admit in enumerate(admits)]
        self.counters = RequestCounters()
        self.now = 1.0

    def opened(self, number: int, admit: Admit) -> WorkerStream:
        stream = WorkerStream(bytes([number]), Stage.RUNNING, registration=admit)
        stream.output = open_output(admit, FACTORY)
        stream.interval = admit.spec.params.stream_interval
        stream.reader = Reader(b"client", 100 + number)
        self.columns.open(stream, admit)
        self.columns.handles[stream.worker_row] = 100 + number
        return stream

    def push(self, numbers: list[int], spans: list[list[int]]) -> list[int]:
        """Tokens of each of these streams; which had to be looked at."""
        columns, streams = self.columns, [self.streams[number] for number in numbers]
        rows = RowSet(np.array([stream.worker_row for stream in streams], np.int64))
        ids = np.array([token_id for span in spans for token_id in span], np.uint32)
        counts = np.array([len(span) for span in spans], np.int64)
        widths = columns.widths[rows.array]
        if widths.any():
            values = bytes(4 * int((widths * counts).sum()))
            ranks = pack_u32(np.repeat(widths > 0, counts).nonzero()[0])
            told = LogprobColumns(0, values, values, ranks, pack_u32(widths))
            columns.logprobs.append_columns(rows, counts, told)
        to_check = columns.append(rows, None if (counts == 1).all() else counts, ids)
        for at in to_check:
            if streams[at].output.end is None:
                push_slow(columns, streams[at], spans[at])
        return to_check

    def send(self, *, urgent: bool) -> tuple[object, list[int], bool] | None:
        """The next message, whose end is in it, and whether it is all that was due."""
        columns = self.columns
        rows = np.array(sorted(stream.worker_row for stream in self.streams), np.int64)
        fast, counts, slow_rows = columns.loops.due(rows, urgent)
        leaves_now = deltas.is_urgent if urgent else deltas.is_due
        slow = [stream for row in slow_rows if leaves_now(stream := columns.streams[row])]
        if not fast and not slow:
            return None
        built = deltas.build(columns, fast, counts, slow)
        check_deltas(built.message)
        self.now += 0.01
        self.counters.delivered(columns, built, self.now)
        return built.message, [stream.worker_row for stream in built.slow.ended], built.is_all

    def state(self) -> list[object]:
        """All that the next message depends on."""
        columns = self.columns
        names = ("is_fast", "is_dirty", "sent_tokens", "sent_chars", "_sets", "kinds", "lengths")
        cursors = [stream.reader.cursor for stream in self.streams]
        ends = [stream.output.end for stream in self.streams]
        ids = [columns.token_ids(stream).tolist() for stream in self.streams]
        columns_now = [getattr(columns, name).tolist() for name in (*names, "delivered_at")]
        last = columns.last_ids[columns.lengths > 0].tolist()
        return [*columns_now, cursors, ends, ids, last]


# tokens by stream, in any order
STEPS = st.dictionaries(
    st.integers(0, 5), st.one_of(TOKENS.map(lambda one: [one]), st.lists(TOKENS, min_size=1))
)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_both_loops_give_the_same_messages(data: st.DataObject) -> None:
    admits = data.draw(st.lists(registrations(), min_size=1, max_size=6))
    has_table = data.draw(st.sampled_from([True, True, True, False]))
    worlds = [World(admits, loops, has_table=has_table) for loops in BOTH]
    for step, urgent in data.draw(st.lists(st.tuples(STEPS, st.booleans()), max_size=15)):
        outputs = [stream.output for stream in worlds[0].streams]
        chosen = [n for n in step if n < len(admits) and outputs[n].end is None]
        if chosen:
            spans = [step[n] for n in chosen]
            assert worlds[0].push(chosen, spans) == worlds[1].push(chosen, spans)
        assert worlds[0].send(urgent=urgent) == worlds[1].send(urgent=urgent)
        assert worlds[0].state() == worlds[1].state()
    found = [world.counters.numbers(WorkerGauges()).counters for world in worlds]
    assert found[0].itl_s.counts == found[1].itl_s.counts
    assert found[0].itl_s.sum == pytest.approx(found[1].itl_s.sum)
    assert found[0].num_delivered_tokens == found[1].num_delivered_tokens


def test_a_long_history_goes_over_pages_and_columns_grow() -> None:
    admits = [admit_of(b"", pack_u32([1]), SamplingParams(), (), 0, 10_000)] * 70  # they grow at 64
    worlds = [World(admits, loops) for loops in BOTH]
    for step in range(200):
        spans = [[1 + (step + n) % 4] for n in (0, 69)]
        assert worlds[0].push([0, 69], spans) == worlds[1].push([0, 69], spans)
        if step % 3 == 0:
            sent = worlds[0].send(urgent=False)
            assert sent is not None
            assert sent == worlds[1].send(urgent=False)
    assert worlds[0].state() == worlds[1].state()


def test_more_than_a_message_holds_is_cut_alike() -> None:
    admits = [admit_of(b"", pack_u32([1]), SamplingParams(), (), 0, 10**7)] * 3
    worlds = [World(admits, loops) for loops in BOTH]
    for world in worlds:
        for stream in world.streams:
            world.columns.make_fast(stream, stream.reader.cursor)
    spans = [[1] * 60_000, [2], [3] * 40_000]
    for world in worlds:
        assert not world.push([0, 1, 2], spans)
    for _ in range(3):
        assert (sent := worlds[0].send(urgent=False)) == worlds[1].send(urgent=False)
    assert sent is None or sent[2]
    assert worlds[0].state() == worlds[1].state()


# ---- what the C is handed -------------------------------------------------------------------


def i64(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int64)


def some(num: int) -> np.ndarray:
    return np.ones(num, np.uint32)


HISTOGRAM = (array("d", [0.1]), array("q", [0, 0]), array("d", [0.0]))
WRONG = [
    ("append", (i64(10**9), None, some(1)), IndexError),
    ("append", (i64(-1), None, some(1)), IndexError),
    ("append", (i64(1), None, some(2)), ValueError),
    ("append", (i64(1), i64(3), some(2)), ValueError),
    ("append", (i64(1), i64(0), some(0)), ValueError),
    ("append", (i64(1, 2), i64(2), some(2)), ValueError),
    ("append", (i64(1, 2), i64(2**62, 2**62), some(2)), ValueError),
    ("append", (b"123", None, some(1)), ValueError),
    ("append", (None,), TypeError),
    ("due", (i64(64), False), IndexError),
    ("entries", (i64(64), b"", None), IndexError),
    ("entries", (i64(1), pack_u32([2]), None), ValueError),
    ("entries", (i64(1), pack_u32([2]), pack_u32([1])), ValueError),
    ("entries", (i64(1), pack_u32([1, 1]), pack_u32([1, 1])), ValueError),
    ("sent", (i64(64), pack_u32([0]), b"", pack_u32([0]), 1.0, *HISTOGRAM), IndexError),
    ("sent", (i64(1), b"", b"", pack_u32([0]), 1.0, *HISTOGRAM), ValueError),
    ("sent", (i64(1), pack_u32([0]), b"", b"", 1.0, *HISTOGRAM), ValueError),
    ("sent", (i64(1), pack_u32([0]), b"", b"", "now", *HISTOGRAM), TypeError),
    ("sent", (i64(), b"", b"", b"", 1.0, HISTOGRAM[0], bytes(16), HISTOGRAM[2]), ValueError),
    ("sent", (i64(), b"", b"", b"", 1.0, HISTOGRAM[0], HISTOGRAM[2], HISTOGRAM[2]), ValueError),
]


@pytest.mark.parametrize(("name", "arguments", "error"), WRONG)
def test_what_does_not_fit_is_refused_and_changes_nothing(name: str, arguments, error) -> None:
    world = World([admit_of(b"", pack_u32([1]), SamplingParams(), (), 0, 10)])
    before = world.state()
    with pytest.raises(error):
        getattr(world.columns.loops, name)(*arguments)
    assert world.state() == before


def test_what_does_not_fit_is_no_loops() -> None:
    world = World([])
    kind = type(world.columns.loops)
    views = {name: np.zeros(4, np.int64) for name in Views._fields}
    with pytest.raises(ValueError, match="is_fast"):
        kind(views, [], 0)
    with pytest.raises(KeyError):
        kind({}, [], 0)
    with pytest.raises(TypeError):
        kind(views, (), 0)
