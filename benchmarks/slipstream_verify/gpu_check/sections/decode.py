"""Section: decoding by a whole stack, against what its step must read or compute at least.

The model has random weights in a real model's shape, so its speed is real and its tokens are not.
Core (this process), worker and client form a stack as it serves: two stop strings, top-5 logprobs,
every token streamed.

- Each context's prompts are computed once, for the largest batch; the loads find them in the prefix
  cache (in separate blocks per row), so a load is one short step followed by decoding.
- Throughput is the client's, over the span in which all streams run. `bound_ms` (bytes or
  operations at the measured ceilings) and `floor_ms` (the bare replay of the step's graph) are for
  the context length in the middle of that span. Goals are shares of the bound: a share of the
  replay says what the host costs, not whether the kernels are any good.
- A load whose cache does not fit the card is skipped, and reported with its sizes.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch

from slipstream_core.runner.factory import load_runner
from slipstream_lab.common.bare_loop import decode_intervals_s
from slipstream_verify.gpu_check.bounds import (
    Ceilings,
    ForwardWork,
    ceilings,
    replay_s,
    step_work,
    work_of,
)
from slipstream_verify.gpu_check.device_use import MeasuredRunner
from slipstream_verify.gpu_check.gpu_stack import LoadClient, serving
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.setting import SHAPES, GpuSetting
from slipstream_verify.gpu_check.step_plans import why_not_cached

_SPAN_S = 0.8  # approximate measured span of a load
_FEWEST = 32  # fewest output tokens of a request
_WARM_UP = 4  # decode steps excluded from medians
_GUESS = 0.6  # expected share of the bounds, for planning time
# by shape and batch: shares of the bound, and the longest step in ms
_GOALS = {(SHAPES[1], 1): 0.9, (SHAPES[1], 256): 0.8}
_STEP_GOALS_MS = {(SHAPES[0], 1): 1.5}


@dataclass(frozen=True, slots=True)
class _Sizes:
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    at_longest: int  # largest batch at the longest context
    most_tokens: int  # most output tokens of a request

    def batches_at(self, context: int) -> list[int]:
        """In descending order: smaller batches find the largest one's prompts in the cache."""
        most = self.at_longest if context == max(self.contexts) else max(self.batches)
        return sorted({min(batch, most) for batch in self.batches}, reverse=True)


_SIZES = {SHAPES[0]: _Sizes((128, 1024), (1, 32, 256, 1024), 1024, 320)}
_LARGE = _Sizes((128, 1024), (1, 32, 256, 1024), 512, 320)
_QUICK = _Sizes((16, 48), (1, 4), 3, 48)
_FIRST = _Sizes((1024,), (1, 32, 256), 256, 320)
_QUICK_FIRST = _Sizes((48,), (1, 4), 4, 48)


@dataclass(frozen=True, slots=True)
class _Point:
    name: str
    batch: int
    context: int  # tokens of the prompts
    num_tokens: int
    bound_s: float
    floor_s: float | None


def run(setting: GpuSetting, shape: str) -> None:
    """A row for the model, one per context's prompts, and one per load."""
    _run(setting, shape, _QUICK if setting.is_quick else _SIZES.get(shape, _LARGE))


def run_first(setting: GpuSetting, shape: str) -> None:
    """As `run`, of fewer loads."""
    _run(setting, shape, _QUICK_FIRST if setting.is_quick else _FIRST)


def _run(setting: GpuSetting, shape: str, sizes: _Sizes) -> None:
    loads = [(context, batch) for context in sizes.contexts for batch in sizes.batches_at(context)]
    largest = max(sizes.batches)
    longest = max(sizes.contexts) + sizes.most_tokens
    config = core_config(
        setting,
        shape,
        num_requests=largest,
        max_model_len=longest,
        num_tokens=largest * longest if setting.device == "cpu" else None,
        graph_sizes=sorted({batch for _, batch in loads}),
    )
    limits = ceilings(setting)
    began = time.perf_counter()
    runner = MeasuredRunner(load_runner(config))
    try:
        decode = _Decode(setting, shape, runner, work_of(config.model), limits)
        decode.report_model(load_s=time.perf_counter() - began)
        points = [
            point
            for context, batch in loads
            if (point := decode.point(context, batch, sizes.most_tokens)) is not None
        ]
        with serving(setting, config, runner) as stack, LoadClient(stack) as client:
            pids = {"core": os.getpid(), "worker": stack.worker_pid}
            for context in sizes.contexts:
                of_context = [point for point in points if point.context == context]
                is_ready = bool(of_context) and decode.compute_prompts(client, of_context[0])
                for point in of_context:
                    if is_ready:
                        decode.measure(client, point, pids)
                    else:
                        decode.skip(point)
    finally:
        runner.close()


