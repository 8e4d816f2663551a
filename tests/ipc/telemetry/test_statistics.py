"""Histograms, and how counts add up, against the simplest way of doing it."""

from __future__ import annotations

import os
import select

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_ipc.messages import OwnProcess, Status
from slipstream_ipc.process import STATUS_FD_VARIABLE, report
from slipstream_ipc.telemetry.histogram import HistogramBuilder
from slipstream_ipc.telemetry.spans import CAPACITY, Spans
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    NOTHING,
    NOTHING_BRIEF,
    BriefHistogram,
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    FrontCounters,
    FrontNumbers,
    Histogram,
    Statistics,
    WorkerCounters,
    WorkerGauges,
    WorkerNumbers,
    added,
    packed_histograms,
    without_gauges,
)
from slipstream_ipc.telemetry.timeline import RecentSpans

SECONDS = st.one_of(st.sampled_from(BOUNDS_S), st.floats(0, 1000), st.just(0.0))


def bucket_of(seconds: float) -> int:
    """The first whose bound, inclusive, is not below it."""
    return next((i for i, bound in enumerate(BOUNDS_S) if seconds <= bound), len(BOUNDS_S))


@given(st.lists(st.tuples(st.lists(SECONDS, max_size=40), st.integers(0, 3))))
def test_observed_is_a_count_by_bucket(parts: list[tuple[list[float], int]]) -> None:
    observed, values = HistogramBuilder(), list[float]()
    for seconds, repeat in parts:
        for one in seconds:
            observed.add(one)
        values += seconds
        if seconds and repeat:
            observed.add(seconds[0], repeat)
            values += [seconds[0]] * repeat
    found = observed.histogram()
    if not values:
        assert found is NOTHING
        return
    expected = [0] * (len(BOUNDS_S) + 1)
    for value in values:
        expected[bucket_of(value)] += 1
    assert found.counts == tuple(expected)
    assert found.num == len(values)
    assert found.sum == pytest.approx(sum(values))


def test_observed_tells_what_was_there_when_it_was_asked():
    observed = HistogramBuilder()
    observed.add(0.5)
    before = observed.histogram()
    observed.add(0.5)
    assert before.num == 1


HISTOGRAM = Histogram(tuple(range(len(BOUNDS_S) + 1)), 2.5)


def test_counters_add_up_and_gauges_do_not():
    before = WorkerNumbers(
        WorkerGauges(num_streams=7),
        WorkerCounters(num_accepted=3, finished={"stop": 1, "abort": 2}, ttft_s=HISTOGRAM),
    )
    after = WorkerNumbers(
        WorkerGauges(num_streams=2),
        WorkerCounters(num_accepted=4, finished={"stop": 5, "length": 1}, ttft_s=HISTOGRAM),
    )
    found = added(without_gauges(before), after)
    assert isinstance(found, WorkerNumbers)
    assert found.gauges == after.gauges
    assert found.counters.num_accepted == 7
    assert found.counters.finished == {"stop": 6, "abort": 2, "length": 1}
    assert found.counters.ttft_s.counts == tuple(2 * count for count in HISTOGRAM.counts)
    assert found.counters.ttft_s.sum == 5.0
    assert found.counters.itl_s is NOTHING
    assert added(None, after) is after


def test_histograms_of_which_one_is_empty_add_up():
    full, empty = CoreCounters(step_s=HISTOGRAM, device_busy_s=1.5), CoreCounters()
    for one, other in ((full, empty), (empty, full)):
        found = added(CoreNumbers(counters=one), CoreNumbers(counters=other))
        assert found.counters == full


def test_counters_by_place_add_up_however_many_each_has():
    few, many = (CoreCounters(num_accepted_tokens_per_pos=each) for each in ((3, 1), (5, 4, 2)))
    for one, other in ((few, many), (many, few)):
        found = added(CoreNumbers(counters=one), CoreNumbers(counters=other)).counters
        assert found.num_accepted_tokens_per_pos == (8, 5, 2)


_LONG = ("ttft_s", "itl_s", "tpot_s", "e2e_s")
_WITH_BUCKETS = ("prompt_tokens", "generation_tokens", "num_answers")


def huge(kind: type, number: int) -> object:
    """Counters, each of which is that large."""
    histogram = Histogram((number,) * (len(BOUNDS_S) + 1), float(number) / 7)
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(kind):
        if field.default is NOTHING:
            values[field.name] = histogram
        elif field.default is NOTHING_BRIEF:
            num = 6 if field.name in _WITH_BUCKETS else 1
            values[field.name] = BriefHistogram((number,) * num, float(number) / 7)
        elif field.default_factory is dict:
            values[field.name] = dict.fromkeys(("stop", "length", "abort", "error"), number)
        elif field.default == ():
            values[field.name] = (number,) * 16
        else:
            values[field.name] = number
    return kind(**values)


