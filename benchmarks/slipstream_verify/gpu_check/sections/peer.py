"""Section: transformers' own continuous batching beside a stack, on the same card.

The same shape, prompts and lengths, greedy. Slipstream runs its whole output path: text, two stop
strings, top-5 logprobs, every token streamed; transformers hands ids to this process. Both are
measured over the span in which all requests decode, for transformers by each token's own time.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from slipstream_core.model.random_weights import random_config, random_module
from slipstream_core.runner.factory import load_runner
from slipstream_lab.common.bare_loop import random_prompts
from slipstream_verify.gpu_check.gpu_stack import LoadClient, serving
from slipstream_verify.gpu_check.models import core_config, model_of
from slipstream_verify.gpu_check.setting import GpuSetting

_GOAL_FACTOR = 3.0

# not annotated in transformers
_Generation: Any = GenerationConfig
_Batching: Any = ContinuousBatchingConfig


def run(setting: GpuSetting, shape: str) -> None:
    """Two rows per batch: Slipstream, and transformers with the factor between them."""
    batches = (4,) if setting.is_quick else (256, 32)
    prompt_len, num_tokens = (16, 24) if setting.is_quick else (128, 128)
    ours = _ours(setting, shape, batches, prompt_len, num_tokens)
    gc.collect()
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    model = _their_model(setting, shape)
    if setting.has_time("transformers, warm-up"):
        _theirs(setting, model, max(batches), prompt_len, 4)
    for batch in batches:
        case = f"transformers, batch {batch}"
        if not setting.has_time(case):
            continue
        began = time.perf_counter()
        tokens_per_s, num_done = _theirs(setting, model, batch, prompt_len, num_tokens)
        factor = ours[batch] / tokens_per_s if batch in ours and tokens_per_s else None
        setting.report.add(
            case,
            num_done == batch,
            model=setting.name_of(shape),
            attention=str(model.config._attn_implementation),
            prompt_len=prompt_len,
            num_tokens=num_tokens,
            output_tokens_per_s=round(tokens_per_s, 1),
            seconds=round(time.perf_counter() - began, 1),
            ours_over_theirs=None if factor is None else round(factor, 2),
            goal_factor=_GOAL_FACTOR,
            meets_goal=None if factor is None or setting.is_quick else factor >= _GOAL_FACTOR,
        )


def _ours(
    setting: GpuSetting,
    shape: str,
    batches: tuple[int, ...],
    prompt_len: int,
    num_tokens: int,
) -> dict[int, float]:
    """Slipstream's tokens per second, by batch."""
    length = prompt_len + num_tokens
    config = core_config(
        setting,
        shape,
        num_requests=max(batches),
        max_model_len=length + 16,
        num_tokens=max(batches) * (length + 32),
        graph_sizes=sorted(batches),
    )
    found: dict[int, float] = {}
    runner = load_runner(config)
    try:
        load = {"prompt_len": prompt_len, "vocab_size": runner.info.vocab_size}
        with serving(setting, config, runner) as stack, LoadClient(stack) as client:
            client.run(num=max(batches), num_tokens=1, **load)
            for batch in batches:
                if not setting.has_time(f"ours, batch {batch}"):
                    continue
                result = client.run(
                    num=batch, num_tokens=num_tokens, variant="stop2_logprobs5", **load
                )
                found[batch] = result["tokens_per_s"]
                setting.report.add(
                    f"ours, batch {batch}",
                    result["output_tokens"] == batch * num_tokens,
                    model=setting.name_of(shape),
                    prompt_len=prompt_len,
                    num_tokens=num_tokens,
                    output_tokens_per_s=found[batch],
                )
    finally:
        runner.close()
    return found


def _their_model(setting: GpuSetting, shape: str) -> Any:
    config = random_config(model_of(shape, is_quick=setting.is_quick))
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    device = torch.device(setting.device)
    module: Any = random_module(config, dtype, device, attn_implementation="sdpa")
    return module.eval()


def _theirs(
    setting: GpuSetting, model: Any, batch: int, prompt_len: int, num_tokens: int
) -> tuple[float, int]:
    """Tokens per second while all requests decode, and the number that reached their length."""
    prompts = random_prompts(batch, prompt_len, model.config.vocab_size)
    generation = _Generation(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    # on a CPU it would otherwise take most of the memory
    limits = {"num_blocks": 32, "max_batch_tokens": 128} if setting.device == "cpu" else {}
    outputs = model.generate_batch(
        [prompt.tolist() for prompt in prompts],
        generation_config=generation,
        continuous_batching_config=_Batching(**limits),
        record_timestamps=True,
        progress_bar=False,
    )
    times = [output.timestamps for output in outputs.values() if output.timestamps]
    num_done = sum(len(output.generated_tokens) == num_tokens for output in outputs.values())
    if len(times) < batch:
        return 0.0, num_done
    begin, end = max(it[0] for it in times), min(it[-1] for it in times)
    num_inside = sum(begin < at <= end for it in times for at in it)
    return (num_inside / (end - begin) if end > begin else 0.0), num_done
