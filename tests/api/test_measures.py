"""From times to rows, with numbers worked out by hand."""

from __future__ import annotations

import pytest

from slipstream.bench.measures import Timeline, summary


def test_a_row_of_two_requests():
    first = Timeline(10.0)
    for time_s, num_tokens in ((10.5, 1), (10.6, 1), (10.8, 2)):
        first.note(time_s, num_tokens)
    second = Timeline(10.1)
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
    timeline = Timeline(1.0)
    timeline.note(1.5, 1)
    row = summary([timeline])
    assert row["ttft_median_ms"] == 500
    assert row["tpot_mean_ms"] is None
    assert row["itl_p99_ms"] is None
