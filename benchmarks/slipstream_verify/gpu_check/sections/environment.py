"""Section: the card, driver, versions and commit, and the card's measured limits. Every part begins
with it, so that every file says what it was measured with.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from slipstream_bench.common.provenance import commit, package_version
from slipstream_verify.gpu_check.bounds import ceilings, matrix_size
from slipstream_verify.gpu_check.setting import GpuSetting

_ROOT = Path(__file__).resolve().parents[4]

_cudnn: Any = torch.backends.cudnn  # untyped in torch


def run(setting: GpuSetting) -> None:
    """Two rows: what the environment is, and how fast the card is."""
    names = ("torch", "triton", "transformers", "tokenizers", "numpy", "pyzmq", "msgspec", "uvloop")
    versions = {f"{name}_version": package_version(name) for name in names}
    setting.report.add(
        "machine",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
        source_sha256=_source_sha256(),
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
        setting.report.add(
            "card",
            memory_gib=round(card.total_memory / 2**30, 1),
            num_multiprocessors=card.multi_processor_count,
            compute_capability=f"{card.major}.{card.minor}",
            l2_mib=round(card.L2_cache_size / 2**20, 1),
        )
    found = ceilings(setting)
    setting.report.add(
        "ceilings",
        bandwidth_gb_per_s=round(found.bytes_per_s / 1e9, 1),
        bandwidth_formula="2 * bytes / s of a copy within the device's memory",
        bf16_tflop_per_s=round(found.bf16_flops_per_s / 1e12, 4),
        bf16_formula="2 * n**3 / s of an n * n product of random numbers, "
        f"n = {matrix_size(setting)}",
    )


def _card(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name(0)
    return f"cpu {platform.machine()}"


def _source_sha256() -> str:
    """Hash of the packages' Python files, by path: identifies the version without git."""
    digest = hashlib.sha256()
    for folder in ("api", "benchmarks", "engine_core", "ipc", "output_worker"):
        for file in sorted(Path(_ROOT, folder).rglob("*.py")):
            digest.update(f"{file.relative_to(_ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _driver() -> str | None:
    """The driver's version by nvidia-smi; None without it."""
    return _output_of(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    )


def _output_of(command: list[str]) -> str | None:
    """A program's output; None if the program is missing or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
