"""Section: Triton's cache, filled by several processes at once before other sections need it.

Without a card the kernels are compiled for compute capability 9.0, and rows say what they take.
"""

from __future__ import annotations

import time

from slipstream_verify.gpu_check.kernels.parallel_compile import compile_all, why_not_compiled
from slipstream_verify.gpu_check.setting import GpuSetting


def run_exactness(setting: GpuSetting) -> None:
    """Attention of the sections `attention` and `tokens`, and sampling."""
    _run(setting, "exactness")


def run_models(setting: GpuSetting) -> None:
    """Attention and sampling of the measured models."""
    _run(setting, "models")


def _run(setting: GpuSetting, which: str) -> None:
    case = f"kernels of {which}"
    if (why := why_not_compiled(setting)) is not None:
        setting.report.add(case, skipped=why)
        return
    began = time.perf_counter()
    lines = compile_all(setting, which)
    failed = [line for line in lines if "error" in line]
    setting.report.add(
        case,
        bool(lines) and not failed,
        num_jobs=len(lines),
        seconds=round(time.perf_counter() - began, 1),
        seconds_in_all=round(sum(line["seconds"] for line in lines), 1),
        most_registers=max((line.get("registers", 0) for line in lines), default=0) or None,
        spilled_bytes=max((line.get("spills", 0) for line in lines), default=0),
        most_shared_bytes=max((line.get("shared", 0) for line in lines), default=0) or None,
        error="; ".join(f"{line['job']}: {line['error']}" for line in failed)[:1000] or None,
    )
