"""/live's numbers out of statistics, and of a real stack."""

from __future__ import annotations

import bisect
import json
import random
import urllib.request
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.patience import PATIENCE_S, Patience
from tests.helpers.stacks import spareless_stack

from slipstream.http.admin.live import LiveStatistics, percentile
from slipstream_ipc.telemetry.statistics import (
    BOUNDS_S,
    NOTHING,
    CoreCounters,
    CoreGauges,
    CoreNumbers,
    Histogram,
    ProcessStatistics,
    Statistics,
    WorkerCounters,
    WorkerNumbers,
)
from slipstream_ipc.telemetry.timeline import RecentSpans

BEGIN = 5000.0


def histogram(*values: float) -> Histogram:
    counts = [0] * (len(BOUNDS_S) + 1)
    for value in values:
        counts[bisect.bisect_left(BOUNDS_S, value)] += 1
    return Histogram(tuple(counts), sum(values))


def core_at(at_s: float, busy_s: float = 0.0, recent: RecentSpans | None = None) -> CoreNumbers:
    return CoreNumbers(
        CoreGauges(num_running=3, num_waiting=2, num_blocks=100, num_used_blocks=25),
        CoreCounters(device_busy_s=busy_s),
        recent=(recent or RecentSpans()).spans(at_s),
    )


def worker_at(
    at_s: float, num_tokens: int, ttft: Histogram = NOTHING, recent: RecentSpans | None = None
) -> WorkerNumbers:
    return WorkerNumbers(
        counters=WorkerCounters(num_delivered_tokens=num_tokens, ttft_s=ttft),
        recent=(recent or RecentSpans()).spans(at_s),
    )


def statistics(at_s: float, core: CoreNumbers | None, **workers: WorkerNumbers) -> Statistics:
    processes = {
        name: ProcessStatistics("ready", 1, 0, numbers=each) for name, each in workers.items()
    }
    processes["core"] = ProcessStatistics("ready", 1, 2, numbers=core)
    return Statistics(at_s, processes)


def live_numbers(*given: Statistics) -> Any:
    live = LiveStatistics()
    for each in given:
        live.add(each)
    return json.loads(live.response("m", {}).body)


def test_gauges_are_the_newest():
    shown = live_numbers(statistics(BEGIN, core_at(BEGIN)))
    assert (shown["running"], shown["waiting"], shown["cache_use"]) == (3, 2, 0.25)
    assert shown["processes"] == {"core": {"state": "ready", "restarts": 2, "pid": 1}}
    assert shown["model"] == "m"
    assert shown["tokens_per_s"] is None
    assert shown["device_busy"] is None


def test_nobody_has_told_anything():
    live = LiveStatistics()
    shown = json.loads(live.response(None, {"core": "starting"}).body)
    assert shown["processes"] == {"core": {"state": "starting", "restarts": 0, "pid": None}}
    assert shown["running"] is None
    live.add(statistics(BEGIN, core_at(BEGIN)))
    assert json.loads(live.response(None, {}).body)["running"] == 3


def test_rates_are_of_the_last_two_seconds_by_the_processes_own_clocks():
    tokens = {0: 0, 1: 10_000, 2: 10_500, 3: 11_000, 4: 11_500}
    shown = live_numbers(
        *(
            statistics(
                BEGIN + at,
                core_at(BEGIN + at - 0.1, busy_s=0.75 * at),
                one=worker_at(BEGIN + at - 0.2 * (at % 2), num),
                two=worker_at(BEGIN + at, num),
            )
            for at, num in tokens.items()
        )
    )
    assert shown["tokens_per_s"] == pytest.approx(1000.0)
    assert shown["device_busy"] == pytest.approx(0.75)


def test_latencies_are_of_what_came_in_the_last_ten_seconds():
    old = [9.0] * 50
    shown = live_numbers(
        statistics(BEGIN, None, worker=worker_at(BEGIN, 0, histogram(*old))),
        statistics(BEGIN + 9, None, worker=worker_at(BEGIN + 9, 0, histogram(*old, 0.02))),
        statistics(
            BEGIN + 10, None, worker=worker_at(BEGIN + 10, 0, histogram(*old, 0.02, 0.02, 0.5))
        ),
    )
    assert shown["ttft_s"]["num"] == 3
    assert 0.015 <= shown["ttft_s"]["p50"] <= 0.025
    assert 0.4 <= shown["ttft_s"]["p99"] <= 0.6
    assert shown["itl_s"] == {"num": 0, "p50": None, "p99": None}


