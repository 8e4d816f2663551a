"""Part: decoding with the bare loop, by batch size, against what the device's memory allows.

The model has random weights in a real model's shape, so its speed is real and its tokens are not.

A step must read every weight once, and the cache of every row. The bound is those bytes over the
measured bandwidth; no step of this batch can be shorter.
"""

from __future__ import annotations

import statistics

from slipstream.bench.gpu_check import cudnn_attention
from slipstream.bench.gpu_check.drive import Wanted, decode_intervals_s, drive, random_prompts
from slipstream.bench.gpu_check.models import saved_shape, shape_name, weight_bytes
from slipstream.bench.gpu_check.probes import default_bandwidth
from slipstream.bench.gpu_check.report import Report
from slipstream.bench.gpu_check.setting import Setting
from slipstream_core.config import CoreConfig
from slipstream_core.runner.load import load_runner
from slipstream_core.runner.plan import Runner

_WARM_UP = 8  # decode steps that are not counted


def run(setting: Setting, report: Report) -> None:
    """A row for each batch size and way to sample."""
    report.say(f"making a model in the {shape_name(is_quick=setting.is_quick)}")
    path = saved_shape(setting.folder, setting.device, is_quick=setting.is_quick)
    report.say(f"loading its {weight_bytes(path) / 1e6:.0f} MB")
    bandwidth = default_bandwidth(setting.device, is_quick=setting.is_quick)
    batches = (1, 4) if setting.is_quick else (1, 32, 256)
    prompt_len, num_tokens = (16, 24) if setting.is_quick else (128, 56)
    config = core_config(setting, num_requests=max(batches), length=prompt_len + num_tokens)
    runner = load_runner(config)
    try:
        cases = [(batch, 0.0) for batch in batches] + [(max(batches), 1.0)]
        if cudnn_attention.may_be_chosen(setting.device):
            _measure(setting, report, runner, 32, 0.0, prompt_len, 16, bandwidth)
            cudnn_attention.rule_out()
        for batch, temperature in cases:
            _measure(setting, report, runner, batch, temperature, prompt_len, num_tokens, bandwidth)
    finally:
        runner.close()


def core_config(
    setting: Setting, *, num_requests: int, length: int, address: str = ""
) -> CoreConfig:
    """Settings of a core for the shape, with a cache for so many requests of so many tokens."""
    path = saved_shape(setting.folder, setting.device, is_quick=setting.is_quick)
    return CoreConfig(
        model=str(path),
        served_model_name=shape_name(is_quick=setting.is_quick),
        address=address,
        device=setting.device,
        dtype="float32" if setting.device == "cpu" else "bfloat16",
        num_blocks=num_requests * (length // 16 + 2) + 1,
        max_num_seqs=num_requests,
        max_num_batched_tokens=8192,
        max_model_len=length + 16,
    )


def _measure(
    setting: Setting,
    report: Report,
    runner: Runner,
    batch: int,
    temperature: float,
    prompt_len: int,
    num_tokens: int,
    bandwidth: float,
) -> None:
    has_cudnn = cudnn_attention.may_be_chosen(setting.device)
    case = f"batch {batch}" + (", sampled" if temperature else ", greedy")
    if has_cudnn:
        case += ", cuDNN's attention"
    if not setting.has_time(report, case):
        return
    prompts = random_prompts(batch, prompt_len, runner.info.vocab_size)
    requests = [Wanted(prompt, num_tokens, temperature=temperature) for prompt in prompts]
    _, steps = drive(runner, requests, budget=8192)
    intervals = decode_intervals_s(steps, batch)[_WARM_UP:]
    step_s = statistics.median(intervals)
    context = prompt_len + (num_tokens + _WARM_UP) / 2
    path = saved_shape(setting.folder, setting.device, is_quick=setting.is_quick)
    num_bytes = weight_bytes(path)
    if setting.device == "cpu":
        num_bytes *= 2  # they are saved in bfloat16 and computed in float32
    num_bytes += int(batch * context * runner.info.block_bytes / runner.info.block_size)
    bound_s = num_bytes / bandwidth
    report.add(
        case,
        model=shape_name(is_quick=setting.is_quick),
        batch=batch,
        mean_context_tokens=context,
        temperature=temperature,
        cudnn_attention=has_cudnn,
        num_steps=len(intervals),
        step_median_ms=round(step_s * 1e3, 3),
        step_mean_ms=round(statistics.mean(intervals) * 1e3, 3),
        output_tokens_per_s=round(batch / step_s, 1),
        read_mb=round(num_bytes / 1e6, 1),
        bound_ms=round(bound_s * 1e3, 4),
        share_of_bound=round(bound_s / step_s, 4),
    )
