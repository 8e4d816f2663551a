"""A first rank with another one: what fails before they begin fails alone, as does sampling."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tests.helpers.torch_driver import (
    BLOCK,
    KINDS,
    Driver,
    Request,
    prompts_of,
    requests_of,
    save_model,
)

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.leader import LeadRunner, load_lead
from slipstream_core.ranks.processes import Ranks
from slipstream_core.ranks.watch import RankEnd
from slipstream_core.runner import sample_stage
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.sampling import slice_sampling
from slipstream_core.step.plan import Runner, StepFailed, StepPlan

pytestmark = pytest.mark.process

ENDS: list[RankEnd] = []


def config_of(folder: Path, **settings: Any) -> CoreConfig:
    sizes = {"block_size": BLOCK, "num_blocks": 60, "max_num_seqs": 8, "threads": 1}
    return CoreConfig(
        model=str(folder), address="unused", device="cpu", dtype="float32", **sizes | settings
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def lead(folder: Path) -> Iterator[LeadRunner]:
    config = config_of(folder, tensor_parallel_size=2)
    runner = load_lead(config, Ranks(config, ENDS.append))
    yield runner
    runner.close()
    runner.close()  # idempotent
    assert not ENDS


def requests() -> list[Request]:
    """Greedy and sampled rows, with and without truncation and log-probabilities."""
    return [
        Request(
            prompt,
            10,
            temperature=0.9 * (at % 3),
            top_k=5 * (at % 2),
            top_p=0.8 if at == 3 else 1.0,
            seed=at,
            num_logprobs=at - 1,
        )
        for at, prompt in enumerate(prompts_of(3, 17, 9, 30))
    ]


def outputs(runner: Runner, some: list[Request]) -> list[tuple[list[int], list[list[int]]]]:
    driver = Driver(runner, budget=12)  # type: ignore[arg-type]
    driver.run(some)
    assert driver.num_mixed
    return [(it.output, [ids for _, ids, _ in it.logprobs]) for it in some]


def test_samples_and_log_probabilities_are_those_of_one_rank(
    lead: LeadRunner, folder: Path
) -> None:
    alone = load_runner(config_of(folder))
    try:
        assert outputs(lead, requests()) == outputs(alone, requests())
        assert lead.info.block_bytes == alone.info.block_bytes // 2
    finally:
        alone.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_from_slices_is_what_one_rank_samples(
    kind: str, lead: LeadRunner, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = load_runner(config_of(folder))
    try:
        expected = outputs(alone, requests_of(kind))
    finally:
        alone.close()
    monkeypatch.delattr(sample_stage, "sample")  # of whole rows
    assert outputs(lead, requests_of(kind)) == expected


def plan_of_one(lead: LeadRunner, step: int) -> StepPlan:
    """A prompt of 5 tokens in the first blocks."""
    it = Request(prompts_of(5)[0], 1, slot=0)
    driver = Driver(lead)  # type: ignore[arg-type]
    return replace(driver.plan([(it, 5)], 0), step=step)


@pytest.mark.parametrize(
    "change",
    [
        {"kv_slots": np.full(5, 1 << 40)},
        {"slots": np.array([-1])},
        {"table_blocks": np.full(2, 60, np.int32)},
    ],
)
def test_a_plan_that_ranks_could_not_compute_fails_alone(
    lead: LeadRunner, change: dict[str, Any]
) -> None:
    before, after = plan_of_one(lead, 1), plan_of_one(lead, 3)
    lead.launch(before)
    lead.launch(replace(before, step=2, **change))
    expected = lead.collect().token_ids.tolist()
    assert lead.done()
    with pytest.raises(StepFailed, match="step 2 failed"):
        lead.collect()
    assert not lead.done()
    lead.launch(after)
    assert lead.collect().token_ids.tolist() == expected


def test_a_plan_that_has_no_room_in_the_ring_fails_alone(lead: LeadRunner) -> None:
    plan = plan_of_one(lead, 1)
    many = np.zeros(1 << 20, np.int64)
    lead.launch(
        replace(plan, table_slots=many, table_numbers=many, table_blocks=many.astype(np.int32))
    )
    with pytest.raises(StepFailed):
        lead.collect()
    lead.launch(plan)
    assert len(lead.collect().token_ids) == 1


def test_a_step_that_cannot_be_sampled_fails_alone(
    lead: LeadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = replace(plan_of_one(lead, 1), num_logprobs=np.zeros(1, np.int32), max_logprobs=0)
    lead.launch(plan)
    expected = lead.collect().token_ids.tolist()
    sample = sample_stage.sample

    def fails_at_two(logits: Any, plan: StepPlan, *args: Any, **options: Any) -> Any:
        if plan.step == 2:
            raise RuntimeError("no sample")
        return sample(logits, plan, *args, **options)

    monkeypatch.setattr(sample_stage, "sample", fails_at_two)
    lead.launch(replace(plan, step=2))
    lead.launch(replace(plan, step=3))
    with pytest.raises(StepFailed, match="no sample"):
        lead.collect()
    assert lead.collect().token_ids.tolist() == expected


def test_slices_that_cannot_be_sampled_fail_alone(
    lead: LeadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of_one(lead, 1)
    lead.launch(plan)
    expected = lead.collect().token_ids.tolist()
    best_of_slice = slice_sampling.best_of_slice

    def fails_at_two(logits: Any, plan: StepPlan, ids: Any) -> Any:
        if plan.step == 2:
            raise RuntimeError("no sample")
        return best_of_slice(logits, plan, ids)

    monkeypatch.setattr(slice_sampling, "best_of_slice", fails_at_two)
    lead.launch(replace(plan, step=2))
    lead.launch(replace(plan, step=3))
    with pytest.raises(StepFailed, match="no sample"):
        lead.collect()
    assert lead.collect().token_ids.tolist() == expected


def test_prefill_chunks_exchange_no_ids(lead: LeadRunner) -> None:
    none = np.empty(0, np.float32)
    plan = plan_of_one(lead, 1)
    lead.launch(
        replace(
            plan,
            samples=np.array([False]),
            temperatures=none,
            top_ps=none,
            min_ps=none,
            top_ks=none.astype(np.int32),
            seeds=none.astype(np.int64),
            num_logprobs=none.astype(np.int32),
        )
    )
    assert len(lead.collect().token_ids) == 0
    lead.launch(plan)
    assert len(lead.collect().token_ids) == 1
