"""From times to rows, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from slipstream_bench.common.measures import RequestTimeline, median_row, summary


def test_a_row_of_two_requests():
    first = RequestTimeline(10.0)
    for time_s, num_tokens in ((10.5, 1), (10.6, 1), (10.8, 2)):
        first.note(time_s, num_tokens)
    second = RequestTimeline(10.1)
    for time_s, num_tokens in ((10.2, 1), (12.0, 5)):
        second.note(time_s, num_tokens)
    row = summary([first, second])
    assert row["duration_s"] == 2.0  # from the first request to the last token
    assert row["requests_per_s"] == 1.0
    assert row["output_tokens"] == 10
    assert row["output_tokens_per_s"] == 5.0
    assert row["ttft_mean_ms"] == pytest.approx(300)
    assert row["ttft_p99_ms"] == pytest.approx(496)
    assert row["tpot_mean_ms"] == pytest.approx((100 + 360) / 2)
    assert row["itl_median_ms"] == pytest.approx(200)


def test_single_tokens_have_nothing_between_them():
    timeline = RequestTimeline(1.0)
    timeline.note(1.5, 1)
    row = summary([timeline])
    assert row["ttft_median_ms"] == 500
    assert row["tpot_mean_ms"] is None
    assert row["itl_p99_ms"] is None


def test_failures_are_counted_and_nothing_else():
    done = RequestTimeline(5.0, prompt_len=30)
    done.note(6.0, 10)
    failed = [RequestTimeline(4.0, failure="timeout"), RequestTimeline(4.5, failure="http_503")]
    for timeline in failed:
        timeline.note(9.0, 1000)
    row = summary([done, *failed])
    assert (row["completed_requests"], row["failed_requests"]) == (1, 2)
    assert (row["failed_timeout"], row["failed_http_503"]) == (1, 1)
    assert row["duration_s"] == 2.0  # the load began with a request that failed
    assert row["output_tokens_per_s"] == 5.0
    assert row["total_tokens_per_s"] == 20.0
    assert row["e2e_mean_s"] == 1.0
    assert row["chunks_per_token"] == 0.1


def test_a_row_of_nothing_but_failures():
    row = summary([RequestTimeline(4.0, failure="connect")])
    assert (row["completed_requests"], row["failed_connect"], row["output_tokens"]) == (0, 1, 0)
    numbers = ("requests_per_s", "output_tokens_per_s", "total_tokens_per_s", "tokens_counted_by")
    latencies = ("ttft_mean_ms", "tpot_median_ms", "itl_p99_ms", "e2e_mean_s", "chunks_per_token")
    assert all(row[name] is None for name in (*numbers, *latencies))


def test_prompts_of_unknown_length_have_no_total():
    timelines = [RequestTimeline(0.0, prompt_len=30), RequestTimeline(0.0)]
    for timeline in timelines:
        timeline.note(1.0, 1)
    row = summary(timelines)
    assert row["output_tokens_per_s"] == 2.0
    assert (row["prompt_tokens"], row["total_tokens_per_s"]) == (None, None)


def test_tpot_reaches_to_the_end_of_the_answer_itl_to_its_last_content():
    timeline = RequestTimeline(0.0)
    timeline.note(1.0, 1)
    timeline.note(1.5, 1)
    timeline.num_tokens = 5  # as the server counts
    timeline.ended_s = 3.0
    row = summary([timeline], percentiles=(50, 99.9))
    assert row["tpot_mean_ms"] == 500
    assert row["itl_p99_9_ms"] == 500
    assert (row["e2e_p50_s"], row["duration_s"]) == (3.0, 3.0)
    assert "itl_p99_ms" not in row


def test_medians_of_runs():
    rows = [
        {"model": "m", "is_streamed": True, "run": 1, "x_ms": 3.0, "n": 8, "failed_requests": 0},
        {"model": "m", "is_streamed": True, "run": 2, "x_ms": None, "n": 9, "failed_requests": 2},
        {"model": "m", "is_streamed": True, "run": 3, "x_ms": 5.0, "n": 10, "failed_timeout": 2},
    ]
    assert median_row(rows) == {
        "model": "m",
        "is_streamed": True,
        "run": 2,
        "x_ms": 4.0,
        "n": 9,
        "failed_requests": 2,
        "failed_timeout": 2,
    }
