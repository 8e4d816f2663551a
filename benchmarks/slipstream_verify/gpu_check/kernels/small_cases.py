"""A few small launches of every kernel, for a tool that watches memory accesses.

`python -m slipstream_verify.gpu_check.kernels.small_cases DEVICE` runs them and prints their
number. Results are compared as far as that costs nothing; what matters is what the tool says.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import torch

from slipstream_core.sampling.noise import row_keys
from slipstream_core.sampling.whole_vocab_sampling import (
    Draws,
    RowEdits,
    WholeVocabSampler,
)
from slipstream_verify.gpu_check.kernels.operator_cases import operator_cases
from slipstream_verify.gpu_check.reference_cases import LIMITS, attention_cases, check_case

# one of each shape that a kernel has: padded rows, split keys, windows, odd sizes, prefill
_ATTENTION = ("decode", "mixed", "padded rows", "split, window and sinks", "group of 7")
_VOCAB = 333  # no multiple of anything


def main() -> int:
    """Run the cases; the exit code is 1 if one is wrong."""
    device = torch.device(sys.argv[1])
    cases = small_cases(device)
    for name, is_right in cases.items():
        if not is_right():
            print(f"{name} is wrong", flush=True)
            return 1
    print(f"{len(cases)} cases", flush=True)
    return 0


def small_cases(device: torch.device) -> dict[str, Callable[[], bool]]:
    """What to run, by name; each tells whether it was right."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    found: dict[str, Callable[[], bool]] = {
        case.name: lambda case=case: check_case(case, device, dtype) < LIMITS[dtype]  # type: ignore[misc]
        for case in attention_cases()
        if case.name in _ATTENTION
    }
    for name, error_of in operator_cases(device, dtype).items():
        found[name] = lambda error_of=error_of: error_of() < LIMITS[dtype]  # type: ignore[misc]
    return {**found, "sampling": lambda: _sampling(device)}


def _sampling(device: torch.device) -> bool:
    sampler, rows = WholeVocabSampler(), 3
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn((rows, _VOCAB), generator=generator).to(device).bfloat16()
    ints = torch.arange(rows, dtype=torch.int32, device=device)
    masks = torch.full((1, -(-_VOCAB // 32)), -1, dtype=torch.int32, device=device)
    edits = RowEdits(logits[:1].float().contiguous(), ints - 2, masks, -(ints > 0).int())
    keys = torch.from_numpy(row_keys(np.arange(rows), np.arange(rows))).to(device)
    draws = Draws(torch.ones(rows, device=device), (ints % 2).int(), keys)
    chosen = sampler.choose(logits, draws=draws, edits=edits, totals=True)
    sampler.scaled(logits, draws.divisors, edits)
    _, ids, _ = sampler.logprob_columns(logits, chosen, 5)
    return bool((chosen.token_ids < _VOCAB).all()) and int(ids[0, 1]) == int(logits[0].argmax())


if __name__ == "__main__":
    raise SystemExit(main())
