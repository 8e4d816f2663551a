"""Part: the tokens of the scheduler and the runner on the device, against transformers' own.

Small models, prompts of mixed lengths cut into chunks, several requests in a step, one step ahead.
- float32: the same tokens as `generate` with eager attention on the same device. Where they
  diverge, the two likeliest tokens may have been too close to tell apart: that is counted as a near
  tie.
- bfloat16: every token is judged by the logits of the same weights in float32, given the tokens
  before it. A token other than the likeliest is a near tie if it is no further from it than
  transformers' own largest error in bfloat16, and wrong beyond that. The median error of the
  tokens' logprobs must not be much larger than transformers' own; the largest error means little
  for a model with experts, where rounding may select other experts.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from slipstream_core.config import CoreConfig
from slipstream_core.runner.factory import load_runner
from slipstream_lab.common.bare_loop import LoopOutput, LoopRequest, drive
from slipstream_verify.gpu_check.gpu_report import GpuReport
from slipstream_verify.gpu_check.models import (
    ARCHITECTURES,
    BFLOAT16_ARCHITECTURES,
    QUICK_ARCHITECTURES,
    SMALL_BLOCK,
    SMALL_VOCAB,
    save_small,
)
from slipstream_verify.gpu_check.setting import GpuSetting

_BUDGET = 40  # tokens per step, so that prompts are cut
_TIE_LOGITS = 1e-3  # float32: a token this close to the likeliest is a tie
_LOGPROB_ERROR = 1e-3  # float32: largest error of a logprob
_WRONG_SHARE = 0.01  # bfloat16: rounding may select other experts
_MEDIAN_FACTOR = 2.0  # bfloat16: over transformers' own median error, which is as random
_PROMPT_LENS = (5, 47, 1, 90, 12, 33, 64, 3, 29, 17, 71, 8)

DType = Literal["float32", "bfloat16"]

# not annotated in transformers
_load: Any = AutoModelForCausalLM.from_pretrained


@dataclass(frozen=True, slots=True)
class _ExactnessLoad:
    prompts: list[np.ndarray[tuple[int], np.dtype[np.uint32]]]
    num_tokens: int

    @property
    def requests(self) -> list[LoopRequest]:
        return [LoopRequest(prompt, self.num_tokens, num_logprobs=1) for prompt in self.prompts]


def run(setting: GpuSetting) -> None:
    """A row per architecture and dtype."""
    _run(setting, ("bfloat16", "float32"))


def run_first(setting: GpuSetting) -> None:
    """As `run`, in bfloat16 alone."""
    _run(setting, ("bfloat16",))


def _run(setting: GpuSetting, dtypes: Sequence[DType]) -> None:
    rng = np.random.default_rng(1)
    lengths = _PROMPT_LENS[: 4 if setting.is_quick else None]
    prompts = [rng.integers(3, SMALL_VOCAB, n, np.uint32) for n in lengths]
    load = _ExactnessLoad(prompts, 8 if setting.is_quick else 24)
    names = QUICK_ARCHITECTURES if setting.is_quick else tuple(ARCHITECTURES)
    # first what is served: a card that is slower than expected leaves out the rest
    cases: list[tuple[str, DType]] = [
        (name, "bfloat16") for name in BFLOAT16_ARCHITECTURES if name in names
    ]
    cases += [(name, "float32") for name in names]
    cases = [case for case in cases if case[1] in dtypes]
    for name, dtype in cases:
        case = f"{name} {dtype}"
        if not setting.has_time(case):
            continue
        try:
            path = setting.folder / name
            if not path.exists():
                save_small(name, setting.folder)
            check = _check_float32 if dtype == "float32" else _check_bfloat16
            check(case, path, load, setting.device, setting.report)
        except Exception as error:
            setting.report.add(case, False, error=f"{type(error).__name__}: {error}"[:500])
        gc.collect()


def _check_float32(
    case: str, path: Path, load: _ExactnessLoad, device: str, report: GpuReport
) -> None:
    outputs = _outputs(path, "float32", load, device)
    reference = _reference(path, torch.float32, device)
    num_same = num_ties = num_wrong = 0
    worst_logprob = 0.0
    for prompt, output in zip(load.prompts, outputs, strict=True):
        logits = _forced(reference, prompt, output, device)
        expected = _generate(reference, prompt, load.num_tokens, device)
        token_ids = torch.tensor(output.token_ids, device=device)
        parted = np.flatnonzero(np.array(output.token_ids) != expected)
        if not len(parted):
            num_same += 1
        elif _behind(logits, token_ids)[parted[0]] < _TIE_LOGITS:
            num_ties += 1
        else:
            num_wrong += 1
        logprobs = _logprobs(logits, token_ids)
        worst_logprob = max(worst_logprob, float(abs(logprobs - output.logprobs).max()))
    report.add(
        case,
        num_wrong == 0 and worst_logprob < _LOGPROB_ERROR,
        num_requests=len(outputs),
        num_tokens=sum(len(output.token_ids) for output in outputs),
        num_same_requests=num_same,
        num_near_tie_requests=num_ties,
        num_wrong_requests=num_wrong,
        max_logprob_error=worst_logprob,
    )


def _check_bfloat16(
    case: str, path: Path, load: _ExactnessLoad, device: str, report: GpuReport
) -> None:
    outputs = _outputs(path, "bfloat16", load, device)
    rounded = _reference(path, torch.bfloat16, device)
    reference = _reference(path, torch.bfloat16, device).float()
    behind: list[float] = []
    likeliest: list[bool] = []
    errors: list[float] = []  # of the tokens' logprobs
    own_errors: list[float] = []  # the same for transformers in bfloat16
    error_logits = 0.0
    for prompt, output in zip(load.prompts, outputs, strict=True):
        token_ids = torch.tensor(output.token_ids, device=device)
        logits = _forced(reference, prompt, output, device)
        own = _forced(rounded, prompt, output, device)
        error_logits = max(error_logits, float((own - logits).abs().max()))
        behind += _behind(logits, token_ids).tolist()
        likeliest += (own.argmax(-1) == token_ids).tolist()
        logprobs, own_logprobs = _logprobs(logits, token_ids), _logprobs(own, token_ids)
        errors += abs(logprobs - output.logprobs).tolist()
        own_errors += abs(logprobs - own_logprobs).tolist()
    num_wrong = sum(it > error_logits for it in behind)
    error, own_error = float(np.median(errors)), float(np.median(own_errors))
    report.add(
        case,
        num_wrong <= _WRONG_SHARE * len(behind) and error <= _MEDIAN_FACTOR * own_error,
        num_requests=len(outputs),
        num_tokens=len(behind),
        num_likeliest_in_float32=sum(it == 0 for it in behind),
        num_likeliest_in_bfloat16=sum(likeliest),
        num_near_ties=sum(0 < it <= error_logits for it in behind),
        num_wrong=num_wrong,
        max_behind_logits=max(behind),
        tolerance_logits=error_logits,
        median_logprob_error=error,
        transformers_median_logprob_error=own_error,
    )


def _outputs(path: Path, dtype: DType, load: _ExactnessLoad, device: str) -> list[LoopOutput]:
    config = CoreConfig(
        model=str(path),
        address="",
        device="cuda" if device == "cuda" else "cpu",
        dtype=dtype,
        block_size=SMALL_BLOCK,
        num_blocks=256,
        max_num_seqs=len(load.prompts),
    )
    runner = load_runner(config)
    try:
        # the first alone, as steps of one row have kernels of their own
        parts = load.requests[:1], load.requests[1:]
        return [each for part in parts for each in drive(runner, part, budget=_BUDGET).outputs]
    finally:
        runner.close()


def _reference(path: Path, dtype: torch.dtype, device: str) -> Any:
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return _load(path, dtype=dtype, **plain).to(device).eval()


@torch.inference_mode()
def _forced(
    reference: Any, prompt: np.ndarray[Any, np.dtype[np.uint32]], output: LoopOutput, device: str
) -> torch.Tensor:
    """Logits of the positions at which the output's tokens were sampled, float32 [n, vocab]."""
    ids = torch.tensor([[*prompt.tolist(), *output.token_ids]], device=device)
    logits: torch.Tensor = reference(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits


@torch.inference_mode()
def _generate(
    reference: Any, prompt: np.ndarray[Any, np.dtype[np.uint32]], num_tokens: int, device: str
) -> list[int]:
    ids = torch.tensor([prompt.tolist()], device=device)
    generated: list[int] = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    return generated


def _behind(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """How far each token's logit is below the largest, [n]."""
    return logits.amax(-1) - logits.gather(1, token_ids[:, None])[:, 0]


def _logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> np.ndarray[Any, Any]:
    """Logprobs of the tokens, [n] on the host."""
    found: np.ndarray[Any, Any] = (
        logits.log_softmax(-1).gather(1, token_ids[:, None])[:, 0].cpu().numpy()
    )
    return found
