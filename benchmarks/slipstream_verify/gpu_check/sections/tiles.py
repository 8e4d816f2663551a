"""Section: other tiles, warps and stages for the attention kernels than the table's, timed.

All of a step's kernels are compiled first, by several processes at once. A tile is right if its
output is the table's own within rounding. The best of each case stands in its last row, beside the
time with the table's tile.

Without a card there is no time: kernels are compiled for compute capability 9.0, and rows say what
they take. Under Triton's interpreter a dry run goes through all but the compiling, with tiny rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from slipstream_verify.gpu_check.kernels.parallel_compile import compile_all, why_not_compiled
from slipstream_verify.gpu_check.setting import GpuSetting


def run(setting: GpuSetting) -> None:
    """Rows of what was compiled, then a row per case and tile."""
    why = why_not_compiled(setting)
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if why is not None and not is_interpreted:
        setting.report.add("tiles", skipped=why)
        return
    if why is None:
        _report_compiled(setting, compile_all(setting, "tiles"))
    if setting.device == "cpu" and not is_interpreted:
        return
    # Triton is not imported where it is not installed
    from slipstream_verify.gpu_check.kernels.tile_timing import sweep_all

    sweep_all(setting)


def _report_compiled(setting: GpuSetting, lines: Sequence[dict[str, Any]]) -> None:
    for line in lines:
        if "registers" in line or "error" in line:
            setting.report.add(
                line["job"],
                registers=line.get("registers"),
                spilled_bytes=line.get("spills"),
                shared_bytes=line.get("shared"),
                error=line.get("error"),
            )
    seconds = round(sum(line["seconds"] for line in lines), 1)
    setting.report.add("compiled", bool(lines), num_tiles=len(lines), seconds_in_all=seconds)
