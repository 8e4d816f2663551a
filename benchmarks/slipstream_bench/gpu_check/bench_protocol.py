"""Section: `slipstream bench protocol` on the real device: whole histories against deltas."""

from __future__ import annotations

from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.on_device import OnDevice
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_bench.protocol.protocol import TRANSPORTS, ProtocolLoad, measure_transport

_INPUT_LEN = 170  # the benchmark's own
_NOT_HERE = ("benchmark", "is_simulated", "step_ms", "transport", "logprobs", "tokens_counted_by")
_START_S = 8.0  # minimum start time of a transport's processes


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row per transport and logprobs setting."""
    load = ProtocolLoad(4, 24, 0.0) if setting.is_quick else ProtocolLoad(64, 512, 0.0)
    length = _INPUT_LEN + load.output_len + 16
    device = OnDevice(setting, shape, load.batch, length, load.batch * length)
    for transport in reversed(TRANSPORTS):
        if not setting.has_time(report, transport, _START_S):
            continue
        for row in measure_transport(transport, load, device):
            report.add(
                f"{transport}, log-probabilities {row['logprobs']}",
                row["completed_requests"] == load.batch,
                model=shape_name(shape, is_quick=setting.is_quick),
                **{name: value for name, value in row.items() if name not in _NOT_HERE},
            )
