"""Measures what the device can do at most: bytes per second, and bf16 operations per second. Both
are measured once for all sections of a run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from slipstream_bench.gpu_check.setting import GpuSetting

_Event: Any = torch.cuda.Event  # untyped in torch


def bandwidth_bytes_per_s(device: str, num_bytes: int) -> float:
    """Bandwidth of a copy in the device's memory: 2 * num_bytes (read, written) / seconds."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / median_s(device, lambda: target.copy_(source))


def bf16_flops_per_s(device: str, size: int) -> float:
    """Rate of a square matrix product of random numbers: 2 * size**3 operations / seconds."""
    left = torch.randn(size, size, device=device).bfloat16()
    right = torch.randn(size, size, device=device).bfloat16()
    return 2 * size**3 / median_s(device, lambda: left @ right)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of one device."""

    bytes_per_s: float
    bf16_flops_per_s: float


def ceilings(setting: GpuSetting) -> Ceilings:
    """The limits measured by the run's first section, with sizes well beyond the caches."""
    path = setting.folder / "ceilings.json"
    if path.exists():
        return Ceilings(**json.loads(path.read_text()))
    found = Ceilings(
        bandwidth_bytes_per_s(setting.device, 1 << 26 if setting.is_quick else 1 << 32),
        bf16_flops_per_s(setting.device, matrix_size(setting)),
    )
    path.write_text(json.dumps(asdict(found)))
    return found


def matrix_size(setting: GpuSetting) -> int:
    """Rows and columns of the multiplied matrices."""
    return 512 if setting.is_quick else 8192


def median_s(device: str, work: Callable[[], object], *, repeats: int = 10) -> float:
    """Seconds that `work` takes on the device: the median of `repeats` after three warm-up runs."""
    times: list[float] = []
    for _ in range(3 + repeats):
        begin = time.perf_counter()
        if device == "cuda":
            first, last = (_Event(enable_timing=True) for _ in range(2))
            first.record()
            work()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) * 1e-3)
        else:
            work()
            times.append(time.perf_counter() - begin)
    return statistics.median(times[3:])
