"""Compiles a list of kernels in several processes at once (`compile_process`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from typing import Any

import torch

from slipstream_verify.gpu_check.setting import GpuSetting

_PROCESSES = 16
_QUICK_PROCESSES = 2


def why_not_compiled(setting: GpuSetting) -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if find_spec("triton") is None:
        return "Triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "Triton's interpreter compiles nothing"
    return None


def compile_all(setting: GpuSetting, which: str) -> list[dict[str, Any]]:
    """Compile a list of `compile_process.LISTS`; returns its lines, in the list's order.

    What is not done by the section's deadline is left out, and a row says so.
    """
    most = _QUICK_PROCESSES if setting.is_quick else _PROCESSES
    num = min(most, os.cpu_count() or 1)
    command = [sys.executable, "-m", "slipstream_verify.gpu_check.kernels.compile_process", which]
    command += ["--device", setting.device]
    if setting.device == "cuda":
        card: Any = torch.cuda.get_device_properties(0)
        command += ["--shared-bytes", str(card.shared_memory_per_block_optin)]
    if setting.is_quick:
        command.append("--quick")
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [*command, "--share", str(index), str(num)],
            stdout=subprocess.PIPE,
            text=True,
            env=one_thread,
        )
        for index in range(num)
    ]
    shares: list[list[dict[str, Any]]] = []
    num_cut = 0
    try:
        for process in processes:
            try:
                told, _ = process.communicate(
                    timeout=max(0.1, setting.deadline_s - time.monotonic())
                )
            except subprocess.TimeoutExpired:
                num_cut += 1
                process.kill()
                told, _ = process.communicate()
            shares.append([json.loads(line) for line in told.split("\n")[:-1]])
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if num_cut:
        why = f"out of time: {num_cut} of {num} processes had more to compile"
        setting.report.add(f"kernels of {which}, the rest", skipped=why)
    longest = max(map(len, shares), default=0)
    return [share[at] for at in range(longest) for share in shares if at < len(share)]
