"""Steps of a model's runner, timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from slipstream_core.runner.torch_runner import TorchRunner
from slipstream_core.step.plan import StepPlan, blank_plan


def timed(runner: TorchRunner, plan: StepPlan, steps: int) -> Callable[[], float]:
    """Measures the median of seconds that a step takes."""

    def measure() -> float:
        taken = []
        for _ in range(steps):
            begin = time.perf_counter()
            runner.launch(plan)
            runner.collect()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken)

    return measure


def decode_step(batch: int, context: int) -> StepPlan:
    """A step of `batch` rows behind `context` tokens each; all keys are in the null block."""
    return blank_plan(
        token_ids=np.arange(batch) + 5,
        positions=np.full(batch, context - 1),
        slots=np.arange(batch),
        query_lens=np.ones(batch, np.int32),
        kv_lens=np.full(batch, context, np.int32),
        prompt_lens=np.ones(batch, np.int32),
        samples=np.ones(batch, bool),
        temperatures=np.zeros(batch, np.float32),
    )
