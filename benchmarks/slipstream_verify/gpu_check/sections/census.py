"""Section: the kernels of a step, with their numbers and times, by the profiler.

A row for the step, then one for each of the kernels that take longest, and one for the rest.

- Decode steps are bare replays of their graphs, sampling and top log-probabilities included: the
  difference of two profiles of which one has `_RUNS` replays more. Where none are recorded, on a
  CPU or after a failed recording, steps are launched instead.
- The prefill and the mixed steps (decode rows and a chunk of a prompt; the first is recorded) are
  launched one after the other, as a stack launches them.
- `step_us` is measured without the profiler. What lies between it and the kernels' own time is idle
  time of the device: gaps between launches, or a host that is late.
- A card's cache takes what the model leaves; a step whose rows do not fit it is skipped, and
  reported with its sizes.
- The bound is of the measured ceilings; launches may be held against `--predict`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from msgspec import structs

from slipstream_core.runner.factory import load_runner
from slipstream_core.step.plan import Runner
from slipstream_verify.gpu_check.bounds import Ceilings, ForwardWork, ceilings, step_work, work_of
from slipstream_verify.gpu_check.kernel_census import KernelUse, per_run, profiled
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.setting import GpuSetting
from slipstream_verify.gpu_check.step_plans import plan_of, why_not_cached

_RUNS = 10
_TIMED_RUNS = 20
_WARM_UP = 3
_NAMED = 16  # kernels with a row of their own


@dataclass(frozen=True, slots=True)
class _CensusSizes:
    batches: tuple[int, ...]
    context: int  # tokens in the cache of each decode row
    short: int  # ... when the largest batch is decoded once more
    prefill: int  # tokens of one prompt
    mixed: tuple[tuple[int, int], ...]  # decode rows, and tokens of a prompt beside them


_SIZES = _CensusSizes((1, 32, 256), 1024, 128, 8192, ((256, 512), (256, 3000)))
_QUICK = _CensusSizes((1, 4), 32, 16, 128, ((3, 16),))


def run(setting: GpuSetting, shape: str) -> None:
    """The rows of one model."""
    sizes = _QUICK if setting.is_quick else _SIZES
    most = max(*sizes.batches, *(rows + 1 for rows, _ in sizes.mixed))
    longest = max(sizes.context, sizes.prefill) + 16
    config = core_config(
        setting,
        shape,
        num_requests=most,
        max_model_len=longest,
        num_tokens=(
            most * (sizes.context + 32) + sizes.prefill if setting.device == "cpu" else None
        ),
        graph_sizes=(*sizes.batches, most),  # a mixed step samples that many rows
    )
    limits = ceilings(setting)
    runner = load_runner(config)
    try:
        census = _Census(setting, shape, runner, work_of(config.model), limits)
        for batch in sizes.batches:
            census.decode(f"decode of {batch}", batch, sizes.context)
        short = f"decode of {sizes.batches[-1]}, context {sizes.short}"
        census.decode(short, sizes.batches[-1], sizes.short)
        census.launched(f"prefill of {sizes.prefill}", [(0, sizes.prefill)])
        for rows, tokens in sizes.mixed:
            mixed = [(sizes.context - 1, 1)] * rows + [(0, tokens)]
            census.launched(f"{rows} rows and a chunk of {tokens}", mixed)
    finally:
        runner.close()


@dataclass(frozen=True, slots=True)
class _Census:
    """The steps of one model."""

    setting: GpuSetting
    shape: str
    runner: Runner
    work: ForwardWork
    limits: Ceilings

    def decode(self, case: str, batch: int, context: int) -> None:
        """A decode step: its replay, or launched if there is none."""
        rows = [(context - 1, 1)] * batch
        bare: Any = getattr(self.runner, "bare_replay", None)
        if self.setting.device == "cpu" or bare is None:
            return self.launched(case, rows)
        if not self._has_room(case, rows):
            return None
        try:
            bare(batch, 1, context=context)
        except ValueError as error:
            self.setting.report.add(f"{case}, bare replay", False, error=str(error)[:500])
            return self.launched(case, rows)
        step_s = bare(batch, _TIMED_RUNS, context=context) / _TIMED_RUNS
        fewer, more = (
            profiled("cuda", partial(bare, batch, num, context=context)) for num in (1, 1 + _RUNS)
        )
        self._report(case, rows, per_run(more, fewer, _RUNS), step_s, is_replay=True)
        return None

    def launched(self, case: str, rows: list[tuple[int, int]]) -> None:
        """A step that is launched again and again, the next one before the last is collected."""
        if not self._has_room(case, rows):
            return
        plan, numbers = plan_of(self.runner, rows), count()

        def steps(num: int) -> None:
            self.runner.launch(structs.replace(plan, step=next(numbers)))
            for _ in range(num - 1):
                self.runner.launch(structs.replace(plan, step=next(numbers)))
                self.runner.collect()
            self.runner.collect()

        steps(_WARM_UP)
        step_s = _seconds(lambda: steps(_RUNS)) / _RUNS
        uses = profiled(self.setting.device, lambda: steps(_RUNS))
        self._report(case, rows, per_run(uses, (), _RUNS), step_s, is_replay=False)

    def _has_room(self, case: str, rows: list[tuple[int, int]]) -> bool:
        """Whether there is a cache and time for a step; if not, a row says so."""
        why = why_not_cached(self.runner, [before + now for before, now in rows])
        if why is not None:
            self.setting.report.add(case, skipped=why)
            return False
        return self.setting.has_time(case)

    def _report(
        self,
        case: str,
        rows: list[tuple[int, int]],
        uses: list[KernelUse],
        step_s: float,
        *,
        is_replay: bool,
    ) -> None:
        report, runner = self.setting.report, self.runner
        weight_bytes = 4 if self.setting.device == "cpu" else 2
        bound_s = step_work(runner.info, self.work, rows, weight_bytes).bound_s(self.limits)
        busy_us = sum(use.us for use in uses)
        report.add(
            case,
            bool(uses),
            model=self.setting.name_of(self.shape),
            is_replay=is_replay,
            launches=round(sum(use.count for use in uses), 1),
            distinct_kernels=len(uses),
            step_us=round(step_s * 1e6, 1),
            busy_us=round(busy_us, 1),
            idle_us=round(step_s * 1e6 - busy_us, 1),
            bound_us=round(bound_s * 1e6, 1),
            share_of_bound=round(bound_s / step_s, 4),
        )
        rest = uses[_NAMED:]
        named = [(f"{case}: {use.name}", use) for use in uses[:_NAMED]]
        if rest:
            others = KernelUse("", sum(use.count for use in rest), sum(use.us for use in rest))
            named.append((f"{case}: {len(rest)} others", others))
        for name, use in named:
            report.add(
                name,
                count=round(use.count, 2),
                us=round(use.us, 2),
                us_each=round(use.us / use.count, 3),
                share_of_busy=round(use.us / busy_us, 4) if busy_us else None,
            )


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
