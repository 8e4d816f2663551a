"""The cases that compute-sanitizer watches on a card, under Triton's interpreter."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs kernels on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.patience import PATIENCE_S

from slipstream_bench.gpu_check.gpu_report import GpuReport, read_rows
from slipstream_bench.gpu_check.sections import operators, sanitizer
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_core.runner.cuda.forward_ops import ForwardOps

# runs what follows the tool's own options
TOOL = """#!/bin/sh
while [ "$1" != "${1#--}" ]; do shift 2; done
"$@" || exit $?
echo "========= ERROR SUMMARY: 0 errors"
exit %d
"""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_of_a_forward_are_checked_one_by_one(dtype: torch.dtype, tmp_path: Path) -> None:
    report = GpuReport("operators", tmp_path / "rows", 0.0)
    operators.check_operators(GpuSetting("cpu", True, tmp_path, float("inf"), report), dtype)
    rows = read_rows(report.path)
    assert len(rows) == 24
    assert [row["case"] for row in rows if row["ok"] is not True] == []


def test_a_kernel_that_is_off_fails_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = ForwardOps.silu_mul
    monkeypatch.setattr(ForwardOps, "silu_mul", lambda *given: right(*given) * 1.001)
    monkeypatch.setattr(ForwardOps, "rms_norm", lambda *_: 1 / 0)
    report = GpuReport("operators", tmp_path / "rows", 0.0)
    setting = GpuSetting("cpu", True, tmp_path, float("inf"), report)
    operators.check_operators(setting, torch.float32)
    wrong = [row for row in read_rows(report.path) if row["ok"] is not True]
    assert [row["case"] for row in wrong] == ["rms_norm, float32", "silu_mul, float32"]


@pytest.mark.parametrize("code", [0, 9])
def test_the_cases_run_under_the_tool_which_judges_them(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL % code)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "_CHECKS", ("memcheck",))
    report = GpuReport("sanitizer", tmp_path / "rows", 0.0)
    sanitizer.run(GpuSetting("cpu", True, tmp_path, time.monotonic() + 10 * PATIENCE_S, report))
    [row] = read_rows(report.path)
    assert row["ok"] is (code == 0)
    assert row["told"] == "30 cases; ========= ERROR SUMMARY: 0 errors"
