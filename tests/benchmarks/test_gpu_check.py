"""The check of a card, dry on the CPU: every part runs, is judged, and can fail."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import replace
from datetime import UTC, datetime
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.helpers.patience import PATIENCE_S
from tests.helpers.processes import started

from slipstream_core.forward.product_patterns import Launches
from slipstream_core.runner.kv_cache_size import DeviceMemoryUse, cache_bytes
from slipstream_core.sampling.penalties import most_bytes
from slipstream_lab.common.bare_loop import LoopOutput, LoopStep, decode_intervals_s
from slipstream_verify.gpu_check import bounds, prediction
from slipstream_verify.gpu_check.__main__ import _environment, _SectionRun, _write_known, main
from slipstream_verify.gpu_check.bounds import ForwardWork, work_of
from slipstream_verify.gpu_check.device_use import idle_share
from slipstream_verify.gpu_check.gpu_report import GpuReport, read_rows, write_files
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.sections import (
    attention,
    census,
    decode,
    exactness,
    prefill,
    ranks,
    sampling,
    steady,
)
from slipstream_verify.gpu_check.setting import GRACE_S, PARTS, SHAPES, GpuSetting

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "gpu-check"


def run_script(
    *arguments: str, python: str = sys.executable, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """path: of Python, before the script adds to it."""
    environment = {**os.environ, "PYTHON": python}
    environment.pop("PYTHONPATH", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=20 * PATIENCE_S,
    )


def rows_of(part: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Of a part's dry run, which is to succeed; what holds for each of them is checked."""
    done = run_script(part, "--dry-run", "--out", str(folder), *more)
    assert done.returncode == 0, done.stdout + done.stderr
    (as_json,) = folder.glob(f"gpu-check-{part}-*-cpu-*-quick.json")
    rows: list[dict[str, Any]] = json.loads(as_json.read_text())
    assert all(isinstance(v, str | int | float | bool | None) for r in rows for v in r.values())
    by_case = {(row["section"], row["case"]): row for row in rows}
    assert len(by_case) == len(rows)
    assert all(row["ok"] is not False for row in rows)
    assert by_case["environment", "machine"]["torch_version"] == torch.__version__
    assert len(by_case["environment", "machine"]["source_sha256"]) == 16
    assert by_case["environment", "machine"]["date"].endswith("+00:00")
    assert by_case["environment", "ceilings"]["bandwidth_gb_per_s"] > 0

    sections = list(dict.fromkeys(row["section"] for row in rows))
    table = as_json.with_suffix(".md").read_text()
    assert all(f"## {section}\n" in table for section in sections)
    assert all(f"| {row['case']} |" in table for row in rows)
    # progress: each line with the seconds since the start, which never go back
    seconds = [float(line[1:8]) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(seconds) >= len(rows)
    assert seconds == sorted(seconds)
    return rows


def test_dry_run_of_exactness(tmp_path: Path) -> None:
    rows = rows_of("exactness", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("exactness")
    by_case = {(row["section"], row["case"]): row for row in rows}
    for name in ("llama", "gemma2", "qwen3_moe", "gpt_oss"):
        exact = by_case["tokens", f"{name} float32"]
        assert exact["ok"] is True
        assert exact["num_same_requests"] == exact["num_requests"] == 4
        rounded = by_case["tokens", f"{name} bfloat16"]
        assert rounded["ok"] is True
        assert rounded["num_likeliest_in_float32"] + rounded["num_near_ties"] == 32
    sampled = [row for row in rows if row["section"] == "sampling"]
    assert len(sampled) == 9
    assert all(row["ok"] is True for row in sampled)
    # what needs a card says that it was not done
    assert by_case["attention", "attention"]["skipped"]


def test_dry_run_of_decode(tmp_path: Path) -> None:
    rows = rows_of("decode", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("decode")
    assert not any("skipped" in row for row in rows if row["section"] != "compiling")
    for shape in SHAPES:
        of_shape = [row for row in rows if row["section"] == f"decode {shape}"]
        loads = [row for row in of_shape if "batch" in row["case"]]
        assert [row["case"] for row in loads] == [
            "context 16, batch 4",
            "context 16, batch 1",
            "context 48, batch 3",
            "context 48, batch 1",
        ]
        for row in loads:
            assert row["ok"] is True
            assert row["num_steps"] >= 20
            assert row["output_tokens_per_s"] > 0
            assert 0 < row["share_of_bound"] < 1
            assert row["worker_cpu_us_per_token"] > 0
            # there are no graphs on a CPU, and tiny models have no goals
            assert row["floor_ms"] is row["meets_goal"] is None
    overlap = [row for row in rows if row["section"] == "overlap"]
    assert len(overlap) == 4
    assert all(row["num_steps"] > 50 and 0 <= row["device_idle_share"] < 1 for row in overlap)
    told = overlap[-1]
    assert told["ok"] is True
    assert told["client_output_chars"] > told["client_output_tokens"] == 800
    assert "over_bare_loop_ms" in told


def test_dry_run_of_prefill(tmp_path: Path) -> None:
    rows = rows_of("prefill", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("prefill")
    assert not any("skipped" in row for row in rows)
    by_case = {(row["section"], row["case"]): row for row in rows}
    for shape in SHAPES:
        one = by_case[f"prefill {shape}", "1 of 256 tokens to a step"]
        assert one["num_steps"] == 12
        assert one["prompt_tokens_per_s"] == pytest.approx(256e3 / one["step_median_ms"], rel=0.01)
        assert one["share_of_bound"] > one["share_of_bf16_rate"] > 0
        assert by_case[f"prefill {shape}", "8 of 32 tokens to a step"]["num_steps"] == 12
    theirs = by_case["peer", "transformers, batch 4"]
    ours = by_case["peer", "ours, batch 4"]
    assert ours["ok"] is theirs["ok"] is True
    assert theirs["ours_over_theirs"] == pytest.approx(
        ours["output_tokens_per_s"] / theirs["output_tokens_per_s"], rel=0.01
    )
    assert by_case["bench overlap", "in_loop, stop2_logprobs5"]["tpot_ms"] > 0
    for interval in (1, 10):
        assert by_case["bench interval", f"interval {interval}"]["output_tokens_per_s"] > 0
    bytes_per_token = {
        name: by_case["bench protocol", f"{name}, log-probabilities top5"]["bytes_per_token"]
        for name in ("cumulative", "delta")
    }
    assert bytes_per_token["cumulative"] > bytes_per_token["delta"] > 0
    of_ids = [row for row in rows if row["section"] == "bench gc"]
    assert len(of_ids) == 2 * 4
    for row in of_ids:
        # a step is the device's time and behind it the host's
        assert row["tokens_per_s"] < 1e3 * row["batch"] / row["step_ms"] * 1.5
        assert row["host_us_per_step"] > 0
        assert (row["num_frozen_objects"] > 1000) == ("not" not in row["case"])


def test_dry_run_of_census(tmp_path: Path) -> None:
    rows = rows_of("census", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("census")
    for shape in SHAPES:
        of_shape = [row for row in rows if row["section"] == f"census {shape}"]
        steps = {row["case"]: row for row in of_shape if "launches" in row}
        assert list(steps) == [
            "decode of 1",
            "decode of 4",
            "decode of 4, context 16",
            "prefill of 128",
            "3 rows and a chunk of 16",
        ]
        for case, step in steps.items():
            assert step["ok"] is True
            assert step["is_replay"] is False  # nothing is recorded on a CPU
            kernels = [row for row in of_shape if row["case"].startswith(f"{case}: ")]
            assert sum(row["count"] for row in kernels) == pytest.approx(step["launches"], abs=0.5)
            assert sum(row["us"] for row in kernels) == pytest.approx(step["busy_us"], rel=0.01)
            assert sum(row["share_of_busy"] for row in kernels) == pytest.approx(1, abs=0.01)
            assert step["idle_us"] == pytest.approx(step["step_us"] - step["busy_us"], abs=0.2)


def test_dry_run_of_steady(tmp_path: Path) -> None:
    rows = rows_of("steady", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("steady")
    by_case = {(row["section"], row["case"]): row for row in rows}
    for shape in SHAPES[:2]:
        alone = by_case[f"steady {shape}", "decoding alone"]
        loop = by_case[f"steady {shape}", "closed loop of 4"]
        assert alone["ok"] is loop["ok"] is True
        assert loop["num_requests"] == 20
        assert loop["share_of_decode"] == pytest.approx(
            loop["output_tokens_per_s"] / alone["output_tokens_per_s"], rel=0.01
        )
        assert 0 < loop["bound_share_of_decode"] <= 1
    published = [row for row in rows if row["case"].startswith("published: ")]
    assert published
    assert all(row["source"].startswith("https://") for row in published)


def test_dry_run_of_tiles(tmp_path: Path) -> None:
    """The kernels themselves: tests/engine_core/kernels/triton."""
    rows = rows_of("tiles", tmp_path)
    assert list(dict.fromkeys(row["section"] for row in rows)) == names_of("tiles")
    if find_spec("triton") is None:
        assert rows[-1]["skipped"] == "Triton is not installed"


@pytest.mark.skipif(shutil.which("compute-sanitizer") is not None, reason="it is there")
def test_dry_run_of_sanitizer(tmp_path: Path) -> None:
    """The cases themselves: tests/engine_core/kernels/triton."""
    rows = rows_of("sanitizer", tmp_path)
    assert [row["case"] for row in rows[-2:]] == ["memcheck", "racecheck"]
    assert {row["skipped"] for row in rows[-2:]} == {"there is no compute-sanitizer on the PATH"}


def test_dry_run_of_ranks(tmp_path: Path) -> None:
    rows = rows_of("ranks", tmp_path, "--tensor-parallel-size", "2")
    measured = [row for row in rows if row["section"] == names_of("ranks")[1]]
    assert [row["case"] for row in measured] == [
        f"{ranks}, batch {batch}" for ranks in ("1 rank", "2 ranks") for batch in (1, 4)
    ]
    for row, alone in zip(measured, measured[:2] * 2, strict=True):
        over_one = row["step_median_ms"] / alone["step_median_ms"]
        assert row["over_one_rank"] == pytest.approx(over_one, rel=0.01)
        assert row["share_of_bound"] > 0
        assert row["goal_over_one_rank"] == (0.62 if row["case"] == "2 ranks, batch 4" else None)


def test_ranks_without_as_many_cards_are_left_out(
    setting: GpuSetting, report: GpuReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    ranks.run(replace(setting, device="cuda"), SHAPES[1])
    (row,) = [row for row in read_rows(report.path) if row["case"] == "cards"]
    assert row["skipped"] == "2 ranks need as many cards, here are 1"


def test_the_largest_load_fits_the_reference_card() -> None:
    """Qwen3-0.6B at 1,024 requests of 1,024 tokens and 32 more, with 139 GiB in all. The step's
    and the graphs' share is worked out from their tensors: nobody has measured it yet."""
    gib = 2**30
    shape = SHAPES[0]
    config = core_config(
        GpuSetting("cuda", False, Path(), 0.0, GpuReport("x", Path(), 0.0)),
        shape,
        num_requests=1024,
        max_model_len=1344,
    )
    vocab = 151936
    logits = 4 * vocab * 1024
    total = 143771 << 20
    free_before = total - gib  # a context
    use = DeviceMemoryUse(
        total=total,
        free_before=free_before,
        free=free_before - int(1.2 * gib),  # the weights
        step=8 * logits + 8192 * 4 * 3072 * 4 + most_bytes(1024, vocab, 1344),
        graphs=3 * logits,
    )
    given = cache_bytes(use, config.gpu_memory_utilization)
    per_block = 16 * 28 * 8 * 128 * 2 * 2
    needs = 1024 * -(-(1024 + 32 + 16) // 16) * per_block
    assert given > needs > 115 * gib


def names_of(part: str) -> list[str]:
    return [section.name for section in PARTS[part]]


@pytest.mark.parametrize(
    ("module", "function"),
    sorted({(one.module, one.function) for part in PARTS.values() for one in part}),
)
def test_every_section_has_its_function(module: str, function: str) -> None:
    found = import_module(f"slipstream_verify.gpu_check.sections.{module}")
    assert callable(getattr(found, function))


def test_a_part_has_five_minutes() -> None:
    for sections in PARTS.values():
        assert sum(section.seconds for section in sections) + GRACE_S < 300
        assert sections[0].name == "environment"
        assert len({section.name for section in sections}) == len(sections)


def test_what_a_card_is_tried_with_first(setting: GpuSetting, report: GpuReport) -> None:
    parts = PARTS["first"]
    assert sum(section.seconds for section in parts) + GRACE_S <= 270
    assert [section.name for section in parts] == [
        "environment",
        "attention",
        "sampling",
        "tokens",
        "decode qwen3-0.6b",
    ]
    late = replace(setting, deadline_s=0.0)
    sampling.run_flat(late)
    exactness.run_first(late)
    assert [row["case"] for row in read_rows(report.path)[1:]] == [
        "flat, top-p 0.95",
        "flat, min-p 0.3",
        "flat, top-k 300",
        *(f"{name} bfloat16" for name in ("llama", "gemma2", "qwen3_moe", "gpt_oss")),
    ]
    names = {case.name for case in attention.attention_cases(long=True)}
    assert names >= set(attention._FIRST)
    assert decode._FIRST.batches_at(1024) == [256, 32, 1]


def test_what_a_python_lacks_and_no_wheel_brings_is_named(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    done = run_script("--wheels", str(tmp_path), python=str(python))
    assert done.returncode == 2
    assert "has no numpy" in done.stderr
    assert f"--wheels ({tmp_path}) no numpy-*.whl" in done.stderr


def test_packages_on_the_callers_path_are_used_as_well(tmp_path: Path) -> None:
    """What the script finds there, it takes no wheel for."""
    seen = tmp_path / "seen"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"with open({str(seen)!r}, 'a') as file:\n"
        "    file.write(' '.join(sys.orig_argv) + '\\n')\n"
    )
    assert run_script("--help", path=tmp_path).returncode == 0
    assert "slipstream_verify.gpu_check" in seen.read_text()


def test_every_dependency_is_looked_for() -> None:
    """But for those that come with transformers, serve no part, or are in the tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[<>=]", each)[0] for each in project["dependencies"]}
    [listed] = re.findall(r"packages = \((.*?)\)\.split", SCRIPT.read_text(), re.DOTALL)
    found = set(" ".join(re.findall('"(.*?)"', listed)).split())
    elsewhere = {"huggingface-hub", "prometheus-client", "aiohttp", "multidict", "pyyaml"}
    elsewhere.add("slipstream-client")
    assert found == needed - elsewhere


def test_a_folder_that_is_not_named_is_asked_for() -> None:
    done = run_script("--out")
    assert done.returncode != 0
    assert "--out needs a folder" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="it is about a machine without a card")
def test_a_section_that_fails_stops_no_other_and_is_told(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["decode", "--sections", "overlap", "--quick", "--out", str(tmp_path)])
    assert code == 1
    (as_json,) = tmp_path.glob("*.json")
    rows = json.loads(as_json.read_text())
    assert [(row["section"], row["case"], row["ok"]) for row in rows] == [
        ("environment", "failed", False),
        ("overlap", "failed", False),
    ]
    assert "FAILED: overlap: failed" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["speed"], f"no part 'speed'; there are {', '.join(PARTS)}"),
        (["prefill", "--sections", "overlap"], "no section 'overlap'; there are bench gc"),
    ],
)
def test_a_part_that_there_is_not_is_told(
    arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert told in capfd.readouterr().err


def test_what_ends_by_the_clock_keeps_what_it_found(tmp_path: Path) -> None:
    """As `timeout` ends it, amid a part."""
    command = [sys.executable, "-m", "slipstream_verify.gpu_check", "exactness", "--dry-run"]
    command += ["--out", str(tmp_path)]
    with started(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while "tokens: " not in (line := process.stdout.readline()):
            assert line, "it ended before it was to"
        process.terminate()
        process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 143
    (as_json,) = tmp_path.glob("*.json")
    rows = json.loads(as_json.read_text())
    assert {"environment", "sampling", "tokens"} <= {row["section"] for row in rows}
    assert as_json.with_suffix(".md").exists()


class TestDecode:
    """What a load is judged by, with a runner whose graphs are made up."""

    def test_a_replay_is_timed_by_the_runner(self) -> None:
        asked: list[Any] = []

        class WithGraphs:
            def bare_replay(self, batch: int, steps: int, *, context: int) -> float:
                asked.append((batch, context))
                return 0.002 * steps

        runner: Any = WithGraphs()
        assert bounds.replay_s(runner, 32, 128) == pytest.approx(0.002)
        assert asked == [(32, 128)]
        runner = object()
        assert bounds.replay_s(runner, 32, 128) is None


class TestWork:
    """What a step must do, against counting by hand."""

    def test_of_a_dense_model(self) -> None:
        work = work_of("random:llama-3.1-8b")
        layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096
        assert work.dense == 32 * layer + 4096
        assert work.output == 128256 * 4096
        assert work.weights_read(1) == work.weights_read(64) == work.dense + work.output
        assert work.linear_flops(10, 2) == 2 * (10 * work.dense + 2 * work.output)
        # tokens 3 and 4 see 4 and 5 tokens, by 32 layers of 32 heads of 128
        assert work.attention_flops(3, 5) == 4 * 32 * 32 * 128 * (4 + 5)

    def test_tied_embeddings_are_read_as_the_outputs_matrix(self) -> None:
        work = work_of("random:qwen3-0.6b")
        assert work.output == 151936 * 1024
        assert round((work.dense + work.output) / 1e6) == 596

    def test_of_experts_those_that_are_chosen(self) -> None:
        work = work_of("random:qwen3-30b-a3b")
        assert work.experts == 48 * 128 * 3 * 2048 * 768
        assert work.weights_read(1) == work.dense + work.output + work.experts / 16
        random = np.random.default_rng(0)
        for rows in (2, 32):
            chosen = [
                len({e for _ in range(rows) for e in random.choice(128, 8, replace=False)})
                for _ in range(300)
            ]
            expected = (work.weights_read(rows) - work.dense - work.output) / work.experts
            assert np.mean(chosen) / 128 == pytest.approx(expected, rel=0.02)
        # active weights: 3.3 B with embeddings, as the model's page has them
        active = work.linear_flops(1, 1) / 2 + work.output
        assert active / 1e9 == pytest.approx(3.3, abs=0.1)


@pytest.fixture
def report(tmp_path: Path) -> GpuReport:
    return GpuReport("part", tmp_path / "rows.jsonl", 0.0)


@pytest.fixture
def setting(tmp_path: Path, report: GpuReport) -> GpuSetting:
    return GpuSetting("cpu", True, tmp_path, float("inf"), report)


def test_one_wrong_token_fails_exactness(
    setting: GpuSetting, report: GpuReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = exactness._outputs

    def outputs(*arguments: Any) -> list[LoopOutput]:
        right = real(*arguments)
        right[1].token_ids[5] = (right[1].token_ids[5] + 1) % 331
        return right

    monkeypatch.setattr(exactness, "QUICK_ARCHITECTURES", ("llama",))
    monkeypatch.setattr(exactness, "_outputs", outputs)
    exactness.run(setting)
    in_bfloat16, in_float32 = read_rows(report.path)
    assert in_float32["ok"] is False
    assert (in_float32["num_same_requests"], in_float32["num_wrong_requests"]) == (3, 1)
    assert in_bfloat16["ok"] is False  # 1 of 32 tokens, and more where the others go on from it
    assert in_bfloat16["num_wrong"] >= 1


def test_out_of_time_is_a_row(setting: GpuSetting, report: GpuReport) -> None:
    exactness.run(replace(setting, deadline_s=0.0))
    rows = read_rows(report.path)
    assert len(rows) == 8
    assert {row["skipped"] for row in rows} == {"out of time"}


def test_attention_that_is_off_in_one_case_fails(
    setting: GpuSetting, report: GpuReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Case:
        def __init__(self, name: str) -> None:
            self.name = name

    def some_cases(*, long: bool) -> list[Case]:
        assert not long
        return [Case("right"), Case("off"), Case("nan"), Case("raises")]

    def check_one(case: Case, _device: Any, dtype: torch.dtype) -> float:
        if dtype == torch.float16 or case.name == "right":
            return 0.001
        if case.name == "raises":
            raise ValueError("no such thing")
        return {"off": 0.02, "nan": float("nan")}[case.name]

    monkeypatch.setattr(attention, "attention_cases", some_cases)
    monkeypatch.setattr(attention, "check_case", check_one)
    monkeypatch.setattr(attention, "LIMITS", dict.fromkeys((torch.bfloat16, torch.float16), 0.01))
    for dtype in (torch.bfloat16, torch.float16):
        attention._check(setting, dtype)
    off, right = read_rows(report.path)
    assert off["ok"] is False
    assert (off["num_over_limit"], off["num_raised"], off["num_checked"]) == (2, 1, 3)
    assert "raises: ValueError: no such thing" in str(off["raised"])
    assert right["ok"] is True
    assert right["num_checked"] == right["num_cases"] == 4


def test_attention_is_judged_as_right_only_where_all_cases_were_looked_at(
    setting: GpuSetting, report: GpuReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "check_case", lambda *_: 0.0)
    attention._check(replace(setting, deadline_s=0.0), torch.bfloat16)
    skipped, unjudged = read_rows(report.path)
    assert skipped["skipped"] == "out of time"
    assert (unjudged["ok"], unjudged["num_checked"]) == (None, 0)
    attention._check(setting, torch.bfloat16)
    whole = read_rows(report.path)[-1]
    assert whole["ok"] is True
    assert whole["num_checked"] == whole["num_cases"] > 0


def test_a_load_that_was_begun_in_time_has_the_grace_to_end(
    setting: GpuSetting, report: GpuReport
) -> None:
    limits: list[float] = []

    class Client:
        def run(self, *, within_s: float, **_load: Any) -> dict[str, Any]:
            limits.append(within_s)
            return {"tokens_per_s": 1.0, "output_tokens": 4, "tokens_per_delta": 1.0}

    class Runner:
        info = SimpleNamespace(vocab_size=100)
        steps = ()

        def watch(self, _num: int) -> None:
            pass

    class Late(GpuSetting):
        def has_time(self, *_: object) -> bool:  # when it was asked
            return True

    late = Late(setting.device, True, setting.folder, 0.0, report)
    point = decode._Point("late", 1, 1, 4, 1e-9, None)
    work = SimpleNamespace(linear_flops=lambda *_: 0, attention_flops=lambda *_: 0)
    rates = SimpleNamespace(bf16_flops_per_s=1.0)
    runner: Any = Runner()
    client: Any = Client()
    loads = decode._Decode(late, SHAPES[0], runner, cast(Any, work), cast(Any, rates))
    assert loads.compute_prompts(client, point)
    loads.measure(client, point, {})
    assert [row["ok"] for row in read_rows(report.path)] == [None, True]
    assert limits == [late.most_s()] * 2
    assert GRACE_S / 2 < limits[0] < GRACE_S - 3  # when the process ends itself: `section`


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
    steps = [
        LoopStep(0, 3, 4),
        LoopStep(1, 4, 4),
        LoopStep(3, 4, 4),
        LoopStep(7, 4, 5),
        LoopStep(9, 4, 4),
    ]
    assert decode_intervals_s(steps, 4) == [1, 2, 2]


def test_rows_survive_the_death_of_their_writer(report: GpuReport) -> None:
    report.add("whole", None, value_ms=1.5)
    with report.path.open("a") as file:
        file.write('{"part": "par')
    assert [row["case"] for row in read_rows(report.path)] == ["whole"]
    assert read_rows(report.path.with_name("none")) == []


def test_a_section_allocates_as_a_core_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "PYTORCH_CUDA_ALLOC_CONF"
    run = _run_on("cuda", tmp_path)
    monkeypatch.delenv(name, raising=False)
    assert _environment(run)[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:64")
    assert _environment(run)[name] == "max_split_size_mb:64"


def test_a_cards_machine_keeps_nothing_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "XDG_CACHE_HOME"
    monkeypatch.setenv(name, "/users")
    assert _environment(_run_on("cuda", tmp_path))[name] == str(tmp_path / "cache")
    assert _environment(_run_on("cpu", tmp_path))[name] == "/users"


def _run_on(device: str, folder: Path) -> _SectionRun:
    began = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    return _SectionRun("first", device, False, folder, folder / "out", 2, began, 0.0)


def test_rows_are_written_before_the_cards_name_is_known(tmp_path: Path, report: GpuReport) -> None:
    run = replace(_run_on("cuda", report.path.parent), out=tmp_path / "out")
    report.add("failed", False)
    assert _write_known(run) == 1
    assert names_in(run.out) == ["gpu-check-first-2026-01-02-0304-cuda"]
    assert _write_known(run, 1) == 1
    report.add("machine", card="NVIDIA H100 80GB")
    assert _write_known(run, 1) == 2
    assert names_in(run.out) == ["gpu-check-first-2026-01-02-0304-nvidia-h100-80gb"]


def names_in(folder: Path) -> list[str]:
    return sorted({path.stem for path in folder.iterdir()})


@pytest.mark.parametrize("module", [census, decode, prefill, steady])
def test_limits_are_measured_before_a_runner_takes_the_memory(
    module: Any, setting: GpuSetting, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_runner(config: Any) -> None:
        assert config.enforce_eager is (module is prefill)  # which replays no graph
        assert (setting.folder / "ceilings.json").exists()
        raise InterruptedError

    monkeypatch.setattr(module, "load_runner", load_runner)
    with pytest.raises(InterruptedError):
        module.run(setting, SHAPES[0])


def test_a_table_per_shape_of_rows(tmp_path: Path, report: GpuReport) -> None:
    report.add("a", True, value=1)
    report.add("b", False, value=2)
    report.add("c", other="x|y")
    _, as_table = write_files(tmp_path / "deep" / "er", "name", read_rows(report.path))
    lines = as_table.read_text().splitlines()
    assert lines.count("| case | ok | value |") == 1
    assert lines.count("| case | ok | other |") == 1
    assert "| c |  | x\\|y |" in lines


# ---- the prediction ----------------------------------------------------------------------------


def test_a_step_costs_its_launches_and_what_takes_longer() -> None:
    card = prediction.Card("C", bytes_per_s=1e12, bf16_flops_per_s=1e14)
    work = ForwardWork(
        dense=10**9,
        output=10**8,
        experts=0,
        num_experts=1,
        experts_per_token=1,
        attention_dims=4096,
    )
    launches = Launches(400, of_one_row=300)
    time = prediction.decode_time(work, 1000.0, launches, 2, card)
    assert time.launch_s == pytest.approx(400 * prediction.LAUNCH_US * 1e-6)
    assert time.bytes_s == pytest.approx((1.1e9 * 2 + 2 * prediction.CONTEXT * 1000) / 1e12)
    assert time.flops_s == pytest.approx(
        (2 * 1.1e9 * 2 + 2 * 4 * 4096 * (prediction.CONTEXT + 1)) / 1e14
    )
    assert time.total_s == pytest.approx(time.launch_s + time.bytes_s)
    alone = prediction.decode_time(work, 1000.0, launches, 1, card)
    assert alone.launch_s == pytest.approx(300 * prediction.ROW_LAUNCH_US * 1e-6)
    whole = prediction.prefill_time(work, 1000.0, launches, card)
    assert whole.total_s == pytest.approx(whole.launch_s + whole.flops_s)
    assert 0.9 < whole.bound_share < 1


def test_launches_of_a_whole_model_are_counted_by_layer() -> None:
    """A layer of Llama launches 10 kernels, 7 for one row (test_fuse_card); outside of layers
    there are few.
    """
    launches = prediction.launches_of("llama-3.1-8b")
    assert 0 < launches.num - 32 * 10 < 40
    assert 0 < launches.of_one_row - 32 * 7 < 40


def test_a_prediction_needs_no_card() -> None:
    done = run_script("--predict", "--card", "H200")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    shapes = [line.split()[0] for line in lines[2:]]
    assert tuple(dict.fromkeys(shapes)) == SHAPES
    assert len(shapes) == len(SHAPES) * (len(prediction.BATCHES) + 1)