def full(**options: bool) -> Spans:
    """As many as there may be."""
    recent = RecentSpans(**options)
    for index in range(2 * CAPACITY):
        recent.add(2**40 - 1.0, 2**40 - 0.001 * (index % 7), 2**16)
    return recent.spans(2**40)


def status_line(numbers: object, num_ranks: int = 0) -> Status:
    """What a parent reads of a beat with these numbers, of a process with so many children."""
    processes = {f"rank-{n}": OwnProcess("ready", 2**22 - n) for n in range(num_ranks)}
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATUS_FD_VARIABLE, str(write_fd))
        report(Status(beat=True, numbers=numbers, processes=processes))  # type: ignore[arg-type]
    os.close(write_fd)
    line = os.read(read_fd, 2**16)
    os.close(read_fd)
    assert len(line) <= select.PIPE_BUF
    return msgspec.json.decode(line, type=Status)


# a trillion of everything: some thousand tokens a second for thirty years
@pytest.mark.parametrize(
    "numbers",
    [
        CoreNumbers(
            CoreGauges(2**31, 2**31, 2**31, 2**31), huge(CoreCounters, 10**12), full(has_nums=True)
        ),
        WorkerNumbers(WorkerGauges(2**31, 2**31, 2**31), huge(WorkerCounters, 10**12), full()),
    ],
)
def test_a_beat_holds_a_process_numbers(numbers):
    told = status_line(numbers).numbers
    assert told is not None
    assert msgspec.to_builtins(told.gauges) == msgspec.to_builtins(numbers.gauges)
    assert told.counters == numbers.counters
    assert told.recent == numbers.recent


def test_the_latest_spans_of_a_core_make_room_for_its_ranks():
    numbers = CoreNumbers(counters=huge(CoreCounters, 10**12), recent=full(has_nums=True))
    told = status_line(numbers, 63).numbers
    assert told == msgspec.structs.replace(numbers, recent=Spans())


COUNTS = st.lists(st.integers(0, 2**63 - 1), min_size=len(BOUNDS_S) + 1, max_size=len(BOUNDS_S) + 1)


@given(COUNTS, st.floats(0, 1e12))
def test_packed_histograms_are_the_same_behind_the_wire(counts: list[int], total: float) -> None:
    counters = CoreCounters(num_steps=7, step_s=Histogram(tuple(counts), total))
    line = msgspec.json.encode(packed_histograms(counters))
    assert len(line) <= len(msgspec.json.encode(counters))
    found = msgspec.json.decode(line, type=CoreCounters)
    assert found == counters
    assert found.step_s.packed == b""
    assert msgspec.json.decode(msgspec.json.encode(found), type=CoreCounters) == counters


def test_a_large_count_among_zeros_is_not_packed() -> None:
    counters = CoreCounters(step_s=Histogram((10**12, *[0] * len(BOUNDS_S)), 1.0))
    assert packed_histograms(counters) == counters


def test_packed_histograms_take_little_more_than_half_of_their_bytes() -> None:
    counters = huge(WorkerCounters, 10**12)
    assert isinstance(counters, WorkerCounters)
    plain = [len(msgspec.json.encode(getattr(counters, name))) for name in _LONG]
    packed = packed_histograms(counters)
    small = [len(msgspec.json.encode(getattr(packed, name))) for name in _LONG]
    assert all(20 * one <= 11 * other for one, other in zip(small, plain, strict=True))


@pytest.mark.parametrize(
    "histogram",
    [
        [[], 1.0, "AAAA"],  # three bytes
        [[], 1.0, "/" * 298 + "8="],  # counts beyond 63 bits
        [[1], 1.0, ""],
        [[1] * (len(BOUNDS_S) + 1), 1.0, "AAAA"],  # both
    ],
)
def test_a_malformed_histogram_is_refused(histogram: list[object]) -> None:
    with pytest.raises(msgspec.ValidationError, match="histogram"):
        msgspec.json.decode(msgspec.json.encode(histogram), type=Histogram)


def test_numbers_that_do_not_fit_stay_away_and_the_beat_is_told():
    answers = {f"200 /{n:0200}": n for n in range(100)}
    status = status_line(FrontNumbers(counters=FrontCounters(answers)))
    assert status.beat
    assert status.numbers is None


def test_statistics_travel():
    told = Statistics(1.5, {})
    line = msgspec.json.encode(told)
    assert msgspec.json.decode(line, type=Statistics) == told
