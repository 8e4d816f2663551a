"""Section: `slipstream bench overlap` on the real device: the step time with the worker in the
engine's loop, and with a separate worker process.
"""

from __future__ import annotations

from slipstream_bench.common.variants import Variant
from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.on_device import OnDevice
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_bench.overlap.overlap_options import Mode, OverlapForm
from slipstream_bench.overlap.points import MAX_MODEL_LEN, stack_of, window_of

_MODES: tuple[Mode, ...] = ("worker", "in_loop", "in_loop_async")
_VARIANTS: tuple[Variant, ...] = ("plain", "stop2_logprobs5")
_FORM = OverlapForm((256,), (), _VARIANTS, _MODES, 0.3, 1.0)
_QUICK = OverlapForm((4,), (), _VARIANTS[1:], _MODES[1:2], 0.1, 0.3)
_START_S = 8.0  # minimum start time of a mode's processes


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row per mode and variant."""
    form = _QUICK if setting.is_quick else _FORM
    (batch,) = form.batches
    cached = batch * (256 if setting.is_quick else 1536)
    device = OnDevice(setting, shape, batch, MAX_MODEL_LEN, max(cached, MAX_MODEL_LEN))
    for mode in form.modes:
        if not setting.has_time(report, mode, _START_S):
            continue
        with stack_of(mode, device) as stack:
            for variant in form.variants:
                window = window_of(stack, batch, variant, form)
                step_ms = 1e3 * batch / window.tokens_per_s if window.tokens_per_s else None
                report.add(
                    f"{mode}, {variant}",
                    window.tokens_per_s > 0,
                    model=shape_name(shape, is_quick=setting.is_quick),
                    batch=batch,
                    tpot_ms=None if step_ms is None else round(step_ms, 3),
                    output_tokens_per_s=round(window.tokens_per_s, 1),
                    tokens_per_delta=round(window.coalescing, 3),
                    window_s=round(window.end_s - window.begin_s, 3),
                )
