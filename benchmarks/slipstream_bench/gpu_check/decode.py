"""Section: decoding by a whole stack, against the bare replay of its step and the bandwidth.

The model has random weights in a real model's shape, so its speed is real and its tokens are not.
Core (this process), worker and client form a stack as it serves: two stop strings, top-5 logprobs,
every token streamed.

- Each context's prompts are computed once, for the largest batch; the loads find them in the prefix
  cache (in separate blocks per row), so a load is one short step followed by decoding.
- Throughput is the client's, over the span in which all streams run. `floor_ms` and `bound_ms` are
  for the context length in the middle of that span.
- A load whose cache does not fit the card is skipped, and reported with its sizes.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch

from slipstream_bench.gpu_check.drive import decode_intervals_s
from slipstream_bench.gpu_check.floor import bytes_read, goal_share, replay_s
from slipstream_bench.gpu_check.gpu_report import GpuReport
from slipstream_bench.gpu_check.gpu_stack import LoadClient, core_config, serving
from slipstream_bench.gpu_check.models import shape_name
from slipstream_bench.gpu_check.probes import ceilings
from slipstream_bench.gpu_check.setting import SHAPES, GpuSetting
from slipstream_bench.gpu_check.watched_runner import WatchedRunner
from slipstream_bench.gpu_check.work import Work, work_of
from slipstream_core.runner.factory import load_runner

_SPAN_S = 0.8  # approximate measured span of a load
_FEWEST = 32  # fewest output tokens of a request
_WARM_UP = 4  # decode steps excluded from medians
_GUESS = 0.6  # expected share of the bounds, for planning time


@dataclass(frozen=True, slots=True)
class _Form:
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    at_longest: int  # largest batch at the longest context
    most_tokens: int  # most output tokens of a request


_FORMS = {SHAPES[0]: _Form((128, 1024), (1, 32, 256, 1024), 1024, 320)}
_LARGE = _Form((128, 1024), (1, 32, 256, 1024), 512, 320)
_QUICK = _Form((16, 48), (1, 4), 3, 48)


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    batch: int
    context: int  # tokens of the prompts
    num_tokens: int
    bound_s: float
    floor_s: float | None


def run(setting: GpuSetting, report: GpuReport, shape: str) -> None:
    """A row for the model, one per context's prompts, and one per load."""
    form = _QUICK if setting.is_quick else _FORMS.get(shape, _LARGE)
    loads = {context: _batches(form, context) for context in form.contexts}
    largest = max(form.batches)
    longest = max(form.contexts) + form.most_tokens
    config = core_config(
        setting,
        shape,
        num_requests=largest,
        max_model_len=longest,
        num_tokens=largest * longest if setting.device == "cpu" else None,
        graph_sizes=sorted({batch for batches in loads.values() for batch in batches}),
    )
    began = time.perf_counter()
    runner = WatchedRunner(load_runner(config))
    try:
        work = work_of(config.model)
        weight_bytes = 4 if setting.device == "cpu" else 2
        report.add(
            "model",
            model=shape_name(shape, is_quick=setting.is_quick),
            weights_gb=round((work.dense + work.output + work.experts) * weight_bytes / 1e9, 2),
            cache_tokens=(runner.num_blocks - 1) * runner.info.block_size,
            load_s=round(time.perf_counter() - began, 1),
            memory_gib=_memory_gib(setting),
        )
        points = [
            point
            for context, batches in loads.items()
            for batch in batches
            if (point := _point(setting, report, runner, work, form, batch, context)) is not None
        ]
        with serving(setting, config, runner) as stack, LoadClient(stack) as client:
            pids = {"core": os.getpid(), "worker": stack.worker_pid}
            for context in form.contexts:
                of_context = [point for point in points if point.context == context]
                if _compute_prompts(setting, report, client, runner, work, of_context):
                    for point in of_context:
                        _measure(setting, report, client, runner, point, shape, pids)
                else:
                    _skip(report, of_context)
    finally:
        runner.close()


def _batches(form: _Form, context: int) -> list[int]:
    """Batches in descending order: smaller ones find the largest one's prompts in the cache."""
    most = form.at_longest if context == max(form.contexts) else max(form.batches)
    return sorted({min(batch, most) for batch in form.batches}, reverse=True)


