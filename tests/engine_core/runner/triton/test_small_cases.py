"""The cases that compute-sanitizer watches on a card, under Triton's interpreter."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("runs kernels on a CPU with TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.patience import PATIENCE_S

from slipstream_bench.gpu_check.gpu_report import GpuReport, read_rows
from slipstream_bench.gpu_check.sections import sanitizer
from slipstream_bench.gpu_check.setting import GpuSetting

# runs what follows the tool's own options
TOOL = """#!/bin/sh
while [ "$1" != "${1#--}" ]; do shift 2; done
"$@" || exit $?
echo "========= ERROR SUMMARY: 0 errors"
exit %d
"""


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
    assert row["told"] == "6 cases; ========= ERROR SUMMARY: 0 errors"
