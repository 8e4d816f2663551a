"""`slipstream bench interval`: the span in which all places are taken, and its numbers."""

from __future__ import annotations

import json
import os
import time

import pytest

from slipstream.cli.main import main
from slipstream.errors import BadRequestError
from slipstream_bench.common.measures import RequestTimeline, steady
from slipstream_bench.common.process_census import CpuSamples, process_cpu_s
from slipstream_lab.interval import _compare


def _timeline(sent_s, times_s, num_tokens=None):
    timeline = RequestTimeline(sent_s)
    timeline.times_s = list(times_s)
    timeline.num_tokens = len(times_s) if num_tokens is None else num_tokens
    timeline.ended_s = times_s[-1]
    return timeline


def test_the_span_is_while_all_places_are_taken():
    timelines = [
        _timeline(0.0, [1.0, 2.0, 3.0]),
        _timeline(0.0, [1.5, 2.5, 3.5, 4.5, 5.5]),
        _timeline(3.0, [3.25, 4.0, 5.0, 6.0], num_tokens=7),
    ]
    span = steady(timelines, 2)
    assert (span.begin_s, span.end_s) == (1.5, 5.5)
    # 2.0 3.0 | 2.5 3.5 4.5 5.5 | 3.25, and 4.0 5.0 of two tokens each
    assert span.num_chunks == 9
    assert span.num_tokens == pytest.approx(2 + 4 + 5)
    assert span.tokens_per_s == pytest.approx(11 / 4)
    assert span.ttfts_ms == pytest.approx([250.0])
    assert sorted(span.gaps_ms) == pytest.approx([750.0, *[1000.0] * 7])


def test_failures_are_not_part_of_it_and_a_load_too_short_has_none():
    done = _timeline(0.0, [1.0, 2.0])
    failed = RequestTimeline(0.0, failure="timeout")
    assert steady([failed, done], 1).num_chunks == 1
    assert steady([failed, done], 2) is None
    assert steady([done, _timeline(2.0, [3.0, 4.0])], 2) is None  # they never ran at once
    assert steady([], 1) is None


def test_cpu_time_is_told_by_process():
    with CpuSamples({"me": os.getpid()}) as samples:
        begin_s, used_s = time.perf_counter(), time.process_time()
        while time.process_time() - used_s < 0.2:
            pass
        end_s = time.perf_counter()
    assert samples.between(begin_s, end_s)["me"] > 0.1
    assert samples.between(end_s, end_s)["me"] == 0


def test_the_cpu_time_of_one_process_is_its_own():
    before = process_cpu_s(os.getpid())
    used_s = time.process_time()
    while time.process_time() - used_s < 0.1:
        pass
    assert process_cpu_s(os.getpid()) - before >= 0.05
    with pytest.raises(BadRequestError, match="pid"):
        process_cpu_s(2**30)


def test_throughput_is_compared_under_the_same_load():
    rows = [
        {"transport": "zmq", "concurrency": c, "interval": i, "output_tokens_per_s": t}
        for c, i, t in [(64, "1", 100.0), (64, "auto", 150.0), (256, "10", 80.0)]
    ]
    _compare(rows)
    assert [row.get("over_interval_1") for row in rows] == [1.0, 1.5, None]


@pytest.mark.parametrize(
    "words", ["--intervals 0", "--concurrencies 0", "--output-len 1", "--runs 0"]
)
def test_what_cannot_be_measured_is_refused(words, capsys):
    assert main(["bench", "interval", *words.split()]) == 2
    assert f"{words.split()[0]}: got" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["zmq", "http"])
def test_intervals_are_measured(way, tmp_path, capsys):
    rows_file, picture = tmp_path / "rows.json", tmp_path / "bars.png"
    words = ["bench", "interval", "--quick", "--output-len", "40"]
    words += ["--concurrencies", "3", "--intervals", "1,5,auto"]
    words += ["--http"] if way == "http" else []
    assert main([*words, "--json", str(rows_file), "--png", str(picture)]) == 0
    rows = {row["interval"]: row for row in json.loads(rows_file.read_text())}
    assert rows.keys() == {"1", "5", "auto"}
    processes = {"core", "worker", "client"} | ({"http"} if way == "http" else set())
    for row in rows.values():
        assert row["transport"] == way
        assert row["output_tokens_per_s"] > 0
        assert all(row[f"{name}_cpu_us_per_token"] > 0 for name in processes)
        assert row.keys() >= {"ttft_median_ms", "itl_p99_ms", "over_interval_1"}
    assert rows["5"]["tokens_per_delta"] > 2
    assert rows["1"]["tokens_per_delta"] >= 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "simulated" in capsys.readouterr().out
