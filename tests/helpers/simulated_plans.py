"""A simulated runner, and plans of one request for it."""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec.structs import replace

from slipstream_core.config import CoreConfig
from slipstream_core.runner.simulated.simulated_runner import SimulatedRunner, load_simulated
from slipstream_core.step.plan import StepPlan, blank_plan

BLOCK_SIZE = 4


def load(options: str = "step_ms=0,prefill_us=0,vocab_size=50", **settings: Any) -> SimulatedRunner:
    settings = {"max_model_len": 64, "block_size": BLOCK_SIZE, "max_num_seqs": 4} | settings
    return load_simulated(CoreConfig(model=f"simulated:{options}", address="unused", **settings))


def plan_of(
    token_ids: list[int],
    *,
    start: int = 0,
    prompt_len: int | None = None,
    gather: bool = False,
    table: tuple[int, ...] = tuple(range(1, 17)),
    step: int = 1,
    num_logprobs: int = -1,
    **changes: Any,
) -> StepPlan:
    """A plan of one request, which computes `token_ids` from position `start` on and samples."""
    kv_len = start + len(token_ids)
    positions = np.arange(start, kv_len)
    blocks = np.array(table, np.int32)
    plan = blank_plan(
        step=step,
        token_ids=np.array(token_ids, np.int64),
        gather_slots=np.full(len(token_ids), 0 if gather else -1),
        positions=positions,
        kv_slots=blocks[positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE
        + positions % BLOCK_SIZE,
        slots=np.array([0]),
        query_lens=np.array([len(token_ids)], np.int32),
        kv_lens=np.array([kv_len], np.int32),
        prompt_lens=np.array([kv_len if prompt_len is None else prompt_len], np.int32),
        table_slots=np.zeros(len(blocks), np.int64),
        table_numbers=np.arange(len(blocks)),
        table_blocks=blocks,
        temperatures=np.ones(1, np.float32),
        seeds=np.array([7]),
        num_logprobs=np.array([num_logprobs], np.int32),
        any_wide=False,
        max_logprobs=num_logprobs,
    )
    return replace(plan, **changes)


def sample(runner: SimulatedRunner, plan: StepPlan) -> int:
    runner.launch(plan)
    return int(runner.collect().token_ids[0])
