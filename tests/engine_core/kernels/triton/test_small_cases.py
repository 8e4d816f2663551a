"""The cases that compute-sanitizer watches on a card, under Triton's interpreter."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs kernels on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.patience import PATIENCE_S

from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_verify.gpu_check.gpu_report import GpuReport, read_rows
from slipstream_verify.gpu_check.kernels import small_cases
from slipstream_verify.gpu_check.kernels.operator_cases import operator_cases
from slipstream_verify.gpu_check.sections import operators, sanitizer
from slipstream_verify.gpu_check.setting import GpuSetting

# says what it is to watch
TOOL = """#!/bin/sh
echo "$*"
echo "========= ERROR SUMMARY: 0 errors"
exit %d
"""


def test_kernels_of_a_forward_are_checked_one_by_one(tmp_path: Path) -> None:
    report = GpuReport("operators", tmp_path / "rows", 0.0)
    setting = GpuSetting("cpu", True, tmp_path, float("inf"), report)
    operators.check_operators(setting, torch.bfloat16)
    rows = read_rows(report.path)
    assert len(rows) == 25
    assert [row["case"] for row in rows if row["ok"] is not True] == []


def test_a_kernel_that_is_off_fails_its_row_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, some = ForwardOps.silu_mul, ("rms_norm", "add_rms_norm", "silu_mul", "rotate")
    monkeypatch.setattr(ForwardOps, "silu_mul", lambda *given: right(*given) * 1.001)
    monkeypatch.setattr(ForwardOps, "rms_norm", lambda *_: 1 / 0)
    monkeypatch.setattr(
        operators,
        "operator_cases",
        lambda *of: {name: case for name, case in operator_cases(*of).items() if name in some},
    )
    report = GpuReport("operators", tmp_path / "rows", 0.0)
    setting = GpuSetting("cpu", True, tmp_path, float("inf"), report)
    operators.check_operators(setting, torch.float32)
    rows = read_rows(report.path)
    assert [row["case"] for row in rows] == [f"{name}, float32" for name in some]
    assert [row["ok"] for row in rows] == [False, True, False, True]


def test_the_cases_are_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["small_cases", "cpu"])
    assert small_cases.main() == 0
    assert capsys.readouterr().out == "31 cases\n"


@pytest.mark.parametrize("code", [0, 9])
def test_the_tool_watches_and_judges_the_cases(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(TOOL % code)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(sanitizer, "_CHECKS", ("memcheck",))
    report = GpuReport("sanitizer", tmp_path / "rows", 0.0)
    sanitizer.run(GpuSetting("cpu", True, tmp_path, time.monotonic() + PATIENCE_S, report))
    [row] = read_rows(report.path)
    assert row["ok"] is (code == 0)
    watched, said = row["told"].split("; ")
    assert watched.startswith("--tool memcheck --error-exitcode 9 ")
    assert watched.endswith(f" -m {small_cases.__name__} cpu")
    assert said == "========= ERROR SUMMARY: 0 errors"
