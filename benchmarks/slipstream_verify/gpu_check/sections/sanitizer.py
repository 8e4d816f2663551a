"""Section: a few small launches of every kernel under compute-sanitizer, which finds accesses out
of bounds and races in shared memory. It comes with CUDA's toolkit; without it the rows say so.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time

from slipstream_verify.gpu_check.kernels.parallel_compile import why_not_compiled
from slipstream_verify.gpu_check.setting import GpuSetting

_TOOL = "compute-sanitizer"
_CHECKS = ("memcheck", "racecheck")


def run(setting: GpuSetting) -> None:
    """A row per check."""
    tool = shutil.which(_TOOL)
    for check in _CHECKS:
        why = why_not_compiled(setting) if setting.device == "cuda" else None
        if tool is None:
            why = f"there is no {_TOOL} on the PATH"
        if why is not None:
            setting.report.add(check, skipped=why)
        elif setting.has_time(check):
            _run(setting, str(tool), check)


def _run(setting: GpuSetting, tool: str, check: str) -> None:
    cases = [sys.executable, "-m", "slipstream_verify.gpu_check.kernels.small_cases"]
    command = [tool, "--tool", check, "--error-exitcode", "9", *cases, setting.device]
    within_s = max(1.0, setting.deadline_s - time.monotonic())
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        setting.report.add(check, skipped="out of time")
        return
    if done.returncode:
        print(done.stdout[-4000:] + done.stderr[-2000:], flush=True)
    told = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "cases" in line]
    setting.report.add(check, done.returncode == 0, told="; ".join(told)[:300])
