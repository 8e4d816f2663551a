"""Section: what the output path costs the device: the stack's steps against the bare loop's.

A recording runner gives the time at which each step was collected, and the device's use meanwhile;
otherwise the stack is one that serves (`serving`).

Each mode runs twice: once for the times, and once for the device's idle share, since the profiler
takes time itself. The bare loop with logprobs shows their cost in the sampler; the remaining
difference to the stack is the output path's.

The core runs in this process, so the garbage collector's work there is reported as well, per step.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from slipstream_bench.common.measures import Row
from slipstream_bench.common.variants import Variant
from slipstream_core.runner.factory import load_runner
from slipstream_lab.common.bare_loop import LoopRequest, decode_intervals_s, drive, random_prompts
from slipstream_lab.common.collection_watch import CollectionWatch
from slipstream_verify.gpu_check.device_use import MeasuredRunner, device_use
from slipstream_verify.gpu_check.gpu_stack import LoadClient, serving
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.setting import GpuSetting

_WARM_UP = 8  # decode steps excluded
_SPAN_S = 0.25  # profiled span; a longer trace takes long to read


class _Mode(NamedTuple):
    """What the requests of the bare loop and of the stack ask for, and the cases of both."""

    num_logprobs: int  # of the bare loop; -1: none
    variant: Variant  # of the stack
    bare_case: str
    stack_case: str


_MODES = (
    _Mode(-1, "plain", "bare loop", "stack, text"),
    _Mode(5, "stop2_logprobs5", "bare loop, top-5", "stack, text, top-5, 2 stop strings"),
)


@dataclass(frozen=True, slots=True)
class _OverlapLoad:
    num: int
    prompt_len: int
    num_tokens: int


def run(setting: GpuSetting, shape: str) -> None:
    """A row per mode."""
    load = _OverlapLoad(4, 16, 200) if setting.is_quick else _OverlapLoad(256, 128, 96)
    setting.report.say(f"{setting.name_of(shape)}, {load}")
    length = load.prompt_len + load.num_tokens
    config = core_config(
        setting,
        shape,
        num_requests=load.num,
        max_model_len=length + 16,
        num_tokens=load.num * (length + 32),
        graph_sizes=(load.num,),
    )
    runner = MeasuredRunner(load_runner(config))
    try:
        bare = [_run_bare(setting, runner, load, mode) for mode in _MODES]
        with serving(setting, config, runner) as stack, LoadClient(stack) as client:
            _run_client(client, runner, _OverlapLoad(1, load.prompt_len, 8), _MODES[-1])
            for mode, bare_ms in zip(_MODES, bare, strict=True):
                _run_stack(setting, runner, load, client, mode, bare_ms)
    finally:
        runner.close()


def _run_client(
    client: LoadClient, runner: MeasuredRunner, load: _OverlapLoad, mode: _Mode
) -> dict[str, Any]:
    """Serve one load; returns the client's report."""
    return client.run(
        num=load.num,
        prompt_len=load.prompt_len,
        num_tokens=load.num_tokens,
        vocab_size=runner.info.vocab_size,
        variant=mode.variant,
        by_task=True,
    )


def _run_bare(
    setting: GpuSetting, runner: MeasuredRunner, load: _OverlapLoad, mode: _Mode
) -> float | None:
    if not setting.has_time(mode.bare_case):
        return None
    prompts = random_prompts(load.num, load.prompt_len, runner.info.vocab_size)
    requests = [
        LoopRequest(prompt, load.num_tokens, num_logprobs=mode.num_logprobs) for prompt in prompts
    ]

    def once() -> None:
        drive(runner, requests, budget=8192)

    row = {"batch": load.num, **_measured(setting, runner, load, once)}
    setting.report.add(mode.bare_case, **row)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    return step_ms


def _run_stack(
    setting: GpuSetting,
    runner: MeasuredRunner,
    load: _OverlapLoad,
    client: LoadClient,
    mode: _Mode,
    bare_ms: float | None,
) -> None:
    """Measure the stack. The check is only that every token arrived."""
    if not setting.has_time(mode.stack_case):
        return
    results: list[dict[str, Any]] = []

    def once() -> None:
        results.append(_run_client(client, runner, load, mode))

    row = _measured(setting, runner, load, once)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    timed = results[0]  # and not the profiled run
    setting.report.add(
        mode.stack_case,
        timed["output_tokens"] == load.num * load.num_tokens,
        batch=load.num,
        **row,
        over_bare_loop_ms=None if bare_ms is None else round(step_ms - bare_ms, 3),
        client_itl_median_ms=timed["itl_median_ms"],
        client_tpot_mean_ms=timed["tpot_mean_ms"],
        client_output_tokens=timed["output_tokens"],
        client_output_chars=timed["output_chars"],
    )


def _measured(
    setting: GpuSetting, runner: MeasuredRunner, load: _OverlapLoad, once: Callable[[], None]
) -> Row:
    """Times of steps in which all rows decode, and the device's idle share over such steps."""
    runner.watch(load.num)
    gc.collect()
    with CollectionWatch() as collections:
        once()
    num_steps = max(1, len(runner.steps))
    intervals = decode_intervals_s(runner.steps, load.num)[_WARM_UP:]
    if not intervals:
        raise RuntimeError(f"there was no step in which all {load.num} requests decoded")
    use = device_use(setting.device)
    runner.watch(load.num, warm_up=_WARM_UP, use=use, span_s=_SPAN_S)
    once()
    runner.finish()
    milliseconds = np.array(intervals) * 1e3
    return {
        "num_steps": len(intervals),
        "step_median_ms": round(float(np.median(milliseconds)), 3),
        "step_mean_ms": round(statistics.mean(milliseconds.tolist()), 3),
        "step_p99_ms": round(float(np.percentile(milliseconds, 99)), 3),
        "gc_per_1000_steps": round(1000 * sum(collections.num_collections) / num_steps, 2),
        "gc_longest_pause_ms": round(collections.longest_pause_ns / 1e6, 4),
        "device_idle_share": None if runner.idle_share is None else round(runner.idle_share, 4),
    }
