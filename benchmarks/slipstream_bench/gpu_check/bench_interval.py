"""Section: `slipstream bench interval` on the real device."""

from __future__ import annotations

import uvloop

from slipstream_bench.common.simulated_stack import product
from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.on_device import OnDevice
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_bench.interval.interval import Interval, measure_load

_OF_SERVERS: tuple[tuple[Interval, tuple[Interval, ...]], ...] = (
    (1, (1, 10)),
    ("auto", ("auto",)),
)
_NOT_HERE = ("benchmark", "is_simulated", "step_ms", "efficiency", "over_interval_1", "interval")
_START_S = 8.0  # minimum start time of a stack's processes


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row per interval."""
    concurrency, output_len = (4, 24) if setting.is_quick else (256, 128)
    length = 2 * output_len + 32
    for of_server, intervals in _OF_SERVERS[: 1 if setting.is_quick else None]:
        if not setting.has_time(report, f"interval {intervals[0]}", _START_S):
            continue
        cached = concurrency * length
        device = OnDevice(setting, shape, concurrency, length, cached, stream_interval=of_server)
        with product(device) as stack:
            for interval in intervals:
                row = uvloop.run(measure_load(stack, interval, concurrency, output_len))
                report.add(
                    f"interval {interval}",
                    model=shape_name(shape, is_quick=setting.is_quick),
                    **{name: value for name, value in row.items() if name not in _NOT_HERE},
                )
