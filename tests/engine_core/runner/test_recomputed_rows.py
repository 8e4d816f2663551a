"""Positions that are computed again have the same bits: in other chunks, beside other requests,
after a preemption, behind the prefix cache, and where an answer has become part of a prompt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream_core.attention.cache_formats import CACHE_FORMATS, CacheFormat
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_lab.common.bare_loop import LoopRequest, drive
from slipstream_lab.models import tiny_models
from slipstream_lab.models.tiny_models import (
    BLOCK_SIZE,
    CACHED,
    CHUNKED,
    NUM_OUTPUTS,
    PACKED,
    PREEMPTED,
    PROMPT_LENS,
)

pytestmark = pytest.mark.skipif(kernels() is None, reason="there is no C compiler")

QUICK = {"Llama", "GPT-OSS"}
# whose caches are checked in all types
IN_ALL_TYPES = {*QUICK, "Qwen2-MoE", "Qwen3-MoE", "Gemma 2", "GPT-2", "OPT", "DeepSeek V3 (MLA)"}
# Of these last bits differ yet, and of Nemotron-H, whose steps ask whether a token is a prompt's.
UNEQUAL = {"Llama 4", "Gemma 4, as text"}
NUM_LOGPROBS = 5
MOST = 8  # requests at a time
FORMS = tuple(dict.fromkeys(CACHE_FORMATS.values()))
CHECKED = [
    each
    for each in (*tiny_models.ARCHITECTURES, *tiny_models.HYBRIDS)
    if not (each.refused or each.name in UNEQUAL or each.name.startswith("Nemotron-H"))
]
CASES = [
    pytest.param(
        each,
        form,
        id=f"{each.name}-{form}",
        marks=[] if each.name in QUICK else [pytest.mark.long],
    )
    for each in CHECKED
    for form in FORMS
    if form is FORMS[0] or each.name in IN_ALL_TYPES
]

Answer = tuple[list[int], list[float], list[list[float]]]  # ids, their log-probabilities, others'


def answers(
    runner: TorchRunner, prompts: list[list[int]], lengths: list[int], **options: Any
) -> tuple[list[Answer], int]:
    """Greedy answers, and the number of preemptions."""
    requests = [
        LoopRequest(np.array(prompt, np.uint32), length, num_logprobs=NUM_LOGPROBS)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    driven = drive(runner, requests, **options)
    given: list[Answer] = []
    for output in driven.outputs:
        others = np.array(output.others).reshape(len(output.token_ids), NUM_LOGPROBS)
        given.append((output.token_ids, output.logprobs, others.tolist()))
    return given, driven.num_preemptions


def rest_of(answer: Answer, start: int) -> Answer:
    ids, logprobs, others = answer
    return ids[start:], logprobs[start:], others[start:]


@pytest.mark.parametrize(("architecture", "form"), CASES)
def test_recomputed_positions_have_the_same_bits(
    architecture: Any, form: CacheFormat, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    tiny_models.save(architecture, tmp_path)
    model = load_model(str(tmp_path), device="cpu", dtype="float32")
    runner = TorchRunner(
        replace(model, cache_format=form),
        num_blocks=200,
        block_size=BLOCK_SIZE,
        max_num_seqs=MOST,
        kernel_config=KernelConfig(threads=1),
    )
    prompts, lengths = tiny_models.prompts(), [NUM_OUTPUTS] * len(PROMPT_LENS)
    try:
        alone = [answers(runner, [prompt], [NUM_OUTPUTS], budget=512)[0][0] for prompt in prompts]
        for variant in (CHUNKED, PACKED, PREEMPTED):
            given, num_preemptions = answers(
                runner,
                prompts,
                lengths,
                budget=variant.max_num_batched_tokens,
                num_blocks=variant.num_blocks,
            )
            assert given == alone, variant.name
            assert (num_preemptions > 0) == (variant is PREEMPTED)
        given, _ = answers(
            runner,
            2 * prompts,
            2 * lengths,
            budget=CACHED.max_num_batched_tokens,
            is_cached=True,
        )
        assert given == 2 * alone
        longest = alone[PROMPT_LENS.index(max(PROMPT_LENS))]
        for budget in (7, 512):  # as after a core's death, at each token of an answer
            for first in range(0, NUM_OUTPUTS, MOST):
                starts = range(first, min(first + MOST, NUM_OUTPUTS))
                given, _ = answers(
                    runner,
                    [max(prompts, key=len) + longest[0][:start] for start in starts],
                    [NUM_OUTPUTS - start for start in starts],
                    budget=budget,
                )
                assert given == [rest_of(longest, start) for start in starts]
    finally:
        runner.close()
