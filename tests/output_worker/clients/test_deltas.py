"""What a client is sent of its streams, cut into messages."""

from __future__ import annotations

import numpy as np
import pytest
from tests.helpers.admits import admit_of

from slipstream_ipc.columns import check_deltas, pack_u32, u32
from slipstream_ipc.messages import LogprobColumns, SamplingParams
from slipstream_ipc.messages.budgets import MESSAGE_BUDGET_BYTES
from slipstream_ipc.row_set import NO_ROWS, RowSet
from slipstream_worker.clients import deltas
from slipstream_worker.clients.deltas import BuiltDeltas
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.detokenizer.factory import TableDetokenizerFactory
from slipstream_worker.detokenizer.table import TokenTable
from slipstream_worker.streams.registration import open_output
from slipstream_worker.streams.stream import Reader, Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

LONG = "y" * 1000
FACTORY = TableDetokenizerFactory(
    TokenTable(mode="bytelevel", pieces=[b"", b"a", b"bc", LONG.encode()], special=[])
)
NONE = NO_ROWS


@pytest.fixture
def columns() -> StreamColumns:
    return StreamColumns(FACTORY.fast_table)


def new(columns: StreamColumns, *, interval: int = 1, logprobs: int | None = None) -> WorkerStream:
    """A running stream that reader 7 reads from the start."""
    params = SamplingParams(logprobs=logprobs, stream_interval=interval)
    admit = admit_of(b"", pack_u32([1]), params, (), 0, 100_000)
    stream = WorkerStream(b"s", Stage.RUNNING, registration=admit, interval=interval)
    stream.output = open_output(admit, FACTORY)
    stream.reader = Reader(b"client", 7)
    columns.open(stream, admit)
    columns.handles[stream.worker_row] = 7
    return stream


def push(columns: StreamColumns, stream: WorkerStream, *token_ids: int) -> None:
    worker_row, ids = RowSet(np.array([stream.worker_row])), np.array(token_ids, np.uint32)
    counts = np.array([len(ids)])
    width = int(columns.widths[stream.worker_row])
    if width:
        some = bytes(4 * width * len(ids))
        columns.logprobs.append_columns(
            worker_row, counts, LogprobColumns(width, some, some, pack_u32(ids))
        )
    if columns.append(worker_row, counts, ids):
        columns.make_slow(stream, columns.num_tokens(stream) - len(ids))
        stream.output.push(list(token_ids))


def fast(columns: StreamColumns, *streams: WorkerStream) -> RowSet:
    """The lines of streams, made fast."""
    for stream in streams:
        columns.make_fast(stream, stream.reader.cursor)
        assert columns.is_fast[stream.worker_row]
    return RowSet(np.array([stream.worker_row for stream in streams]))


def num_due(columns: StreamColumns, worker_rows: RowSet, *, urgent: bool = False) -> int:
    """How many of these fast rows are due."""
    return len(columns.loops.due(worker_rows.array, urgent)[0]) // 8


def build(columns: StreamColumns, worker_rows: RowSet, slow: list[WorkerStream]) -> BuiltDeltas:
    """A message of these fast rows, if they are due, and of these slow streams."""
    rows, counts, _ = columns.loops.due(worker_rows.array, False)
    return deltas.build(columns, rows, counts, slow)


def commit(columns: StreamColumns, built: BuiltDeltas) -> None:
    RequestCounters().delivered(columns, built, 1.0)


@pytest.mark.parametrize("way", ["fast", "slow"])
def test_first_token_and_end_are_due_at_once_the_rest_by_interval(columns, way: str) -> None:
    it = new(columns, interval=4)
    worker_rows = fast(columns, it) if way == "fast" else NONE

    def is_due() -> bool:
        if way == "fast":
            return num_due(columns, worker_rows) > 0
        return deltas.is_due(it)

    def send() -> None:
        built = build(columns, worker_rows, [] if way == "fast" else [it])
        commit(columns, built)
        if way == "slow":
            columns.make_slow(it, columns.num_tokens(it))

    push(columns, it, 1)
    assert is_due()
    send()
    for due in (False, False, False, True):
        assert not is_due()
        push(columns, it, 1)
        assert is_due() is due
    send()
    assert not is_due()
    columns.make_slow(it, columns.num_tokens(it))
    it.output.finish("abort")
    assert deltas.is_due(it)


def test_an_entry_carries_what_lies_behind_the_cursor(columns) -> None:
    it, other = new(columns, logprobs=1), new(columns)
    worker_rows = fast(columns, other)
    push(columns, it, 1)
    push(columns, other, 2)
    commit(columns, build(columns, worker_rows, [it]))
    columns.make_slow(it, 1)
    push(columns, it, 0, 2)
    push(columns, other, 1, 2, 1)
    it.output.finish("abort")
    built = build(columns, worker_rows, [it])
    message = built.message
    check_deltas(message)
    assert message.texts == ["bc", "abca"]
    assert u32(message.chars).tolist() == [1, 2]
    assert u32(message.tokens).tolist() == [1, 1]
    assert u32(message.counts).tolist() == [2, 3]
    assert u32(message.token_ids).tolist() == [0, 2, 1, 2, 1]
    assert u32(message.ended).tolist() == [0]
    assert [end.reason for end in message.ends] == ["abort"]
    assert message.logprobs is not None
    assert u32(message.logprobs.ranks).tolist() == [0, 2]
    assert u32(message.logprobs.widths).tolist() == [2, 0]
    assert built.slow.ended == [it]


