"""Rules of single tokens under the real scheduler and a real model, one step ahead.

The oracle is transformers' own forward over the whole history, token after token, with the rules
as loops (`expected_logits`) and the sampler for one row.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.helpers.new_requests import new_request
from tests.helpers.sampling_plans import Row, plan_of
from tests.helpers.token_constraints import Asked, asked, expected_logits
from tests.helpers.torch_driver import BLOCK, VOCAB, prompts_of, save_model
from transformers import LlamaForCausalLM

from slipstream_core.model.loader import LoadedModel, load_model
from slipstream_core.runner.torch_runner import KernelConfig, TorchRunner
from slipstream_core.sampling.sampler import sample
from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.step.plan import StepFailed, StepPlan
from slipstream_ipc.history.token_log import TokenLog

NUM_TOKENS = 24
SLOTS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine
    return load_model(str(folder), device="cpu")


@pytest.fixture
def runner(model: LoadedModel) -> Iterator[TorchRunner]:
    runner = TorchRunner(
        model,
        num_blocks=400,
        block_size=BLOCK,
        max_num_seqs=SLOTS,
        kernel_config=KernelConfig(threads=1),
    )
    yield runner
    runner.close()


class Served:
    """A scheduler and a runner, two steps in flight."""

    def __init__(self, runner: TorchRunner, *, budget: int, num_blocks: int = 400) -> None:
        self.runner = runner
        self.tokens = TokenLog()
        self.scheduler = Scheduler(
            tokens=self.tokens,
            cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK),
            max_num_seqs=SLOTS,
            max_num_batched_tokens=budget,
            max_model_len=4 * (num_blocks - 1),
        )
        self.prompts: dict[int, int] = {}
        self.num_refills = self.num_failed = 0
        self.failing: set[int] = set()  # steps that fail

    def add(self, row: int, it: Asked, outputs: Sequence[int] = ()) -> None:
        """Whoever comes with outputs has run on another core before."""
        self.tokens.open(row)
        self.tokens.extend(row, np.array([*it.prompt, *outputs], np.uint32))
        self.prompts[row] = len(it.prompt)
        request = new_request(
            row=row,
            prompt_len=len(it.prompt),
            max_tokens=NUM_TOKENS,
            temperature=it.params.temperature,
            top_k=it.params.top_k,
            top_p=it.params.top_p,
            min_p=0.0,
            seed=it.params.seed or 0,
            worker_ends=False,
            constraints=it.constraints,
        )
        self.scheduler.add(request)

    def run(self) -> None:
        acked = np.zeros(64, np.int64)
        in_flight: deque[StepPlan] = deque()
        while self.scheduler.has_work or in_flight:
            while len(in_flight) < 2 and (plan := self.scheduler.schedule(acked)) is not None:
                if plan.constraints is not None and plan.constraints.refill is not None:
                    self.num_refills += 1
                self.runner.launch(self._broken(plan))
                in_flight.append(plan)
            plan = in_flight.popleft()
            try:
                result = self.runner.collect()
            except StepFailed:
                self.num_failed += 1
                self.scheduler.fail(plan)
            else:
                self.scheduler.complete(plan, result.token_ids)

    def outputs(self, row: int) -> list[int]:
        ids: list[int] = self.tokens.read(row, self.prompts[row], self.tokens.length(row)).tolist()
        return ids

    def _broken(self, plan: StepPlan) -> StepPlan:
        if plan.step not in self.failing:
            return plan
        assert plan.num_requests > 1, "who is alone in it would be at fault"
        token_ids = np.full_like(plan.token_ids, VOCAB + 3)  # the embedding does not have it
        return replace(plan, token_ids=token_ids, gather_slots=np.full_like(token_ids, -1))


def all_kinds() -> list[Asked]:
    prompts = prompts_of(9, 30, 5, 14, 3, 22, 11, 7, seed=5)
    greedy = {"temperature": 0.0}
    drawn: dict[str, Any] = {"temperature": 1.3, "seed": 7}
    allowed = tuple(range(10, 40))
    kinds: list[dict[str, Any]] = [
        {**greedy, "repetition_penalty": 1.5},
        {**drawn, "presence_penalty": 1.5, "frequency_penalty": 0.7},
        {**drawn, "allowed_token_ids": allowed, "top_k": 5, "frequency_penalty": 2.0},
        {**greedy, "allowed_token_ids": (4, 5), "words": [(4, 4), (5, 5, 5), (5, 4, 5, 4)]},
        {**greedy},
        {**drawn, "logit_bias": {7: 6.0, 8: 6.0}, "words": [(7, 7), (8, 7), (9,)], "top_p": 0.9},
        {**drawn},
        {**greedy, "logit_bias": {3: 100.0}, "words": [(3,) * 32, (3,) * 9]},
    ]
    return [asked(tuple(prompt), **kind) for prompt, kind in zip(prompts, kinds, strict=True)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    model = LlamaForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    vocab = torch.arange(VOCAB, dtype=torch.int32)
    found = []
    for it in all_kinds():
        outputs: list[int] = []
        for _ in range(NUM_TOKENS):
            ids = torch.tensor([[*it.prompt, *outputs]])
            with torch.inference_mode():
                raw = model(ids).logits[0, -1].tolist()
            row = Row(
                it.params.temperature,
                it.params.top_k,
                it.params.top_p,
                seed=it.params.seed or 0,
                position=ids.shape[1],
            )
            logits = torch.tensor([expected_logits(raw, it, outputs)])
            outputs.append(int(sample(logits, plan_of([row]), vocab)[0]))
        found.append(outputs)
    return found


@pytest.mark.parametrize("budget", [9, 64])
def test_batches_equal_the_oracle(
    runner: TorchRunner, expected: list[list[int]], budget: int
) -> None:
    served = Served(runner, budget=budget)
    for row, it in enumerate(all_kinds()):
        served.add(row, it)
    served.run()
    assert [served.outputs(row) for row in range(len(expected))] == expected
    assert set(expected[2]) <= set(range(10, 40))
    assert set(expected[3]) == {4, 5}
    assert expected[7][:8] == [3] * 8
    assert expected[7][8] != 3


def test_alone_is_as_in_a_batch(runner: TorchRunner, expected: list[list[int]]) -> None:
    for row, it in enumerate(all_kinds()):
        served = Served(runner, budget=1000)
        served.add(row, it)
        served.run()
        assert served.outputs(row) == expected[row]


def test_who_was_preempted_goes_on_as_before(
    runner: TorchRunner, expected: list[list[int]]
) -> None:
    served = Served(runner, budget=40, num_blocks=22)  # the longest needs 14, together 80
    for row, it in enumerate(all_kinds()):
        served.add(row, it)
    served.run()
    assert served.scheduler.num_preemptions > 5
    assert served.num_refills > 6
    assert [served.outputs(row) for row in range(len(expected))] == expected


@pytest.mark.parametrize("num_outputs", [1, 8, NUM_TOKENS - 1])
def test_another_core_goes_on_with_it(
    runner: TorchRunner, expected: list[list[int]], num_outputs: int
) -> None:
    served = Served(runner, budget=25)
    for row, it in enumerate(all_kinds()):
        served.add(row, it, expected[row][:num_outputs])
    served.run()
    assert [served.outputs(row) for row in range(len(expected))] == expected


def test_a_step_that_fails_leaves_no_trace(runner: TorchRunner, expected: list[list[int]]) -> None:
    served = Served(runner, budget=64)
    served.failing = {7, 24}
    for row, it in enumerate(all_kinds()):
        served.add(row, it)
    served.run()
    assert served.num_failed == 2
    assert [served.outputs(row) for row in range(len(expected))] == expected


def test_plans_of_requests_without_rules_have_none(runner: TorchRunner) -> None:
    served = Served(runner, budget=64)
    served.add(0, asked((1, 2, 3), temperature=0.0))
    plan = served.scheduler.schedule(np.zeros(4, np.int64))
    assert plan is not None
    assert plan.constraints is None
