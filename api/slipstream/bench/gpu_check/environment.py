"""Part: the card, the driver, the versions, and what the card can do at most."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

from slipstream.bench.gpu_check.cudnn_attention import may_be_chosen
from slipstream.bench.gpu_check.probes import bf16_flops_per_s, default_bandwidth
from slipstream.bench.gpu_check.report import Report
from slipstream.bench.gpu_check.setting import Setting

_cudnn: Any = torch.backends.cudnn  # torch leaves its types out


def run(setting: Setting, report: Report) -> None:
    """Two rows: what there is, and how fast it is."""
    names = ("torch", "triton", "transformers", "tokenizers", "numpy", "pyzmq", "msgspec", "uvloop")
    versions = {f"{name}_version": _version(name) for name in names}
    report.add(
        "machine",
        card=_card(setting.device),
        driver_version=_driver() if setting.device == "cuda" else None,
        python_version=platform.python_version(),
        **versions,
        cuda_version=torch.version.cuda if setting.device == "cuda" else None,
        cudnn_version=str(_cudnn.version()) if setting.device == "cuda" else None,
        num_cpus=os.cpu_count(),
    )
    if setting.device == "cuda":
        card = torch.cuda.get_device_properties(0)
        report.add(
            "card",
            memory_gib=round(card.total_memory / 2**30, 1),
            num_multiprocessors=card.multi_processor_count,
            compute_capability=f"{card.major}.{card.minor}",
            l2_mib=round(card.L2_cache_size / 2**20, 1),
            cudnn_attention=may_be_chosen(setting.device),
        )
    size = 512 if setting.is_quick else 8192
    bandwidth = default_bandwidth(setting.device, is_quick=setting.is_quick)
    flops = bf16_flops_per_s(setting.device, size)
    report.add(
        "ceilings",
        bandwidth_gb_per_s=round(bandwidth / 1e9, 1),
        bandwidth_formula="2 * bytes / s of a copy within the device's memory",
        bf16_tflop_per_s=round(flops / 1e12, 2),
        bf16_formula=f"2 * n**3 / s of an n * n product of random numbers, n = {size}",
    )


def _card(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    return f"cpu {platform.machine()}"


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """As nvidia-smi has it; None where there is none."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