@dataclass(frozen=True, slots=True)
class _Decode:
    """The loads of one model."""

    setting: GpuSetting
    shape: str
    runner: MeasuredRunner
    work: ForwardWork
    limits: Ceilings

    @property
    def _weight_bytes(self) -> int:
        return 4 if self.setting.device == "cpu" else 2

    def report_model(self, load_s: float) -> None:
        """The row of the model."""
        work, runner = self.work, self.runner
        num_weights = work.dense + work.output + work.experts
        self.setting.report.add(
            "model",
            model=self.setting.name_of(self.shape),
            weights_gb=round(num_weights * self._weight_bytes / 1e9, 2),
            cache_tokens=(runner.num_blocks - 1) * runner.info.block_size,
            load_s=round(load_s, 1),
            memory_gib=_memory_gib(self.setting),
        )

    def point(self, context: int, batch: int, most_tokens: int) -> _Point | None:
        """A load with its bounds; None if its cache does not fit, or there is no time."""
        setting, runner, info = self.setting, self.runner, self.runner.info
        name = f"context {context}, batch {batch}"
        guess_s = self._bound_s(batch, context) / _GUESS
        room = (runner.num_blocks - 1) // batch * info.block_size - context - info.block_size
        least = context + _FEWEST + info.block_size
        if (why := why_not_cached(runner, [least] * batch)) is not None:
            setting.report.add(name, skipped=why)
            return None
        if not setting.has_time(name):
            return None
        num_tokens = min(max(int(_SPAN_S / guess_s), _FEWEST), most_tokens, room)
        middle = context + num_tokens // 2
        floor_s = None
        if setting.device == "cuda":
            try:
                floor_s = replay_s(runner.runner, batch, middle)
            except ValueError as error:  # the load is measured without a floor
                setting.report.add(f"{name}, bare replay", False, error=str(error)[:500])
        return _Point(name, batch, context, num_tokens, self._bound_s(batch, middle), floor_s)

    def _bound_s(self, batch: int, context: int) -> float:
        rows = [(context - 1, 1)] * batch
        least = step_work(self.runner.info, self.work, rows, self._weight_bytes)
        return least.bound_s(self.limits)

    def compute_prompts(self, client: LoadClient, largest: _Point) -> bool:
        """Fill the cache with a context's prompts; returns whether there was time for it."""
        setting, work = self.setting, self.work
        most, context = largest.batch, largest.context
        case = f"context {context}, prompts"
        num = most * context
        flops = work.linear_flops(num, most) + most * work.attention_flops(0, context)
        if not setting.has_time(case, flops / self.limits.bf16_flops_per_s / _GUESS):
            return False
        began = time.perf_counter()
        client.run(
            num=most,
            prompt_len=context,
            num_tokens=1,
            vocab_size=self.runner.info.vocab_size,
            within_s=setting.most_s(),
        )
        seconds = time.perf_counter() - began
        setting.report.add(
            case,
            num_prompts=most,
            prompt_tokens_per_s=round(num / seconds, 1),
            seconds=round(seconds, 3),
        )
        return True

    def skip(self, point: _Point) -> None:
        """Report a load without time for its prompts, with its bounds."""
        self.setting.report.add(
            point.name,
            skipped="no time for its prompts",
            floor_ms=_ms(point.floor_s),
            bound_ms=_ms(point.bound_s),
        )

    def measure(self, client: LoadClient, point: _Point, pids: dict[str, int]) -> None:
        """Measure one load. The check is that every token arrived; the throughput has a goal."""
        setting, runner = self.setting, self.runner
        step_s = (point.floor_s or point.bound_s) / _GUESS
        if not setting.has_time(point.name, point.num_tokens * step_s):
            return
        runner.watch(0)
        result = client.run(
            num=point.batch,
            prompt_len=point.context,
            num_tokens=point.num_tokens,
            vocab_size=runner.info.vocab_size,
            variant="stop2_logprobs5",
            pids=pids,
            within_s=setting.most_s(),
        )
        intervals = decode_intervals_s(runner.steps, point.batch)[_WARM_UP:]
        tokens_per_s: float = result["tokens_per_s"]
        share = tokens_per_s * point.bound_s / point.batch
        key = (self.shape, point.batch)
        goal, goal_ms = _GOALS.get(key), _STEP_GOALS_MS.get(key)
        step_ms = _ms(statistics.median(intervals) if intervals else None)
        reached = [share >= goal] if goal is not None else []
        if goal_ms is not None and step_ms is not None:
            reached.append(step_ms <= goal_ms)
        setting.report.add(
            point.name,
            result["output_tokens"] == point.batch * point.num_tokens,
            model=setting.name_of(self.shape),
            share_of_bound=round(share, 4),
            goal_share=goal,
            goal_step_ms=goal_ms,
            meets_goal=all(reached) if reached and not setting.is_quick else None,
            output_tokens_per_s=tokens_per_s,
            step_median_ms=step_ms,
            bound_ms=_ms(point.bound_s),
            floor_ms=_ms(point.floor_s),
            share_of_floor=(
                None
                if point.floor_s is None
                else round(tokens_per_s * point.floor_s / point.batch, 4)
            ),
            num_tokens=point.num_tokens,
            num_steps=len(intervals),
            tokens_per_delta=result["tokens_per_delta"],
            **{name: value for name, value in result.items() if name.endswith("_cpu_us_per_token")},
        )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 4)


def _memory_gib(setting: GpuSetting) -> float | None:
    """Memory of this process on the card."""
    if setting.device != "cuda":
        return None
    return round(torch.cuda.memory_reserved() / 2**30, 1)
