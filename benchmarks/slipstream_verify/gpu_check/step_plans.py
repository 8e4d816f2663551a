"""Plans of single steps, for measuring a runner without a scheduler, and what a cache holds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from msgspec import structs

from slipstream_core.step.plan import Runner, StepPlan, blank_plan
from slipstream_lab.common.bare_loop import LoopRequest


def why_not_cached(runner: Runner, lens: Sequence[int]) -> str | None:
    """Why the cache cannot hold rows of so many tokens each, in blocks of their own; None if it
    can.
    """
    info, num = runner.info, runner.num_blocks - 1  # but for the null block
    needs = sum(-(-length // info.block_size) for length in lens)
    if needs <= num:
        return None
    needs_gib, has_gib = (blocks * info.block_bytes / 2**30 for blocks in (needs, num))
    return f"needs {needs_gib:.1f} GiB of cache, there are {has_gib:.1f}"


def plan_of(runner: Runner, rows: Sequence[tuple[int, int]], *, step: int = 0) -> StepPlan:
    """A greedy step over `rows`, each (tokens before, tokens now); those of one token come first.

    Every row is sampled, its blocks are its own as long as the cache has enough of them. Input ids
    are random, as experts are chosen by them.
    """
    info = runner.info
    plan = _plan(info.block_size, runner.num_blocks, rows, step)
    token_ids = np.random.default_rng(0).integers(info.vocab_size, size=plan.num_tokens)
    return structs.replace(plan, token_ids=token_ids)


def plan_of_draws(
    seeds: np.ndarray[tuple[int], np.dtype[np.int64]], wanted: LoopRequest
) -> StepPlan:
    """A step whose rows, one per seed, sample as `wanted` does; each has a prompt of one token.

    A scheduler takes seconds to admit tens of thousands of them.
    """
    num = len(seeds)
    return structs.replace(
        _plan(16, num + 1, [(0, 1)] * num, 0),
        temperatures=np.full(num, wanted.temperature, np.float32),
        top_ks=np.full(num, wanted.top_k, np.int32),
        top_ps=np.full(num, wanted.top_p, np.float32),
        min_ps=np.full(num, wanted.min_p, np.float32),
        seeds=seeds,
        all_greedy=wanted.temperature == 0,
        any_truncation=wanted.top_k > 0 or wanted.top_p < 1 or wanted.min_p > 0,
    )


def _plan(size: int, cache_blocks: int, rows: Sequence[tuple[int, int]], step: int) -> StepPlan:
    """size: tokens in a block."""
    before, now = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    num_decodes = int((now == 1).sum())
    assert (now[:num_decodes] == 1).all(), "decode rows come first"
    kv_lens = before + now
    widths = -(-kv_lens // size)
    firsts = np.cumsum(widths) - widths
    entries = np.arange(widths.sum())
    blocks = (1 + entries % (cache_blocks - 1)).astype(np.int32)
    owners = np.repeat(np.arange(len(rows)), now)
    positions = np.arange(now.sum()) - np.repeat(np.cumsum(now) - now, now) + before[owners]
    num = len(rows)
    return blank_plan(
        step=step,
        num_decodes=num_decodes,
        positions=positions,
        kv_slots=blocks[firsts[owners] + positions // size] * np.int64(size) + positions % size,
        slots=np.arange(num),
        query_lens=now.astype(np.int32),
        kv_lens=kv_lens.astype(np.int32),
        prompt_lens=(kv_lens - (now == 1)).astype(np.int32),
        table_slots=np.repeat(np.arange(num), widths),
        table_numbers=entries - np.repeat(firsts, widths),
        table_blocks=blocks,
    )
