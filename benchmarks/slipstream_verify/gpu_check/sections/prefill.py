"""Section: prefill by the bare loop, in chunks of 8,192 tokens, against the card's matrix rate.

`share_of_bound` is of all operations, attention's included, at the measured rate of a large
product. `share_of_bf16_rate` is of the linear layers' alone: attention counts as lost time there.
"""

from __future__ import annotations

import statistics
from itertools import pairwise

from slipstream_core.runner.factory import load_runner
from slipstream_core.step.plan import Runner
from slipstream_lab.common.bare_loop import LoopRequest, drive, random_prompts
from slipstream_verify.gpu_check.bounds import Ceilings, ForwardWork, ceilings, step_work, work_of
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.setting import SHAPES, GpuSetting

_GOALS = {SHAPES[1]: 0.55}  # of one prompt that fills the step
_STEPS = 10
_WARM_UP = 2  # steps excluded from medians


def run(setting: GpuSetting, shape: str) -> None:
    """A row per length of prompts that fill a chunk."""
    budget = 256 if setting.is_quick else 8192
    lengths = (budget, budget // 8)
    config = core_config(
        setting,
        shape,
        num_requests=64,
        max_model_len=budget + 16,
        num_tokens=4 * (budget + 16 * 8),
        enforce_eager=True,  # no step here is small enough for a recording
    )
    limits = ceilings(setting)
    runner = load_runner(config)
    try:
        work = work_of(config.model)
        for length in lengths:
            _measure(setting, runner, work, limits, shape, length, budget)
    finally:
        runner.close()


def _measure(
    setting: GpuSetting,
    runner: Runner,
    work: ForwardWork,
    limits: Ceilings,
    shape: str,
    length: int,
    budget: int,
) -> None:
    num = budget // length  # prompts per step
    case = f"{num} of {length} tokens to a step"
    linear = work.linear_flops(budget, num)
    attention = num * work.attention_flops(0, length)
    flops_per_s = limits.bf16_flops_per_s
    if not setting.has_time(case, (_STEPS + _WARM_UP) * (linear + attention) / flops_per_s):
        return
    prompts = random_prompts(num * (_STEPS + _WARM_UP), length, runner.info.vocab_size, length)
    steps = drive(runner, [LoopRequest(prompt, 1) for prompt in prompts], budget=budget).steps
    full = [step.at_s for step in steps if step.num_requests == num and not step.num_decodes]
    step_s = statistics.median([b - a for a, b in pairwise(full)][_WARM_UP - 1 :])
    weight_bytes = 4 if setting.device == "cpu" else 2
    least = step_work(runner.info, work, [(0, length)] * num, weight_bytes)
    share = least.bound_s(limits) / step_s
    goal = _GOALS.get(shape) if num == 1 else None
    setting.report.add(
        case,
        model=setting.name_of(shape),
        share_of_bound=round(share, 4),
        goal_share=goal,
        meets_goal=None if goal is None or setting.is_quick else share >= goal,
        num_steps=len(full),
        step_median_ms=round(step_s * 1e3, 3),
        prompt_tokens_per_s=round(budget / step_s, 1),
        linear_tflop=round(linear / 1e12, 4),
        attention_tflop=round(attention / 1e12, 4),
        share_of_bf16_rate=round(linear / step_s / flops_per_s, 4),
    )
