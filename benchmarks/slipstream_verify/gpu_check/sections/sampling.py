"""Part: the sampler on the device.

- The noise is the same on the device and on the CPU: the hash is integer arithmetic, and only the
  logarithm at its end may round differently.
- Tokens are drawn with the right frequencies: chi-square against probabilities computed on the CPU
  in float64 by a sort. The seeds are fixed, so the result is deterministic.
- A row draws the same token in a small batch, in a large one, and on the CPU.

The logits are made up, and the plans have as many rows as there are draws.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.sampling.noise import exponential, row_keys
from slipstream_core.sampling.sampler import sample
from slipstream_core.sampling.whole_vocab_sampling import whole_vocab_sampler
from slipstream_core.step.plan import StepPlan
from slipstream_lab.common.bare_loop import LoopRequest
from slipstream_verify.gpu_check.setting import GpuSetting
from slipstream_verify.gpu_check.step_plans import plan_of_draws

_MAX_DEVIATIONS = 5.0  # of chi-square; a correct sampler exceeds it once in three million runs
_NOISE_ERROR = 1e-6  # relative: a few units in the last place of a float32
_SAME_SHARE = 0.999  # a draw between two equally good tokens may fall either way
_SMALL_BATCH = 64

_PROMPT = np.array([0], np.uint32)
# Logits are normal with this deviation; flat ones keep more tokens than any candidate list holds.
# These come first, as nothing else on a card looks at what they use.
_CASES: dict[str, tuple[float, LoopRequest]] = {
    "flat, top-p 0.95": (0.3, LoopRequest(_PROMPT, 1, temperature=1.0, top_p=0.95)),
    "flat, min-p 0.3": (0.3, LoopRequest(_PROMPT, 1, temperature=1.2, min_p=0.3)),
    "flat, top-k 300": (0.3, LoopRequest(_PROMPT, 1, temperature=1.0, top_k=300, top_p=0.97)),
    "plain": (2.0, LoopRequest(_PROMPT, 1, temperature=1.0)),
    "temperature 0.6": (2.0, LoopRequest(_PROMPT, 1, temperature=0.6)),
    "top-k 20": (1.5, LoopRequest(_PROMPT, 1, temperature=1.0, top_k=20)),
    "top-p 0.8": (2.0, LoopRequest(_PROMPT, 1, temperature=1.0, top_p=0.8)),
    "min-p 0.05": (2.0, LoopRequest(_PROMPT, 1, temperature=1.2, min_p=0.05)),
}
_VOCAB = 500


def run(setting: GpuSetting) -> None:
    """A row for the noise and one per way of sampling."""
    _run(setting, list(_CASES))


def run_flat(setting: GpuSetting) -> None:
    """As `run`, of flat logits alone."""
    _run(setting, [case for case in _CASES if case.startswith("flat")])


def _run(setting: GpuSetting, cases: Sequence[str]) -> None:
    _check_noise(setting)
    num_draws = 3000 if setting.is_quick else 20000
    for number, (case, (deviation, wanted)) in enumerate(_CASES.items()):
        if case in cases and setting.has_time(case):
            generator = torch.Generator().manual_seed(number)
            logits = torch.randn(_VOCAB, generator=generator) * deviation
            _check_draws(case, logits, wanted, num_draws, setting)


def _check_noise(setting: GpuSetting) -> None:
    num_rows, vocab_size = (8, 32000) if setting.is_quick else (64, 151936)
    seeds = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, num_rows)
    keys = torch.from_numpy(row_keys(seeds, np.arange(num_rows) * 1000))
    vocab = torch.arange(vocab_size, dtype=torch.int32)
    here = exponential(keys, vocab)
    there = exponential(keys.to(setting.device), vocab.to(setting.device)).cpu()
    differ = here != there  # infinity, the rarest value, has no relative error
    error = float((((there - here).abs() / here)[differ]).max()) if differ.any() else 0.0
    setting.report.add(
        "noise on the device and on the CPU",
        error < _NOISE_ERROR,  # False for a NaN
        num_values=here.numel(),
        same_share=1 - float(differ.double().mean()),
        max_relative_error=error,
    )


def _check_draws(
    case: str, logits: torch.Tensor, wanted: LoopRequest, num_draws: int, setting: GpuSetting
) -> None:
    plan, last = (
        plan_of_draws(np.arange(first, num_draws), wanted)
        for first in (0, num_draws - _SMALL_BATCH)
    )
    token_ids = _draw(logits, plan, setting.device)
    few = _draw(logits, last, setting.device)
    on_cpu = _draw(logits, plan, "cpu")
    probs = _probabilities(logits, wanted)
    counts = np.bincount(token_ids, minlength=len(logits))
    deviations = _chi_square_deviations(counts, probs)
    num_outside = int(counts[probs == 0].sum())
    same_in_few = float((few == token_ids[-_SMALL_BATCH:]).mean())
    same_on_cpu = float((on_cpu == token_ids).mean())
    setting.report.add(
        case,
        num_outside == 0
        and deviations < _MAX_DEVIATIONS
        and min(same_in_few, same_on_cpu) >= _SAME_SHARE,
        num_draws=len(token_ids),
        num_kept_tokens=int((probs > 0).sum()),
        num_outside=num_outside,
        chi_square_deviations=deviations,
        same_as_in_small_batch_share=same_in_few,
        same_as_on_cpu_share=same_on_cpu,
    )


def _draw(
    logits: torch.Tensor, plan: StepPlan, device: str
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """One token per row of the plan, all from the same logits [vocab]."""
    with torch.inference_mode():
        vocab = torch.arange(len(logits), dtype=torch.int32, device=device)
        rows = logits.to(device).expand(plan.num_requests, -1).contiguous()
        # None on a CPU
        whole = whole_vocab_sampler(len(logits), rows.device, model="made-up logits")
        token_ids, _ = sample(rows, plan, vocab, whole=whole)
    drawn: np.ndarray[tuple[int], np.dtype[np.int64]] = token_ids.cpu().numpy()
    return drawn


def _probabilities(
    logits: torch.Tensor, wanted: LoopRequest
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """The distribution that a request samples from: top-k, then top-p of the rest, then min-p;
    [vocab].
    """
    scores = logits.double().numpy() / wanted.temperature
    weights = np.exp(scores - scores.max())
    order = np.argsort(-weights, kind="stable")
    kept = weights[order]
    if wanted.top_k:
        kept[wanted.top_k :] = 0
    kept /= kept.sum()
    kept[(np.cumsum(kept) - kept >= wanted.top_p) | (kept < wanted.min_p * kept[0])] = 0
    probs = np.zeros(len(kept))
    probs[order] = kept / kept.sum()
    return probs


def _chi_square_deviations(
    counts: np.ndarray[tuple[int], np.dtype[np.int64]],
    probs: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> float:
    """Chi-square as standard deviations of a normal (Wilson and Hilferty, 1931)."""
    expected = probs * counts.sum()
    is_rare = expected < 5  # pooled, as chi-square requires
    expected = np.append(expected[~is_rare], expected[is_rare].sum())
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    is_there = expected > 0
    chi_square = float(((observed - expected)[is_there] ** 2 / expected[is_there]).sum())
    freedom = int(is_there.sum()) - 1
    spread = 2 / (9 * freedom)
    return (math.cbrt(chi_square / freedom) - (1 - spread)) / math.sqrt(spread)