def test_one_wide_request_does_not_widen_all(columns) -> None:
    streams = [new(columns), new(columns, logprobs=2), new(columns, logprobs=0)]
    worker_rows = fast(columns, *streams)
    for stream in streams:
        push(columns, stream, 1)
    message = build(columns, worker_rows, []).message
    check_deltas(message)
    assert message.logprobs is not None
    assert u32(message.logprobs.widths).tolist() == [0, 3, 1]
    assert len(message.logprobs.values) == 4 * (3 + 1)


def test_logprobs_of_several_tokens_follow_their_entries_whatever_order_they_came_in(
    columns,
) -> None:
    it, other = new(columns, logprobs=0), new(columns, logprobs=0)
    worker_rows = fast(columns, it, other)
    together = RowSet(worker_rows.array[::-1].copy())
    for ids in ([1, 2], [2, 1]):  # of the other one first
        values, ranks = bytes(8), pack_u32(ids)
        columns.logprobs.append_columns(
            together, np.array([1, 1]), LogprobColumns(1, values, values, ranks)
        )
        assert not columns.append(together, np.array([1, 1]), np.array(ids, np.uint32))
    message = build(columns, worker_rows, []).message
    assert u32(message.token_ids).tolist() == [2, 1, 1, 2]
    assert message.logprobs is not None
    assert u32(message.logprobs.ranks).tolist() == [2, 1, 1, 2]


def test_without_logprobs_there_are_no_columns(columns) -> None:
    streams = [new(columns), new(columns)]
    for stream in streams:
        push(columns, stream, 1)
    message = build(columns, NONE, streams).message
    assert message.logprobs is None
    assert message.counts == b""


@pytest.mark.parametrize("way", ["fast", "slow"])
def test_a_message_keeps_to_its_budget_and_the_end_comes_last(columns, way: str) -> None:
    it = new(columns, logprobs=20)
    worker_rows = fast(columns, it) if way == "fast" else NONE
    push(columns, it, *[3] * 20_000)
    texts, num_messages, ended = [], 0, []
    while not ended:
        if way == "fast" and columns.sent_tokens[it.worker_row] == 20_000:
            columns.make_slow(it, 20_000)
        is_fast = columns.is_fast[it.worker_row]
        if not is_fast and it.output.end is None:
            it.output.finish("abort")
        built = build(columns, worker_rows if is_fast else NONE, [] if is_fast else [it])
        check_deltas(built.message)
        num_messages += 1
        texts += built.message.texts
        logprobs = built.message.logprobs
        assert logprobs is None or len(logprobs.values) <= MESSAGE_BUDGET_BYTES
        commit(columns, built)
        ended = built.slow.ended
    assert num_messages > 1
    assert "".join(texts) == LONG * 20_000


def test_what_is_behind_the_budget_is_left_for_the_next_message(columns) -> None:
    many = [new(columns) for _ in range(10)]
    for stream in many:
        push(columns, stream, *[3] * (MESSAGE_BUDGET_BYTES // 4000))
    built = build(columns, NONE, many)
    assert sum(map(len, built.message.texts)) <= MESSAGE_BUDGET_BYTES
    commit(columns, built)
    left = [it for it in many if columns.is_dirty[it.worker_row]]
    assert 1 <= len(left) <= 10


def test_fast_worker_rows_share_a_message_evenly(columns) -> None:
    short, long = new(columns), new(columns)
    worker_rows = fast(columns, short, long)
    push(columns, short, 1)
    push(columns, long, *[1] * 90_000)
    built = build(columns, worker_rows, [])
    counts = u32(built.message.counts)
    assert counts[0] == 1
    assert 1000 < counts[1] < 90_000
    commit(columns, built)
    assert columns.is_dirty[worker_rows.array].tolist() == [False, True]


def test_urgent_are_first_tokens_and_ends_alone(columns) -> None:
    it, other = new(columns), new(columns)
    worker_rows = fast(columns, other)
    push(columns, it, 1)
    push(columns, other, 1)
    assert deltas.is_urgent(it)
    assert num_due(columns, worker_rows, urgent=True) == 1
    commit(columns, build(columns, worker_rows, [it]))
    columns.make_slow(it, 1)
    push(columns, it, 1)
    push(columns, other, 1)
    assert deltas.is_due(it)
    assert not deltas.is_urgent(it)
    assert num_due(columns, worker_rows, urgent=True) == 0
    it.output.finish("abort")
    assert deltas.is_urgent(it)
