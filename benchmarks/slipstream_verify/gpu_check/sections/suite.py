"""Section: the repository's tests that are meaningful on a card, which compute on whatever device
there is. If pytest or all of those tests are missing, the row says so.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from slipstream_verify.gpu_check.setting import GpuSetting

_ROOT = Path(__file__).resolve().parents[4]
_FOLDER = "tests/engine_core/kernels/triton"
# those that a card runs in the time there is; the others compile, want the interpreter, or make
# Triton compile hundreds of kernels (test_forward_kernels; the section `operators` has one of each)
_TESTS = (
    "tests/engine_core/runner/test_nothing_waits_on_a_card.py",
    *(f"{_FOLDER}/test_{name}.py" for name in ("draws", "kernels")),
)
_NOTHING_COLLECTED = 5  # pytest's exit code


def run(setting: GpuSetting) -> None:
    """A row per file of tests."""
    for name in _TESTS:
        if not (_ROOT / name).is_file():
            setting.report.add(name, skipped="not in this checkout")
        elif importlib.util.find_spec("pytest") is None:
            setting.report.add(name, skipped="this Python has no pytest")
        elif setting.has_time(name):
            _run(setting, name)


def _run(setting: GpuSetting, name: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", name]
    within_s = max(1.0, setting.deadline_s - time.monotonic())
    try:
        done = subprocess.run(
            command, cwd=_ROOT, capture_output=True, text=True, timeout=within_s, check=False
        )
    except subprocess.TimeoutExpired:
        setting.report.add(name, skipped="out of time")
        return
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-300:]]
    if done.returncode == _NOTHING_COLLECTED:
        setting.report.add(name, skipped=lines[-1])
        return
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
    setting.report.add(name, done.returncode == 0, told=lines[-1])
