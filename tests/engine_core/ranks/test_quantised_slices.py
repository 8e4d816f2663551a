"""Ranks that share a quantised checkpoint, each with slices of its codes: the tokens of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.helpers.quantised_models import KINDS, PERMUTED, write_checkpoint
from tests.helpers.torch_driver import BLOCK, Driver, Request, prompts_of

from slipstream_core.config import CoreConfig
from slipstream_core.ranks.leader import load_lead
from slipstream_core.ranks.processes import Ranks
from slipstream_core.runner.torch_factory import load_runner
from slipstream_core.step.plan import Runner

pytestmark = pytest.mark.process

NUM_TOKENS = 8
SOME = ["gptq", "ct act-order", "fp8 ragged blocks", "ct int8 with zeros", "awq"]


def outputs(runner: Runner) -> list[list[int]]:
    requests = [Request(prompt, NUM_TOKENS) for prompt in prompts_of(5, 23, 1, 12)]
    Driver(runner, budget=12).run(requests)  # type: ignore[arg-type]
    return [request.output for request in requests]


def never(ended: object) -> None:
    raise AssertionError(ended)


@pytest.mark.parametrize("kind", SOME)
def test_ranks_compute_what_one_does(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *(KINDS | PERMUTED)[kind])
    config = CoreConfig(
        model=str(tmp_path),
        address="unused",
        device="cpu",
        dtype="float32",
        block_size=BLOCK,
        num_blocks=60,
        max_num_seqs=8,
        threads=1,
    )
    alone = load_runner(config)
    try:
        expected = outputs(alone)
    finally:
        alone.close()
    config = replace(config, tensor_parallel_size=2)
    lead = load_lead(config, Ranks(config, never))
    try:
        assert outputs(lead) == expected
    finally:
        lead.close()
    assert len({token for tokens in expected for token in tokens}) > 8
