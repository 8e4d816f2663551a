"""Section: a closed loop of requests with random lengths, against decoding alone.

All places of the batch are taken all the time: a request that ends is followed by the next one,
whose prompt is computed beside the others' decoding. Its throughput is compared with that of as
many requests which only decode, at the mean length that the loop's requests have; both by a whole
stack with stop strings and top-5. `bound_share_of_decode` is what that ratio would be if both ran
at their bounds: prompts cost operations that no scheduling saves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from slipstream_bench.common.variants import Variant
from slipstream_core.runner.factory import load_runner
from slipstream_core.step.plan import ModelInfo
from slipstream_verify.gpu_check.bounds import Ceilings, ForwardWork, ceilings, step_work, work_of
from slipstream_verify.gpu_check.gpu_stack import LoadClient, serving
from slipstream_verify.gpu_check.load_client import ClientLoad, lengths_of
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.public_figures import report_public
from slipstream_verify.gpu_check.setting import GpuSetting

_GOAL = 0.85  # of decoding alone
_GUESS = 0.5  # expected share of the bound, for planning time
_VARIANT: Variant = "stop2_logprobs5"


@dataclass(frozen=True, slots=True)
class _SteadySizes:
    places: int
    prompt_len: int  # the longest; the shortest is `spread` of it
    num_tokens: int  # likewise
    spread: float
    turns: int  # requests to a place
    graph_sizes: tuple[int, ...]


_SIZES = _SteadySizes(256, 256, 512, 0.125, 5, (64, 128, 192, 224, 240, 248, 256))
_QUICK = _SteadySizes(4, 24, 32, 0.25, 5, (4,))


@dataclass(frozen=True, slots=True)
class LoopShape:
    """What a closed loop's steps hold on average."""

    context: int  # tokens in a decode row's cache
    prompt_tokens: float  # computed beside each step's decode rows


def loop_shape(prompt_lens: list[int], token_lens: list[int], places: int) -> LoopShape:
    """The average step of `places` rows; a request is in a step for each of its output tokens."""
    prompts, tokens = np.array(prompt_lens), np.array(token_lens)
    context = np.average(prompts + tokens / 2, weights=tokens)
    return LoopShape(round(float(context)), float(places * prompts.mean() / tokens.mean()))


def bounds_of(
    info: ModelInfo,
    work: ForwardWork,
    shape: LoopShape,
    places: int,
    weight_bytes: int,
    limits: Ceilings,
) -> tuple[float, float]:
    """Seconds that a step takes at least: of decode rows alone, and with the prompts' tokens."""
    decodes = [(shape.context - 1, 1)] * places
    chunk = (0, max(1, round(shape.prompt_tokens)))
    alone, together = (
        step_work(info, work, rows, weight_bytes).bound_s(limits)
        for rows in (decodes, [*decodes, chunk])
    )
    return alone, together


def run(setting: GpuSetting, shape: str) -> None:
    """A row for decoding alone, one for the loop, and what others published."""
    report_public(setting.report, shape)
    sizes = _QUICK if setting.is_quick else _SIZES
    loop = {
        "num": sizes.turns * sizes.places,
        "prompt_len": sizes.prompt_len,
        "num_tokens": sizes.num_tokens,
        "spread": sizes.spread,
        "running": sizes.places,
    }
    longest = 2 * (sizes.prompt_len + sizes.num_tokens)
    config = core_config(
        setting,
        shape,
        num_requests=sizes.places,
        max_model_len=longest,
        num_tokens=sizes.places * longest,
        graph_sizes=sizes.graph_sizes,
    )
    limits = ceilings(setting)
    runner = load_runner(config)
    try:
        info, work = runner.info, work_of(config.model)
        loop["vocab_size"] = info.vocab_size
        average = loop_shape(*lengths_of(ClientLoad(**loop)), sizes.places)  # type: ignore[arg-type]
        weight_bytes = 4 if setting.device == "cpu" else 2
        alone_s, together_s = bounds_of(info, work, average, sizes.places, weight_bytes, limits)
        num_tokens = sizes.num_tokens // 2
        decode = {
            "num": sizes.places,
            "prompt_len": max(1, average.context - num_tokens // 2),
            "num_tokens": num_tokens,
            "vocab_size": info.vocab_size,
        }
        with serving(setting, config, runner) as stack, LoadClient(stack) as client:
            pids = {"core": os.getpid(), "worker": stack.worker_pid}
            if not setting.has_time("decoding alone", num_tokens * alone_s / _GUESS):
                return
            result = client.run(**decode, variant=_VARIANT, pids=pids, within_s=setting.most_s())
            decode_per_s: float = result["tokens_per_s"]
            setting.report.add(
                "decoding alone",
                result["output_tokens"] == sizes.places * num_tokens,
                model=setting.name_of(shape),
                batch=sizes.places,
                context=average.context,
                share_of_bound=round(decode_per_s * alone_s / sizes.places, 4),
                output_tokens_per_s=decode_per_s,
            )
            case = f"closed loop of {sizes.places}"
            steps = sizes.turns * sizes.num_tokens
            if not setting.has_time(case, steps * together_s / _GUESS):
                return
            result = client.run(**loop, variant=_VARIANT, pids=pids, within_s=setting.most_s())
            per_s: float = result["tokens_per_s"]
            share = per_s / decode_per_s if decode_per_s else 0.0
            setting.report.add(
                case,
                result["output_tokens"] == sum(lengths_of(ClientLoad(**loop))[1]),  # type: ignore[arg-type]
                model=setting.name_of(shape),
                num_requests=sizes.turns * sizes.places,
                prompt_tokens_per_step=round(average.prompt_tokens, 1),
                share_of_bound=round(per_s * together_s / sizes.places, 4),
                share_of_decode=round(share, 4),
                goal_share_of_decode=_GOAL,
                bound_share_of_decode=round(alone_s / together_s, 4),
                meets_goal=None if setting.is_quick else share >= _GOAL,
                output_tokens_per_s=per_s,
                **{name: it for name, it in result.items() if name.startswith("window")},
                **{name: it for name, it in result.items() if name.endswith("_cpu_us_per_token")},
            )
    finally:
        runner.close()
