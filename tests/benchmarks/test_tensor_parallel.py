"""`slipstream bench tp`: its rows, of plans and of steps in one rank and in two."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream_lab.tensor_parallel.plan_costs import decode_plan, measure_plans


def test_a_measured_plan_is_one_that_ranks_take() -> None:
    plan = decode_plan(33, 5)
    assert (plan.num_requests, plan.num_tokens) == (33, 33)
    assert plan.table_slots.tolist() == [15, 31], "one row in 16 begins a block"
    row = measure_plans(33, 5, num_plans=9)
    assert (row["rows"], row["blocks"]) == (33, 5)
    assert all(float(row[name] or 0) > 0 for name in ("put_us", "take_us"))


def test_rows_of_one_rank_and_of_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    options = ["--runs", "1", "--rows", "8", "--batches", "1,2", "--steps", "4"]
    assert main(["bench", "tp", *options, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "put_us" in shown
    rows = json.loads(file.read_text())
    measured = [(row["ranks"], row["threads"], row["batch"]) for row in rows]
    assert measured == [(1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2)]
    assert all(row["step_us"] > 0 and row["launch_us"] > 0 for row in rows)
