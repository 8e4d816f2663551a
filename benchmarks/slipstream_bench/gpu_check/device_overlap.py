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
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream_bench.common.collection_watch import CollectionWatch
from slipstream_bench.common.measures import Row
from slipstream_bench.gpu_check.device_use import device_use
from slipstream_bench.gpu_check.drive import Wanted, decode_intervals_s, drive, random_prompts
from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.gpu_stack import Serving, core_config, serving
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.setting import GpuSetting
from slipstream_bench.gpu_check.watched_runner import WatchedRunner
from slipstream_core.runner.factory import load_runner

_WARM_UP = 8  # decode steps excluded
_SPAN_S = 0.25  # profiled span; a longer trace takes long to read


@dataclass(frozen=True, slots=True)
class _OverlapLoad:
    num: int
    prompt_len: int
    num_tokens: int


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row per mode."""
    load = _OverlapLoad(4, 16, 200) if setting.is_quick else _OverlapLoad(256, 128, 96)
    report.say(f"{shape_name(shape, is_quick=setting.is_quick)}, {load}")
    length = load.prompt_len + load.num_tokens
    config = core_config(
        setting,
        shape,
        num_requests=load.num,
        max_model_len=length + 16,
        num_tokens=load.num * (length + 32),
        graph_sizes=(load.num,),
    )
    runner = WatchedRunner(load_runner(config))
    try:
        bare = {mode: _run_bare(setting, report, runner, load, mode) for mode in _BARE}
        with serving(setting, config, runner) as stack:
            _run_client(stack, _OverlapLoad(1, load.prompt_len, 8), "all")
            for mode in _BARE:
                _run_stack(setting, report, runner, load, stack, mode, bare[mode])
    finally:
        runner.close()


def _run_client(stack: Serving, load: _OverlapLoad, mode: str) -> dict[str, Any]:
    """Serve one load; returns the client's report."""
    command = [sys.executable, "-m", "slipstream_bench.gpu_check.overlap_client"]
    numbers = map(str, (load.num, load.prompt_len, load.num_tokens))
    return stack.run_process([*command, stack.client_address, *numbers, mode])


# By mode: the sampling options of the bare loop's requests, and the names of the bare and the
# stack's run.
_BARE = {
    "plain": (-1, "bare loop", "stack, text"),
    "all": (5, "bare loop, top-5", "stack, text, top-5, 2 stop strings"),
}


def _run_bare(
    setting: GpuSetting, report: GpuReport, runner: WatchedRunner, load: _OverlapLoad, mode: str
) -> float | None:
    num_logprobs, case, _ = _BARE[mode]
    if not setting.has_time(report, case):
        return None
    prompts = random_prompts(load.num, load.prompt_len, runner.info.vocab_size)
    requests = [Wanted(prompt, load.num_tokens, num_logprobs=num_logprobs) for prompt in prompts]

    def once() -> None:
        drive(runner, requests, budget=8192)

    row = {"batch": load.num, **_measured(setting, runner, load, once)}
    report.add(case, **row)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    return step_ms


def _run_stack(
    setting: GpuSetting,
    report: GpuReport,
    runner: WatchedRunner,
    load: _OverlapLoad,
    stack: Serving,
    mode: str,
    bare_ms: float | None,
) -> None:
    """Measure the stack. The check is only that every token arrived."""
    case = _BARE[mode][2]
    if not setting.has_time(report, case):
        return
    said: list[dict[str, Any]] = []

    def once() -> None:
        said.append(_run_client(stack, load, mode))

    row = _measured(setting, runner, load, once)
    step_ms = row["step_median_ms"]
    assert isinstance(step_ms, float)
    client = said[0]  # of the timed run, not the profiled one
    report.add(
        case,
        client["output_tokens"] == load.num * load.num_tokens,
        batch=load.num,
        **row,
        over_bare_loop_ms=None if bare_ms is None else round(step_ms - bare_ms, 3),
        client_itl_median_ms=client["itl_median_ms"],
        client_tpot_mean_ms=client["tpot_mean_ms"],
        client_output_tokens=client["output_tokens"],
        client_output_chars=client["output_chars"],
    )


def _measured(
    setting: GpuSetting, runner: WatchedRunner, load: _OverlapLoad, once: Callable[[], None]
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
