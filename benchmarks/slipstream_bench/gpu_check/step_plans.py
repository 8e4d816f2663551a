"""Plans of single steps, for measuring a runner without a scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slipstream_core.step.plan import Runner, StepPlan


def plan_of(runner: Runner, rows: Sequence[tuple[int, int]], *, step: int = 0) -> StepPlan:
    """A greedy step over `rows`, each (tokens before, tokens now); those of one token come first.

    Every row is sampled, its blocks are its own as long as the cache has enough of them, and its
    input ids are zeros.
    """
    size = runner.info.block_size
    before, now = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    num_decodes = int((now == 1).sum())
    assert (now[:num_decodes] == 1).all(), "decode rows come first"
    kv_lens = before + now
    widths = -(-kv_lens // size)
    firsts = np.cumsum(widths) - widths
    entries = np.arange(widths.sum())
    blocks = (1 + entries % (runner.num_blocks - 1)).astype(np.int32)
    owners = np.repeat(np.arange(len(rows)), now)
    positions = np.arange(now.sum()) - np.repeat(np.cumsum(now) - now, now) + before[owners]
    num, num_tokens = len(rows), len(positions)
    ones, zeros = np.ones(num, np.float32), np.zeros(num, np.float32)
    return StepPlan(
        step=step,
        num_decodes=num_decodes,
        token_ids=np.zeros(num_tokens, np.int64),
        gather_slots=np.full(num_tokens, -1),
        positions=positions,
        kv_slots=blocks[firsts[owners] + positions // size] * np.int64(size) + positions % size,
        slots=np.arange(num),
        query_lens=now.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        prompt_lens=(kv_lens - (now == 1)).astype(np.int32),
        samples=np.ones(num, np.bool_),
        table_slots=np.repeat(np.arange(num), widths),
        table_numbers=entries - np.repeat(firsts, widths),
        table_blocks=blocks,
        temperatures=zeros,
        top_ks=np.zeros(num, np.int32),
        top_ps=ones,
        min_ps=zeros,
        seeds=np.zeros(num, np.int64),
        num_logprobs=np.full(num, -1, np.int32),
        masked_rows=np.zeros(0, np.int64),
        masked_ids=np.zeros(0, np.int64),
        all_greedy=True,
        any_truncation=False,
        max_logprobs=-1,
    )
