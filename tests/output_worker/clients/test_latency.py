"""What a worker counts of the messages that leave, against counting every stream by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.columns import pack_u32
from slipstream_ipc.messages import Deltas
from slipstream_ipc.telemetry.histogram import HistogramBuilder
from slipstream_ipc.telemetry.statistics import WorkerGauges
from slipstream_worker.clients.deltas import BuiltDeltas, FastEntries, SlowEntries
from slipstream_worker.clients.latency import RequestCounters
from slipstream_worker.streams.stream import Stage, WorkerStream
from slipstream_worker.streams.stream_columns import StreamColumns

NUM_LINES = 24
LINES = st.lists(st.integers(1, NUM_LINES), unique=True, min_size=1)


def message(worker_rows: list[int], num_tokens: int) -> Deltas:
    ids = pack_u32([0] * (len(worker_rows) * num_tokens))
    return Deltas(pack_u32(worker_rows), b"", b"", [], ids)


class World:
    """Lines 1 to NUM_LINES, a pace, and the oracle: when each line was sent something last."""

    def __init__(self) -> None:
        self.columns = StreamColumns(None)
        self.counters = RequestCounters()
        self.now = 100.0
        self.last: dict[int, float] = {}
        self.ttft, self.itl = HistogramBuilder(), HistogramBuilder()
        self.num_deltas = self.num_tokens = self.num_messages = 0
        self.columns.streams += [None] * NUM_LINES
        for worker_row in range(1, NUM_LINES + 1):
            self.columns.streams[worker_row] = self.stream(worker_row)

    def stream(self, worker_row: int) -> WorkerStream:
        end = SimpleNamespace(num_tokens=5)
        output: Any = SimpleNamespace(end=end)
        return WorkerStream(
            b"%d" % worker_row, Stage.RUNNING, worker_row=worker_row, output=output, arrived_at=99.0
        )

    def expect(self, worker_rows: list[int], num_tokens: int) -> None:
        for worker_row in worker_rows:
            if worker_row in self.last:
                self.itl.add(self.now - self.last[worker_row])
            else:
                self.ttft.add(self.now - 99.0)
            self.last[worker_row] = self.now
        self.num_messages += 1
        self.num_deltas += len(worker_rows)
        self.num_tokens += num_tokens * len(worker_rows)

    def many(self, fast: list[int], slow: list[int], num_tokens: int) -> None:
        self.expect([*fast, *slow], num_tokens)
        self.left(self.built(fast, self.entries(slow, num_tokens), num_tokens))

    def left(self, built: BuiltDeltas) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SlowEntries, "commit", lambda *_: None)
            self.counters.delivered(self.columns, built, self.now)

    def built(self, fast: list[int], slow: SlowEntries, num_tokens: int) -> BuiltDeltas:
        rows = [*(worker_row for worker_row, _, _ in slow.spans), *fast]
        counts = b"" if num_tokens == 1 else pack_u32([num_tokens] * len(fast))
        nothing = bytes(4 * len(fast))
        entries = FastEntries(np.array(fast, np.int64).tobytes(), nothing, counts, nothing)
        return BuiltDeltas(message(rows, num_tokens), slow, entries, is_all=True)

    def entries(self, slow: list[int], num_tokens: int) -> SlowEntries:
        entries = SlowEntries()
        for worker_row in slow:
            stream = self.columns.streams[worker_row]
            assert stream is not None
            entries.new_cursors.append((stream, None))  # type: ignore[arg-type]
            entries.spans.append((worker_row, 0, num_tokens))
        return entries


@given(st.data())
def test_every_gap_is_counted_once(data: st.DataObject) -> None:
    world = World()
    same = list(range(1, NUM_LINES + 1))
    for _ in range(data.draw(st.integers(1, 12))):
        world.now += data.draw(st.sampled_from([0.0, 0.001, 0.01, 0.3]))
        num_tokens = data.draw(st.integers(1, 3))
        kind = data.draw(st.sampled_from(["again", "again", "other", "mixed"]))
        if kind == "again":
            world.many(same, [], num_tokens)
        elif kind == "other":
            same = data.draw(LINES)
            world.many(same, [], num_tokens)
        else:
            worker_rows = data.draw(LINES)
            cut = data.draw(st.integers(0, len(worker_rows)))
            world.many(worker_rows[:cut], worker_rows[cut:], num_tokens)
    found = world.counters.numbers(WorkerGauges()).counters
    assert found.ttft_s.counts == world.ttft.histogram().counts
    assert found.itl_s.counts == world.itl.histogram().counts
    assert found.itl_s.sum == pytest.approx(world.itl.histogram().sum)
    assert (found.num_deltas, found.num_delivered_tokens) == (world.num_deltas, world.num_tokens)
    assert found.num_messages == world.num_messages


def test_a_worker_row_that_goes_to_another_stream_has_not_been_waiting():
    world = World()
    worker_rows = [1, 2, 3]
    for _ in range(3):
        world.now += 0.01
        world.many(worker_rows, [], 1)
    world.columns.delivered_at[2] = world.columns.sent_tokens[2] = 0  # as when they open one
    world.columns.streams[2] = world.stream(2)
    del world.last[2]
    world.now += 5.0
    world.many(worker_rows, [], 1)
    assert world.counters.numbers(WorkerGauges()).counters.ttft_s == world.ttft.histogram()


def test_an_end_is_timed_once_however_often_it_is_told():
    world = World()
    world.many([], [1], 1)
    world.now += 2.0
    for _ in range(2):
        entries = world.entries([1], 0)
        entries.ended = [entries.new_cursors[0][0]]
        world.left(world.built([], entries, 0))
    found = world.counters.numbers(WorkerGauges()).counters
    assert (found.tpot_s.num, found.e2e_s.num) == (1, 1)
    assert found.tpot_s.sum == pytest.approx(2.0 / 4)
    assert found.e2e_s.sum == pytest.approx(3.0)


@pytest.mark.parametrize("num_first", [1, 3, 5])
@pytest.mark.parametrize("kind", ["fast", "slow"])
def test_time_per_token_leaves_out_all_tokens_of_the_first_delta(kind: str, num_first: int) -> None:
    world = World()
    if kind == "fast":
        world.many([1, 2], [], num_first)
    else:
        world.many([], [1], num_first)
    world.now += 2.0  # its other tokens, of 5, and its end come later
    stream = world.columns.streams[1]
    assert stream is not None
    world.counters.last(stream, world.now)
    found = world.counters.numbers(WorkerGauges()).counters.tpot_s
    assert found.num == (num_first < 5)
    assert found.sum == pytest.approx(2.0 / (5 - num_first) if num_first < 5 else 0.0)


def test_a_stream_taken_over_has_no_time_to_first_token():
    world = World()
    stream = world.columns.streams[1]
    assert stream is not None
    stream.arrived_at = 0.0
    world.left(world.built([], world.entries([1], 1), 1))
    assert world.counters.numbers(WorkerGauges()).counters.ttft_s.num == 0


def test_ends_and_refusals_are_told_apart():
    counters = RequestCounters()
    counters.finished("stop", 3)
    counters.finished("length", 0)
    counters.finished("stop", 0)
    counters.rejected("overloaded")
    counters.accepted(10, num_answers=0)
    found = counters.numbers(WorkerGauges()).counters
    assert found.finished == {"stop": 2, "length": 1}
    assert found.rejected == {"overloaded": 1}
    assert (found.num_accepted, found.num_prompt_tokens, found.num_overrun_tokens) == (1, 10, 3)
