"""A model says the same with drafts as without, to the bit: greedy or drawn, of any architecture
whose rows can be verified; the others are not drafted.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.helpers.told_drafts import ToldDrafts

from slipstream_core.build import drafter_of
from slipstream_core.config import CoreConfig, SpeculativeConfig
from slipstream_core.model.loader import load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.step.plan import ModelInfo
from slipstream_lab.common.bare_loop import Driven, LoopRequest, drive
from slipstream_lab.models import tiny_models

# those whose decode steps are one call with products of our own
DRAFTED = {
    "Llama",
    "Llama, llama3 rope",
    "Llama, tied embeddings",
    "Qwen2",
    "Qwen2, sliding window",
}
DRAFTED |= {"Qwen3", "Qwen3, YaRN rope", "Mistral, sliding window", "Ministral, sliding window"}
DRAFTED |= {"Granite", "OLMo 2", "OLMo 3", "SmolLM3", "Seed-OSS", "Mistral 3, as text"}
DRAFTED |= {"Qwen2-VL, as text", "Qwen2.5-VL, as text", "Qwen3-VL, as text", "LLaVA, as text"}
QUICK = {"Llama", "Qwen3", "OLMo 2", "Qwen3-MoE", "Qwen3.5"}
# experts, latents, states, operators of torch's in between
UNDRAFTED = {"Qwen3-MoE", "DeepSeek V3 (MLA)", "Qwen3.5", "OPT"}
ALL = (*tiny_models.ARCHITECTURES, *tiny_models.WITHIN_LIMITS, *tiny_models.HYBRIDS)


def named(names: set[str]) -> list[Any]:
    return [
        pytest.param(each, id=each.name, marks=[] if each.name in QUICK else [pytest.mark.long])
        for each in ALL
        if each.name in names
    ]


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.9, "seed": 4, "num_logprobs": 2},
    {"temperature": 0.7, "top_k": 20, "min_p": 0.02, "seed": 5},
    {"num_logprobs": 0},
]


def load(architecture: Any, folder: Path, **options: Any) -> TorchRunner:
    torch.set_num_threads(1)
    tiny_models.save(architecture, folder)
    return TorchRunner(
        load_model(str(folder), device="cpu", dtype="float32"),
        num_blocks=200,
        block_size=tiny_models.BLOCK_SIZE,
        max_num_seqs=len(KINDS),
        kernel_config=KernelConfig(threads=1, **options),
    )


def said(driven: Driven) -> list[tuple[list[int], list[float]]]:
    return [
        (each.token_ids, each.logprobs if "num_logprobs" in kind else [])
        for each, kind in zip(driven.outputs, KINDS, strict=True)
    ]


@pytest.mark.parametrize("architecture", named(DRAFTED))
def test_equals_what_is_said_without_drafts(architecture: Any, tmp_path: Path) -> None:
    runner = load(architecture, tmp_path)
    try:
        assert runner.info.takes_drafts
        prompts = tiny_models.prompts()
        requests = [
            LoopRequest(np.array(prompt, np.uint32), 40, **kind)
            for prompt, kind in zip(prompts, KINDS, strict=True)
        ]
        plain = drive(runner, requests, budget=512)
        assert not any(step.num_drafts for step in plain.steps)
        texts = [
            [*prompt, *output.token_ids]
            for prompt, output in zip(prompts, plain.outputs, strict=True)
        ]
        for most in (1, 4, 16):
            drafter = ToldDrafts(texts, runner.info.vocab_size, most, seed=most)
            drafted = drive(runner, requests, budget=512, drafter=drafter)
            assert said(drafted) == said(plain), most
            num_drafts = sum(step.num_drafts for step in drafted.steps)
            num_accepted = sum(step.num_accepted for step in drafted.steps)
            assert 0 < num_accepted < num_drafts
            assert len(drafted.steps) < len(plain.steps)
            # what was computed behind the drafts is a cache like any other
            again = drive(runner, requests, budget=512)
            assert said(again) == said(plain)
    finally:
        runner.close()


GIVEN = SpeculativeConfig(
    method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4
)


@pytest.mark.parametrize("architecture", named(UNDRAFTED))
def test_others_are_not_drafted_and_the_log_says_so(
    architecture: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runner = load(architecture, tmp_path)
    runner.close()
    assert not runner.info.takes_drafts
    config = CoreConfig(model=str(tmp_path), address="", speculative_config=GIVEN)
    with caplog.at_level(logging.WARNING):
        assert drafter_of(config, runner.info) is None
    assert "speculative_config has no effect" in caplog.text
    assert drafter_of(CoreConfig(model=str(tmp_path), address=""), runner.info) is None


def test_torchs_own_products_are_not_drafted(tmp_path: Path) -> None:
    [llama] = named({"Llama"})
    for options in ({"native": False}, {"packs": False}):
        folder = tmp_path / next(iter(options))
        runner = load(*llama.values, folder, **options)
        runner.close()
        assert not runner.info.takes_drafts


def test_where_drafts_are_verified_they_are_proposed(tmp_path: Path) -> None:
    info = ModelInfo("m", 10, 64, (), 1, 16, takes_drafts=True)
    config = CoreConfig(model=str(tmp_path), address="", speculative_config=GIVEN)
    assert drafter_of(config, info) is not None
