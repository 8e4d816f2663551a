"""Section: the kernels of a fused forward, each by itself, against torch's operators in float64.

That a whole model's tokens are right says little of one of them: a forward that differs from the
model's own is not used.
"""

from __future__ import annotations

import importlib.util

import torch

from slipstream_verify.gpu_check.kernels.operator_cases import operator_cases
from slipstream_verify.gpu_check.reference_cases import LIMITS
from slipstream_verify.gpu_check.setting import GpuSetting


def run(setting: GpuSetting) -> None:
    """A row per kernel and dtype."""
    if setting.device == "cpu" or importlib.util.find_spec("triton") is None:
        setting.report.add("operators", skipped="it needs a card, and Triton")
        return
    for dtype in (torch.bfloat16, torch.float32):
        check_operators(setting, dtype)


def check_operators(setting: GpuSetting, dtype: torch.dtype) -> None:
    """A row per kernel. A kernel that raises fails, and the others are run."""
    of_dtype = str(dtype).removeprefix("torch.")
    for name, error_of in operator_cases(torch.device(setting.device), dtype).items():
        case = f"{name}, {of_dtype}"
        if not setting.has_time(case):
            continue
        try:
            error = error_of()
        except torch.AcceleratorError:
            setting.report.add(case, False, error="the card is beyond use")
            raise
        except Exception as raised:
            setting.report.add(case, False, error=f"{type(raised).__name__}: {raised}"[:500])
            continue
        setting.report.add(
            case, error <= LIMITS[dtype], max_relative_error=error, limit=LIMITS[dtype]
        )