@given(st.lists(st.floats(0.0001, 99.0), min_size=1), st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_a_percentile_lies_in_the_bucket_of_the_true_one(values, share):
    found = percentile(histogram(*values).counts, share)
    true = sorted(values)[max(0, -(-round(share * len(values) * 1e6) // 10**6) - 1)]
    bucket = bisect.bisect_left(BOUNDS_S, true)
    lower = BOUNDS_S[bucket - 1] if bucket else 0.0
    assert lower <= found <= BOUNDS_S[bucket] + 1e-9


def test_the_timeline_has_both_lanes_on_one_clock():
    steps, work = RecentSpans(has_nums=True), RecentSpans()
    for index in range(10):
        steps.add(BEGIN - 1 + index / 10, BEGIN - 0.9 + index / 10, 64)
    for index in range(8):
        work.add(BEGIN - 0.9 + index / 10, BEGIN - 0.89 + index / 10)
    shown = live_numbers(
        statistics(
            BEGIN + 0.1,
            core_at(BEGIN + 0.05, recent=steps),
            worker=worker_at(BEGIN - 0.15, 0, recent=work),
        )
    )["timeline"]
    assert shown["span_us"] == 1_000_000
    # the second ends where the worker has told last, before all steps are over
    assert len(shown["steps"]) == 9
    for index, (begin, end, rows) in enumerate(shown["steps"]):
        assert begin == pytest.approx(100_000 * index + 150_000, abs=30)
        assert end == pytest.approx(min(1_000_000, 100_000 * index + 250_000), abs=30)
        assert rows == 64
    assert len(shown["work"]) == 8
    for index, (begin, end) in enumerate(shown["work"]):
        assert begin == pytest.approx(100_000 * index + 250_000, abs=30)
        assert end == pytest.approx(100_000 * index + 260_000, abs=30)


def test_who_is_silent_for_long_has_no_lane():
    steps = RecentSpans(has_nums=True)
    steps.add(BEGIN - 0.5, BEGIN - 0.25, 1)
    shown = live_numbers(
        statistics(BEGIN + 3, core_at(BEGIN, recent=steps), worker=worker_at(BEGIN + 3, 0))
    )
    assert shown["timeline"]["steps"] == []


def test_who_asks_again_gets_the_same_bytes():
    live = LiveStatistics()
    live.add(statistics(BEGIN, core_at(BEGIN)))
    first = live.response("m", {})
    assert live.response("m", {}) is first
    assert live.response("other", {}) is not first
    live.add(statistics(BEGIN + 0.5, replace(core_at(BEGIN), gauges=CoreGauges())))
    assert json.loads(live.response("m", {}).body)["running"] == 0


def test_what_is_kept_is_bounded():
    live = LiveStatistics()
    for index in range(1000):
        live.add(statistics(BEGIN + index / 2, core_at(BEGIN + index / 2)))
    assert len(live._reports) < 30


def test_a_stack_tells_what_runs():
    with (
        spareless_stack("simulated:step_ms=5", http_port=0) as stack,
        stack.client() as client,
    ):
        streams = [
            client.stream(f"{random.random()}", max_tokens=4000, ignore_eos=True) for _ in range(4)
        ]
        patience = Patience()
        while True:
            with urllib.request.urlopen(f"{stack.http_address}/live", timeout=PATIENCE_S) as answer:
                assert answer.headers["cache-control"] == "no-store"
                live = json.load(answer)
            timeline = live["timeline"]
            rates = (live["tokens_per_s"], live["device_busy"], live["itl_s"]["p99"])
            is_told = len(timeline["steps"]) > 20 and timeline["work"] and all(rates)
            if live["running"] == 4 and is_told:
                break
            patience.wait(live)
        for stream in streams:
            stream.close()
    assert 0 < live["device_busy"] <= 1
    assert 0 < live["cache_use"] <= 1
    assert {"core", "worker", "http"} <= live["processes"].keys()
    assert all(each["restarts"] == 0 for each in live["processes"].values())
    begins = [begin for begin, _, _ in timeline["steps"]]
    assert begins == sorted(begins)
    assert all(0 <= begin <= end <= 1_000_000 for begin, end, _ in timeline["steps"])
    assert max(rows for _, _, rows in timeline["steps"]) <= 4
    took = sorted(end - begin for begin, end, _ in timeline["steps"])
    assert took[len(took) // 2] > 4_000
    # turns of one loop; on a busy machine some may handle steps from before the timeline
    edges = [edge for span in timeline["work"] for edge in span]
    assert edges == sorted(edges)
    assert 0 <= edges[0] < edges[-1] <= 1_000_000
