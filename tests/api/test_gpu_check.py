"""The check of a card, dry on the CPU: every part runs, is judged, and can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.bench.gpu_check import exactness, sampling
from slipstream.bench.gpu_check.__main__ import main
from slipstream.bench.gpu_check.device_use import idle_share
from slipstream.bench.gpu_check.drive import Ended, Output, decode_intervals_s
from slipstream.bench.gpu_check.report import Report, read_rows, write_files
from slipstream.bench.gpu_check.setting import PARTS, Setting

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"


def run_script(*arguments: str, python: str = sys.executable) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": python}
    environment.pop("PYTHONPATH", None)
    return subprocess.run(
        [str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


@pytest.mark.slow
def test_dry_run_on_the_cpu(tmp_path: Path) -> None:
    done = run_script("--device", "cpu", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (as_json,) = tmp_path.glob("gpu-check-*-cpu-*-quick.json")
    rows: list[dict[str, Any]] = json.loads(as_json.read_text())
    assert tuple(dict.fromkeys(row["part"] for row in rows)) == PARTS
    assert all(isinstance(v, str | int | float | bool | None) for r in rows for v in r.values())
    by_case = {(row["part"], row["case"]): row for row in rows}
    assert len(by_case) == len(rows)
    assert all(row["ok"] is not False and "skipped" not in row for row in rows)

    assert by_case["environment", "machine"]["torch_version"] == torch.__version__
    assert by_case["environment", "ceilings"]["bandwidth_gb_per_s"] > 0
    for name in ("llama", "gemma2", "qwen3_moe", "gpt_oss"):
        exact = by_case["exactness", f"{name} float32"]
        assert exact["ok"] is True
        assert exact["num_same_requests"] == exact["num_requests"] == 4
        rounded = by_case["exactness", f"{name} bfloat16"]
        assert rounded["ok"] is True
        assert rounded["num_likeliest_in_float32"] + rounded["num_near_ties"] == 32
    sampled = [row for row in rows if row["part"] == "sampling"]
    assert len(sampled) == 8
    assert all(row["ok"] is True for row in sampled)
    for row in (row for row in rows if row["part"] == "throughput"):
        assert row["output_tokens_per_s"] == pytest.approx(
            row["batch"] / row["step_median_ms"] * 1e3, rel=0.01
        )
        assert 0 < row["share_of_bound"] < 1
    for row in (row for row in rows if row["part"] == "overlap"):
        assert row["num_steps"] > 50
        assert 0 <= row["device_idle_share"] < 1
    told = by_case["overlap", "stack, text, top-5, 2 stop strings"]
    assert told["ok"] is True
    assert told["client_output_chars"] > told["client_output_tokens"] == 800
    assert "over_bare_loop_ms" in told

    table = as_json.with_suffix(".md").read_text()
    assert all(f"## {part}\n" in table for part in PARTS)
    assert all(f"| {row['case']} |" in table for row in rows)
    # progress: each line with the seconds since the start, which never go back
    seconds = [float(line[1:8]) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(seconds) >= len(rows)
    assert seconds == sorted(seconds)


def test_what_a_python_lacks_and_no_wheel_brings_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    done = run_script("--wheels", str(tmp_path), python=str(python))
    assert done.returncode == 2
    assert "has no numpy" in done.stderr
    assert f"--wheels ({tmp_path}) no numpy-*.whl" in done.stderr


def test_a_folder_that_is_not_named_is_asked_for() -> None:
    done = run_script("--out")
    assert done.returncode != 0
    assert "--out needs a folder" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a card")
def test_a_part_that_fails_stops_no_other_and_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["--parts", "environment", "throughput", "--quick", "--out", str(tmp_path)])
    assert code == 1
    (as_json,) = tmp_path.glob("*.json")
    rows = json.loads(as_json.read_text())
    assert [(row["part"], row["case"], row["ok"]) for row in rows] == [
        ("environment", "failed", False),
        ("throughput", "failed", False),
    ]
    assert "FAILED: throughput: failed" in capfd.readouterr().out


@pytest.fixture
def report(tmp_path: Path) -> Report:
    return Report("part", tmp_path / "rows.jsonl", 0.0)


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path, float("inf"))


def test_one_wrong_token_fails_exactness(
    setting: Setting, report: Report, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exactness._outputs

    def outputs(*arguments: Any) -> list[Output]:
        right = real(*arguments)
        right[1].token_ids[5] = (right[1].token_ids[5] + 1) % 331
        return right

    monkeypatch.setattr(exactness, "QUICK_ARCHITECTURES", ("llama",))
    monkeypatch.setattr(exactness, "_outputs", outputs)
    exactness.run(setting, report)
    in_float32, in_bfloat16 = read_rows(report.path)
    assert in_float32["ok"] is False
    assert (in_float32["num_same_requests"], in_float32["num_wrong_requests"]) == (3, 1)
    assert in_bfloat16["ok"] is False  # 1 of 32 tokens, and more where the others go on from it
    assert in_bfloat16["num_wrong"] >= 1


def test_out_of_time_is_a_row(setting: Setting, report: Report) -> None:
    exactness.run(replace(setting, deadline_s=0.0), report)
    rows = read_rows(report.path)
    assert len(rows) == 8
    assert {row["skipped"] for row in rows} == {"out of time"}


def test_a_biased_sampler_shows() -> None:
    probs = np.full(50, 0.02)
    rng = np.random.default_rng(0)
    fair = np.bincount(rng.choice(50, 5000, p=probs), minlength=50)
    tilted = np.linspace(0.015, 0.025, 50)
    biased = np.bincount(rng.choice(50, 5000, p=tilted / tilted.sum()), minlength=50)
    assert abs(sampling._chi_square_deviations(fair, probs)) < 3
    assert sampling._chi_square_deviations(biased, probs) > 5


def test_idle_share() -> None:
    assert idle_share([(0, 10)]) == 0
    assert idle_share([(5, 6), (0, 1), (0.5, 2)]) == pytest.approx(3 / 6)
    assert idle_share([(0, 10), (2, 3), (9, 12)]) == 0
    with pytest.raises(ValueError, match="saw nothing"):
        idle_share([])


def test_decode_intervals_are_those_of_full_steps() -> None:
    steps = [Ended(0, 3, 4), Ended(1, 4, 4), Ended(3, 4, 4), Ended(7, 4, 5), Ended(9, 4, 4)]
    assert decode_intervals_s(steps, 4) == [1, 2, 2]


def test_rows_survive_the_death_of_their_writer(report: Report) -> None:
    report.add("whole", None, value_ms=1.5)
    with report.path.open("a") as file:
        file.write('{"part": "par')
    assert [row["case"] for row in read_rows(report.path)] == ["whole"]
    assert read_rows(report.path.with_name("none")) == []


def test_a_table_per_shape_of_rows(tmp_path: Path, report: Report) -> None:
    report.add("a", True, value=1)
    report.add("b", False, value=2)
    report.add("c", other="x|y")
    _, as_table = write_files(tmp_path / "deep" / "er", "name", read_rows(report.path))
    lines = as_table.read_text().splitlines()
    assert lines.count("| case | ok | value |") == 1
    assert lines.count("| case | ok | other |") == 1
    assert "| c |  | x\\|y |" in lines
