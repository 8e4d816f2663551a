"""Sections: `slipstream bench overlap`, `interval`, `protocol` and `gc` on the real device.

The collector's benchmark overlaps nothing, as on the simulated device: a step is enqueued only when
the host is done with the one before. Its rows repeatedly decode at one length.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import uvloop
from msgspec import structs

from slipstream_bench.common.measures import Row
from slipstream_bench.common.variants import Variant
from slipstream_core.runner.factory import load_runner
from slipstream_core.step.plan import Runner
from slipstream_lab.common.simulated_stack import product
from slipstream_lab.gc_pauses import SHAPES, WARM_UP_STEPS, measure, with_gains
from slipstream_lab.interval import Interval, measure_load
from slipstream_lab.overlap.points import MAX_MODEL_LEN, Mode, OverlapPlan, stack_of, window_of
from slipstream_lab.protocol.protocol import TRANSPORTS, ProtocolLoad, measure_transport
from slipstream_verify.gpu_check.models import OnDevice, core_config
from slipstream_verify.gpu_check.setting import GpuSetting
from slipstream_verify.gpu_check.step_plans import plan_of

_OVERLAP_MODES: tuple[Mode, ...] = ("worker", "in_loop", "in_loop_async")
_OVERLAP_VARIANTS: tuple[Variant, ...] = ("plain", "stop2_logprobs5")
_OVERLAP = OverlapPlan((256,), (), _OVERLAP_VARIANTS, _OVERLAP_MODES, 0.3, 1.0)
_QUICK_OVERLAP = OverlapPlan((4,), (), _OVERLAP_VARIANTS[1:], _OVERLAP_MODES[1:2], 0.1, 0.3)
_START_S = 8.0  # minimum start time of a stack's processes


def run_overlap(setting: GpuSetting, shape: str) -> None:
    """A row per mode and variant."""
    form = _QUICK_OVERLAP if setting.is_quick else _OVERLAP
    (batch,) = form.batches
    cached = batch * (256 if setting.is_quick else 1536)
    device = OnDevice(setting, shape, batch, MAX_MODEL_LEN, max(cached, MAX_MODEL_LEN))
    for mode in form.modes:
        if not setting.has_time(mode, _START_S):
            continue
        with stack_of(mode, device) as stack:
            for variant in form.variants:
                window = window_of(stack, batch, variant, form)
                step_ms = 1e3 * batch / window.tokens_per_s if window.tokens_per_s else None
                setting.report.add(
                    f"{mode}, {variant}",
                    window.tokens_per_s > 0,
                    model=setting.name_of(shape),
                    batch=batch,
                    tpot_ms=None if step_ms is None else round(step_ms, 3),
                    output_tokens_per_s=round(window.tokens_per_s, 1),
                    tokens_per_delta=round(window.coalescing, 3),
                    window_s=round(window.end_s - window.begin_s, 3),
                )


_OF_SERVERS: tuple[tuple[Interval, tuple[Interval, ...]], ...] = (
    (1, (1, 10)),
    ("auto", ("auto",)),
)
_NOT_OF_INTERVAL = (
    "benchmark",
    "is_simulated",
    "step_ms",
    "efficiency",
    "over_interval_1",
    "interval",
)


def run_interval(setting: GpuSetting, shape: str) -> None:
    """A row per interval."""
    concurrency, output_len = (4, 24) if setting.is_quick else (256, 128)
    length = 2 * output_len + 32
    for of_server, intervals in _OF_SERVERS[: 1 if setting.is_quick else None]:
        if not setting.has_time(f"interval {intervals[0]}", _START_S):
            continue
        cached = concurrency * length
        device = OnDevice(setting, shape, concurrency, length, cached, stream_interval=of_server)
        with product(device) as stack:
            for interval in intervals:
                row = uvloop.run(measure_load(stack, interval, concurrency, output_len))
                setting.report.add(
                    f"interval {interval}",
                    model=setting.name_of(shape),
                    **{name: value for name, value in row.items() if name not in _NOT_OF_INTERVAL},
                )


_PROTOCOL_INPUT_LEN = 170  # the benchmark's own
_NOT_OF_PROTOCOL = (
    "benchmark",
    "is_simulated",
    "step_ms",
    "transport",
    "logprobs",
    "tokens_counted_by",
)


def run_protocol(setting: GpuSetting, shape: str) -> None:
    """A row per transport and logprobs setting."""
    load = ProtocolLoad(4, 24, 0.0) if setting.is_quick else ProtocolLoad(64, 512, 0.0)
    length = _PROTOCOL_INPUT_LEN + load.output_len + 16
    device = OnDevice(setting, shape, load.batch, length, load.batch * length)
    for transport in reversed(TRANSPORTS):
        if not setting.has_time(transport, _START_S):
            continue
        for row in measure_transport(transport, load, device):
            setting.report.add(
                f"{transport}, log-probabilities {row['logprobs']}",
                row["completed_requests"] == load.batch,
                model=setting.name_of(shape),
                **{name: value for name, value in row.items() if name not in _NOT_OF_PROTOCOL},
            )


_NOT_OF_GC = ("benchmark", "version", "python", "shape", "is_frozen", "wall_s")
_GUESS_S = 0.004  # of a step with the host's work


class _Steps:
    """Decode steps of a runner, one after the other."""

    def __init__(self, runner: Runner, batch: int, context: int) -> None:
        self._runner = runner
        self._plan = plan_of(runner, [(context - 1, 1)] * batch)
        self.seconds: list[float] = []

    def ids(self) -> Iterator[npt.NDArray[np.int64]]:
        """The ids of one step each, int64 [batch]; a step runs when its ids are requested."""
        while True:
            began = time.perf_counter()
            self._plan = structs.replace(self._plan, step=self._plan.step + 1)
            self._runner.launch(self._plan)
            token_ids = self._runner.collect().token_ids
            self.seconds.append(time.perf_counter() - began)
            yield token_ids


def run_gc(setting: GpuSetting, shape: str) -> None:
    """A row per shape of ids, with the heap frozen and not."""
    batch, steps, context = (4, 20, 16) if setting.is_quick else (256, 200, 128)
    config = core_config(
        setting,
        shape,
        num_requests=batch,
        max_model_len=context + 16,
        num_tokens=batch * (context + 16),
        graph_sizes=(batch,),
    )
    runner = load_runner(config)
    try:
        device_steps = _Steps(runner, batch, context)
        ids = device_steps.ids()
        for is_frozen in (True, False):
            found: list[Row] = []
            for name in SHAPES:
                case = _case(name, is_frozen=is_frozen)
                if not setting.has_time(case, (WARM_UP_STEPS + steps) * _GUESS_S):
                    continue
                device_steps.seconds.clear()
                row = measure(name, batch, steps, ids, is_frozen=is_frozen)
                step_ms = 1e3 * statistics.median(device_steps.seconds)
                tokens_per_s = batch * steps / float(row["wall_s"] or 1)
                found.append(
                    row | {"step_ms": round(step_ms, 3), "tokens_per_s": round(tokens_per_s, 1)}
                )
            if found and found[0]["shape"] == SHAPES[0]:
                found = with_gains(found)
            for row in found:
                setting.report.add(
                    _case(str(row["shape"]), is_frozen=is_frozen),
                    model=setting.name_of(shape),
                    **{name: value for name, value in row.items() if name not in _NOT_OF_GC},
                )
    finally:
        runner.close()


def _case(shape: str, *, is_frozen: bool) -> str:
    return f"{shape}, heap {'frozen' if is_frozen else 'not frozen'}"
