"""Steps whose masks follow their launch: the same tokens as transformers' generate with the masks.

What is allowed hangs on the token before, so no mask can be made before the step ahead is
collected.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec import structs
from tests.helpers.new_requests import new_request
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.step.plan import StepFailed, StepPlan
from slipstream_ipc.history.token_log import TokenLog

VOCAB = 199
NUM_TOKENS = 12
PROMPTS = [[random.Random(n).randrange(3, VOCAB) for _ in range(n)] for n in (5, 23, 1, 41)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.15,
        bos_token_id=1,
        eos_token_id=2,
    )
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), device="cpu")


@pytest.fixture
def runner(model: LoadedModel) -> Iterator[TorchRunner]:
    runner = TorchRunner(
        model, num_blocks=100, block_size=4, max_num_seqs=8, kernel_config=KernelConfig(threads=1)
    )
    yield runner
    runner.close()


def allowed(last: int, length: int) -> list[int]:
    """A few ids, by what lies before them."""
    return sorted(random.Random(1000 * last + length).sample(range(3, VOCAB), 7))


def generate(folder: Path, prompt: list[int], *, masked: bool) -> list[int]:
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    everything = list(range(VOCAB))
    return model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=lambda _, ids: (
            allowed(int(ids[-1]), len(ids)) if masked else everything
        ),
    )[0, len(prompt) :].tolist()


class Loop:
    """An engine of a few lines: `depth` steps in flight behind the oldest."""

    def __init__(self, runner: TorchRunner, depth: int, budget: int = 16) -> None:
        self.runner, self.depth = runner, depth
        self.tokens = TokenLog()
        self.scheduler = Scheduler(
            tokens=self.tokens,
            cache=CacheConfig(num_blocks=runner.num_blocks, block_size=4),
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=128,
        )
        self.in_flight: list[StepPlan] = []
        self.num_split = 0  # masks given while another step ran before

    def add(self, row: int, prompt: list[int], *, has_grammar: bool) -> None:
        self.tokens.open(row)
        self.tokens.extend(row, np.array(prompt, np.uint32))
        self.scheduler.add(
            new_request(
                row=row,
                prompt_len=len(prompt),
                max_tokens=NUM_TOKENS,
                temperature=0.0,
                top_k=0,
                top_p=1.0,
                min_p=0.0,
                seed=0,
                worker_ends=False,
                has_grammar=has_grammar,
            )
        )

    def give_masks(self) -> None:
        plan = self.in_flight[0]
        if not plan.awaits_masks:
            return
        bits = np.zeros((len(plan.grammar_rows), 224), np.uint8)
        for i, row in enumerate(self.scheduler.grammar_rows_of(plan).tolist()):
            length = self.tokens.length(row)
            bits[i, allowed(int(self.tokens.read(row, length - 1, length)[0]), length)] = 1
        masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        self.runner.sample(plan, masks)

    def run(self) -> None:
        nobody = np.zeros(64, np.int64)
        while self.scheduler.has_work or self.in_flight:
            while len(self.in_flight) <= self.depth:
                plan = self.scheduler.schedule(nobody)
                if plan is None:
                    break
                self.runner.launch(plan)
                self.in_flight.append(plan)
                if len(self.in_flight) == 1:
                    self.give_masks()
                else:
                    self.num_split += plan.awaits_masks
            plan = self.in_flight.pop(0)
            self.scheduler.complete(plan, self.runner.collect().token_ids)
            if self.in_flight:
                self.give_masks()


@pytest.mark.parametrize("depth", [0, 1])
def test_masks_that_follow_a_launch_equal_generate(
    runner: TorchRunner, folder: Path, depth: int
) -> None:
    loop = Loop(runner, depth)
    for row, prompt in enumerate(PROMPTS):
        loop.add(row, prompt, has_grammar=row != 1)
    loop.run()
    for row, prompt in enumerate(PROMPTS):
        output = loop.tokens.read(row, len(prompt), len(prompt) + NUM_TOKENS).tolist()
        assert output == generate(folder, prompt, masked=row != 1)
    assert (loop.num_split > NUM_TOKENS) == (depth == 1)


def test_masks_of_a_step_that_failed_are_passed_over(runner: TorchRunner) -> None:
    loop = Loop(runner, 0, budget=64)
    loop.add(0, PROMPTS[0], has_grammar=True)
    good = loop.scheduler.schedule(np.zeros(64, np.int64))
    assert good is not None
    assert good.awaits_masks
    bad = structs.replace(good, step=good.step - 1, token_ids=good.token_ids + VOCAB)
    only = np.zeros((1, 7), np.int32)
    for plan, token_id in ((bad, 50), (good, 70)):
        masks = only.copy()
        masks[0, token_id // 32] = 1 << token_id % 32
        runner.launch(plan)
        runner.sample(plan, masks)
    with pytest.raises(StepFailed):
        runner.collect()
    assert runner.collect().token_ids.tolist() == [70]


def test_a_runner_is_closed_while_it_waits_for_masks(runner: TorchRunner) -> None:
    loop = Loop(runner, 0, budget=64)
    loop.add(0, PROMPTS[0], has_grammar=True)
    plan = loop.scheduler.schedule(np.zeros(64, np.int64))
    assert plan is not None
    runner.launch(plan)
    runner.close()
