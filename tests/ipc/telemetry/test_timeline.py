"""Spans of the last second, in the ring and on their way."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.telemetry.spans import CAPACITY, SPAN_US, TICK_US, TOLD_US, Spans
from slipstream_ipc.telemetry.statistics import WorkerNumbers, added, without_gauges
from slipstream_ipc.telemetry.timeline import RecentSpans, since

NOW = 1000.0
moments = st.lists(st.floats(NOW - 3, NOW), max_size=3 * CAPACITY).map(sorted)


@given(moments, st.integers(0, 70_000))
def test_the_newest_spans_of_a_second_arrive(times, num):
    spans = [(begin, end, num) for begin, end in zip(times[::2], times[1::2], strict=False)]
    recent = RecentSpans(has_nums=True)
    for span in spans:
        recent.add(*span)
    told = msgspec.json.decode(msgspec.json.encode(recent.spans(NOW)), type=Spans)
    origin_us = int(NOW * 1e6) - TOLD_US
    expected = [
        (max(0.0, begin * 1e6 - origin_us), end * 1e6 - origin_us)
        for begin, end, _ in spans[-CAPACITY:]
    ]
    found = since(told, origin_us)
    # one that ended a tick around the second's beginning may be told or not
    sure = [span for span in expected if span[1] > 2 * TICK_US]
    assert len(sure) <= len(found) <= len([one for one in expected if one[1] > -2 * TICK_US])
    for (begin, end, got), (true_begin, true_end) in zip(
        found[len(found) - len(sure) :], sure, strict=True
    ):
        assert abs(begin - true_begin) <= TICK_US
        assert abs(end - true_end) <= TICK_US
        assert got == min(num, 2**16 - 1)


def test_a_full_ring_leaves_room_in_a_beat():
    recent = RecentSpans(has_nums=True)
    for index in range(2 * CAPACITY):
        recent.add(NOW - 0.9, NOW - 0.001 * (index % 7), 65_535)
    assert len(msgspec.json.encode(recent.spans(NOW))) < 2200


def test_what_has_no_numbers_sends_none():
    recent = RecentSpans()
    recent.add(NOW - 0.5, NOW - 0.25)
    told = recent.spans(NOW)
    assert told.nums == b""
    assert since(told, told.at_us - SPAN_US) == [(500_000, 750_000, 0)]


def test_a_process_tells_of_itself_alone():
    recent = RecentSpans()
    recent.add(NOW - 0.5, NOW - 0.25)
    now = WorkerNumbers(recent=recent.spans(NOW))
    assert added(WorkerNumbers(recent=recent.spans(NOW - 0.25)), now).recent == now.recent
    assert without_gauges(now).recent == Spans()


def test_nothing_was_done():
    assert since(RecentSpans().spans(NOW), 0) == []


def test_columns_that_do_not_fit_together_are_refused():
    for columns in ((b"0123", b"01"), (b"012", b"012"), (b"01", b"01", b"0123")):
        with pytest.raises(ValueError, match=f"columns of {len(columns[0])}, {len(columns[1])}"):
            Spans(1, *columns)
