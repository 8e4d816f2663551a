"""Section: decode steps of one model in one rank and in several, each on a card of its own.

The model has random weights in a real model's shape, which are saved first, as ranks read slices
of a checkpoint. Steps are those of the bare loop, greedy, without a stack, in a process for each
number of ranks (`slipstream_lab.tensor_parallel.decode_steps`). A row's bound is that of one card
divided by the ranks: what they exchange is not in it. On cards several ranks compute eagerly first,
then by recorded steps, as one rank does, and then with small sums in symmetric memory as well.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from slipstream_core.model.random_weights import random_config
from slipstream_core.step.plan import ModelInfo
from slipstream_lab.tensor_parallel.decode_steps import StepsTaken, StepsWanted
from slipstream_verify.gpu_check.bounds import ceilings, step_work, work_of
from slipstream_verify.gpu_check.models import core_config
from slipstream_verify.gpu_check.setting import GpuSetting

_OVER_ONE_GOAL = 0.62  # a step of two ranks over one of one, at the larger batch
_SHARE_GOAL = 0.9  # of the bound
_PROGRAM = "slipstream_lab.tensor_parallel.decode_steps"
_LOAD_S = 30.0  # expected, of a rank's start

_from_config: Any = AutoModelForCausalLM.from_config  # not annotated in transformers


@dataclass(frozen=True, slots=True)
class _RankSizes:
    batches: tuple[int, ...]
    prompt_len: int
    steps: int


_SIZES = _RankSizes((1, 64), 1024, 128)
_QUICK = _RankSizes((1, 4), 24, 8)


def run(setting: GpuSetting, shape: str) -> None:
    """A row for each number of ranks and batch."""
    most = setting.tensor_parallel_size
    if setting.device == "cuda" and (num := torch.cuda.device_count()) < most:
        setting.report.add("cards", skipped=f"{most} ranks need as many cards, here are {num}")
        return
    sizes = _QUICK if setting.is_quick else _SIZES
    limits = ceilings(setting)
    model = core_config(setting, shape, num_requests=1, max_model_len=64).model
    work, info = work_of(model), _info(setting, model)
    folder = _saved(setting, model)
    alone: dict[int, float] = {}
    cases = [("1 rank", 1, False, False), (f"{most} ranks", most, False, False)]
    if setting.device == "cuda":
        recorded = f"{most} ranks, recorded"
        cases.append((recorded, most, True, False))
        cases.append((f"{recorded}, symmetric memory", most, True, True))
    for case, ranks, records, symm_mem in cases:
        if not setting.has_time(case, _LOAD_S if setting.device == "cuda" else 0.0):
            return
        for taken in _steps_of(setting, folder, sizes, ranks, records, symm_mem):
            alone.setdefault(taken.batch, taken.step_us)
            rows = [(sizes.prompt_len + sizes.steps // 2 - 1, 1)] * taken.batch
            least = step_work(info, work, rows, _weight_bytes(setting))
            bound_us = 1e6 * least.bound_s(limits) / ranks
            is_largest = taken.batch == max(sizes.batches)
            goal = _OVER_ONE_GOAL if ranks == 2 and is_largest else None
            _report(setting, shape, case, taken, bound_us, alone[taken.batch], goal)


def _weight_bytes(setting: GpuSetting) -> int:
    return 4 if setting.device == "cpu" else 2


def _saved(setting: GpuSetting, model: str) -> Path:
    """The folder of a checkpoint with random weights."""
    folder = setting.folder / "ranks"
    dtype = torch.float32 if setting.device == "cpu" else torch.bfloat16
    with torch.device(setting.device):
        module = _from_config(random_config(model), dtype=dtype)
    module.save_pretrained(folder)
    del module
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    return folder


def _steps_of(
    setting: GpuSetting,
    folder: Path,
    sizes: _RankSizes,
    ranks: int,
    records: bool,
    symm_mem: bool,
) -> list[StepsTaken]:
    """Measure in a process of its own. Raises RuntimeError where it fails."""
    wanted = StepsWanted(
        model=str(folder),
        ranks=ranks,
        threads=1,
        batches=sizes.batches,
        prompt_len=sizes.prompt_len,
        steps=sizes.steps,
        temperature=0.0,
        top_p=1.0,
        device=setting.device,
        dtype="float32" if setting.device == "cpu" else "bfloat16",
        records=records,
        symm_mem=symm_mem,
    )
    done = subprocess.run(
        [sys.executable, "-m", _PROGRAM],
        input=msgspec.json.encode(wanted),
        stdout=subprocess.PIPE,
        timeout=setting.most_s(),
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{ranks} ranks ended with exit code {done.returncode}")
    return msgspec.json.decode(done.stdout, type=list[StepsTaken])


def _report(
    setting: GpuSetting,
    shape: str,
    case: str,
    taken: StepsTaken,
    bound_us: float,
    alone_us: float,
    goal: float | None,
) -> None:
    """alone_us: a step of one rank. goal: for the step over one of one rank."""
    share, over_one = bound_us / taken.step_us, taken.step_us / alone_us
    is_good = share >= _SHARE_GOAL and (goal is None or over_one <= goal)
    setting.report.add(
        f"{case}, batch {taken.batch}",
        model=setting.name_of(shape),
        share_of_bound=round(share, 4),
        goal_share=_SHARE_GOAL,
        step_median_ms=round(taken.step_us / 1e3, 4),
        bound_ms=round(bound_us / 1e3, 4),
        over_one_rank=round(over_one, 4),
        goal_over_one_rank=goal,
        meets_goal=None if setting.is_quick else is_good,
        launch_us=round(taken.launch_us, 1),
        num_steps=taken.steps,
    )


def _info(setting: GpuSetting, model: str) -> ModelInfo:
    """What a step's bytes are counted by."""
    config = random_config(model)
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return ModelInfo(
        name=model,
        vocab_size=config.vocab_size,
        max_model_len=config.max_position_embeddings,
        eos_token_ids=(),
        block_bytes=per_token * _weight_bytes(setting),
        block_size=1,
    )
