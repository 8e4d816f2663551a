"""Section: the attention kernels over a paged cache, case by case, against float64.

The cases and limits are those of the kernels' tests (`gpu_check/reference_cases.py`);
here they run on the card, at its sizes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence

import torch

from slipstream_verify.gpu_check.reference_cases import LIMITS, attention_cases, check_case
from slipstream_verify.gpu_check.setting import GpuSetting

_NAMED = 3  # worst cases listed
_FIRST = ("decode", "mixed", "split, window and sinks", "long decode", "long prefill")


def run(setting: GpuSetting) -> None:
    """A row per dtype; it passes only if there was time for all cases."""
    _run(setting, (torch.bfloat16, torch.float16, torch.float32), None)


def run_first(setting: GpuSetting) -> None:
    """A row of a few cases in bfloat16."""
    _run(setting, (torch.bfloat16,), _FIRST)


def _run(setting: GpuSetting, dtypes: Sequence[torch.dtype], names: Collection[str] | None) -> None:
    if setting.device == "cpu" or importlib.util.find_spec("triton") is None:
        setting.report.add("attention", skipped="it needs a card, and Triton")
        return
    for dtype in dtypes:
        _check(setting, dtype, names)


def _check(setting: GpuSetting, dtype: torch.dtype, names: Collection[str] | None = None) -> None:
    """names: of the cases; None: all of them."""
    name = str(dtype).removeprefix("torch.")
    errors: dict[str, float] = {}
    failed: dict[str, str] = {}
    cases = attention_cases(long=not setting.is_quick)
    if names is not None:
        cases = [case for case in cases if case.name in names]
    for case in cases:
        if not setting.has_time(f"{name}, from {case.name} on"):
            break
        try:
            errors[case.name] = check_case(case, torch.device(setting.device), dtype)
        except torch.AcceleratorError:
            setting.report.add(f"{name}, {case.name}", False, error="the card is beyond use")
            raise
        except Exception as error:
            failed[case.name] = f"{type(error).__name__}: {error}"
    limit = LIMITS[dtype]
    # a NaN compares false with the limit, and so fails
    worst = sorted(errors, key=lambda it: -errors[it])
    too_large = [it for it in worst if not errors[it] <= limit]
    is_wrong, is_whole = bool(too_large or failed), len(errors) == len(cases)
    setting.report.add(
        name,
        False if is_wrong else True if is_whole else None,
        num_cases=len(cases),
        num_checked=len(errors),
        num_raised=len(failed),
        num_over_limit=len(too_large),
        limit=limit,
        max_relative_error=errors[worst[0]] if worst else None,
        worst="; ".join(f"{it} {errors[it]:.2g}" for it in worst[:_NAMED]),
        raised="; ".join(f"{it}: {why}" for it, why in failed.items())[:1000] or None,
    )