def _point(
    setting: GpuSetting,
    report: GpuReport,
    runner: WatchedRunner,
    work: Work,
    form: _Form,
    batch: int,
    context: int,
) -> _Point | None:
    """A load with its bounds; None if its cache does not fit, or there is no time."""
    name = f"context {context}, batch {batch}"
    bytes_per_s = ceilings(setting).bytes_per_s
    weight_bytes = 4 if setting.device == "cpu" else 2
    guess_s = bytes_read(runner, work, batch, context, weight_bytes) / bytes_per_s / _GUESS
    block_size, block_bytes = runner.info.block_size, runner.info.block_bytes
    room = (runner.num_blocks - 1) // batch * block_size - context - block_size
    if room < _FEWEST:
        needs = batch * -(-(context + _FEWEST + block_size) // block_size) * block_bytes
        has = (runner.num_blocks - 1) * block_bytes
        said = f"needs {needs / 2**30:.1f} GiB of cache, there are {has / 2**30:.1f}"
        report.add(name, skipped=said)
        return None
    if not setting.has_time(report, name):
        return None
    num_tokens = min(max(int(_SPAN_S / guess_s), _FEWEST), form.most_tokens, room)
    middle = context + num_tokens // 2
    floor_s = None
    if setting.device == "cuda":
        try:
            floor_s = replay_s(runner.runner, batch, middle)
        except ValueError as error:  # the load is measured without a floor
            report.add(f"{name}, bare replay", False, error=str(error)[:500])
    bound_s = bytes_read(runner, work, batch, middle, weight_bytes) / bytes_per_s
    return _Point(name, batch, context, num_tokens, bound_s, floor_s)


def _compute_prompts(
    setting: GpuSetting,
    report: GpuReport,
    client: LoadClient,
    runner: WatchedRunner,
    work: Work,
    points: list[_Point],
) -> bool:
    """Fill the cache with a context's prompts; returns whether there was time for it."""
    if not points:
        return False
    most, context = points[0].batch, points[0].context
    case = f"context {context}, prompts"
    num = most * context
    flops = work.linear_flops(num, most) + most * work.attention_flops(0, context)
    needs_s = flops / ceilings(setting).bf16_flops_per_s / _GUESS
    if not setting.has_time(report, case, needs_s):
        return False
    began = time.perf_counter()
    client.run(
        num=most,
        prompt_len=context,
        num_tokens=1,
        vocab_size=runner.info.vocab_size,
        within_s=setting.most_s(),
    )
    seconds = time.perf_counter() - began
    report.add(
        case,
        num_prompts=most,
        prompt_tokens_per_s=round(num / seconds, 1),
        seconds=round(seconds, 3),
    )
    return True


def _skip(report: GpuReport, points: list[_Point]) -> None:
    """Report the loads of prompts without enough time, with their bounds."""
    for point in points:
        report.add(
            point.name,
            skipped="no time for its prompts",
            floor_ms=_ms(point.floor_s),
            bound_ms=_ms(point.bound_s),
        )


def _measure(
    setting: GpuSetting,
    report: GpuReport,
    client: LoadClient,
    runner: WatchedRunner,
    point: _Point,
    shape: str,
    pids: dict[str, int],
) -> None:
    """Measure one load. The check is that every token arrived; the throughput has a goal."""
    step_s = (point.floor_s or point.bound_s) / _GUESS
    if not setting.has_time(report, point.name, point.num_tokens * step_s):
        return
    runner.watch(0)
    said = client.run(
        num=point.batch,
        prompt_len=point.context,
        num_tokens=point.num_tokens,
        vocab_size=runner.info.vocab_size,
        variant="stop2_logprobs5",
        pids=pids,
        within_s=setting.most_s(),
    )
    intervals = decode_intervals_s(runner.steps, point.batch)[_WARM_UP:]
    tokens_per_s: float = said["tokens_per_s"]
    share = goal = None
    if point.floor_s is not None:
        share, goal = tokens_per_s * point.floor_s / point.batch, goal_share(point.floor_s)
    report.add(
        point.name,
        said["output_tokens"] == point.batch * point.num_tokens,
        model=shape_name(shape, is_quick=setting.is_quick),
        output_tokens_per_s=tokens_per_s,
        step_median_ms=_ms(statistics.median(intervals) if intervals else None),
        floor_ms=_ms(point.floor_s),
        bound_ms=_ms(point.bound_s),
        share_of_floor=None if share is None else round(share, 4),
        goal_share=goal,
        meets_goal=None if share is None or goal is None else share >= goal,
        share_of_bound=round(tokens_per_s * point.bound_s / point.batch, 4),
        num_tokens=point.num_tokens,
        num_steps=len(intervals),
        tokens_per_delta=said["tokens_per_delta"],
        **{name: value for name, value in said.items() if name.endswith("_cpu_us_per_token")},
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)


def _memory_gib(setting: GpuSetting) -> float | None:
    """Memory of this process on the card."""
    if setting.device != "cuda":
        return None
    return round(torch.cuda.memory_reserved() / 2**30, 1)
