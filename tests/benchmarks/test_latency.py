"""`slipstream bench latency`: batches one after the other, and what is told of them."""

from __future__ import annotations

import json

import pytest
from tests.helpers.stacks import spareless_stack

from slipstream.cli.main import main
from slipstream_bench.latency import PERCENTILES, _spread

STEP_MS = 5.0


@pytest.fixture(scope="module")
def address():
    with spareless_stack(f"simulated:step_ms={STEP_MS},prefill_us=0") as stack:
        yield stack.address


def test_the_spread_is_of_all_batches():
    row = _spread([0.1, 0.2, 0.3, 0.4, 1.0])
    assert row["latency_mean_s"] == pytest.approx(0.4)
    assert row["latency_p50_s"] == pytest.approx(0.3)
    assert row["latency_p10_s"] == pytest.approx(0.14)
    assert row["latency_p99_s"] == pytest.approx(0.976)
    assert len(row) == 1 + len(PERCENTILES)


def test_batches_are_measured(address, tmp_path, capsys):
    file = tmp_path / "rows.json"
    words = "--batch-size 3 --input-len 7 --output-len 6 --num-iters 4 --num-iters-warmup 1"
    command = ["bench", "latency", "--address", address, *words.split(), "--json", str(file)]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "The model is simulated" in shown
    assert "4 batches of 3, 7 + 6 tokens, after 1 more" in shown
    (row,) = json.loads(file.read_text())
    assert row["batch_size"] == 3
    assert not any(isinstance(value, dict | list) for value in row.values())
    # six steps lie between asking and the last token, five between the first and the last
    spread = [row[f"latency_p{percent}_s"] for percent in (10, 25, 50, 75, 90, 99)]
    assert spread == sorted(spread)
    assert spread[0] >= 5 * STEP_MS / 1e3
    assert 0 < row["ttft_p50_ms"] < 1e3 * row["latency_p99_s"]
    assert row["itl_mean_ms"] > 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--batch-size 0", "--batch-size: got 0, allowed: an integer >= 1"),
        ("--num-iters-warmup -1", "--num-iters-warmup: got -1, allowed: an integer >= 0"),
        ("--input-len 4000 --output-len 4000", "--input-len + --output-len: got 8000, allowed: "),
    ],
)
def test_what_cannot_be_measured_is_refused(address, words, said, capsys):
    assert main(["bench", "latency", "--address", address, *words.split()]) == 2
    assert f"slipstream bench latency: {said}" in capsys.readouterr().err
