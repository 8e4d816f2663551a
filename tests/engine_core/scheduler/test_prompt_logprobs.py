"""Which positions of prompts steps look at: all of them, once, and never too many at a time."""

from __future__ import annotations

from collections import deque

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.new_requests import new_request

from slipstream_core.scheduler.scheduler import CacheConfig, Scheduler
from slipstream_core.step.limits import MAX_POSITIONS, NO_ROW
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.history.token_log import TokenLog

BLOCK = 4


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 400), st.sampled_from([-1, 0, 3]), st.integers(1, 30)),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(1, 700),
    num_blocks=st.integers(112, 300),
    depth=st.integers(1, 2),
)
def test_every_position_is_looked_at(
    prompts: list[tuple[int, int, int]], budget: int, num_blocks: int, depth: int
) -> None:
    tokens = TokenLog()
    scheduler = Scheduler(
        tokens=tokens,
        cache=CacheConfig(num_blocks=num_blocks, block_size=BLOCK, enable_prefix_caching=True),
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=440,
    )
    for row, (prompt_len, k, max_tokens) in enumerate(prompts):
        tokens.open(row)
        tokens.extend(row, np.arange(prompt_len, dtype=np.uint32))  # so all could share
        scheduler.add(
            new_request(
                row=row,
                prompt_len=prompt_len,
                max_tokens=max_tokens,
                temperature=0,
                top_k=0,
                top_p=1,
                min_p=0,
                seed=0,
                worker_ends=False,
                use_prefix_cache=k < 0,
                num_prompt_logprobs=k,
            )
        )
    acked = np.zeros(64, np.int64)
    have = [0] * len(prompts)
    in_flight: deque[StepPlan] = deque()
    while scheduler.has_work or in_flight:
        plan = scheduler.schedule(acked) if len(in_flight) < depth else None
        if plan is not None:
            in_flight.append(plan)
            continue
        assert in_flight, "nothing runs, nothing can"
        plan = in_flight.popleft()
        if plan.prompt is not None:
            assert 0 < len(plan.prompt.tokens) <= MAX_POSITIONS
            take(plan, scheduler, prompts, have)
        scheduler.complete(plan, np.zeros(int(plan.samples.sum()), np.int64))
    assert have == [n - 1 if k >= 0 else 0 for n, k, _ in prompts]


def take(
    plan: StepPlan,
    scheduler: Scheduler,
    prompts: list[tuple[int, int, int]],
    have: list[int],
) -> None:
    prompt = plan.prompt
    assert prompt is not None
    rows = scheduler.prompt_rows_of(plan)
    assert (plan.positions[prompt.tokens] + 1 == prompt.targets).all()  # as the prompts are made
    begin = 0
    for row, start, count, k in zip(
        rows.tolist(),
        prompt.starts.tolist(),
        prompt.counts.tolist(),
        prompt.num_logprobs.tolist(),
        strict=True,
    ):
        positions = plan.positions[prompt.tokens[begin : begin + count]]
        begin += count
        assert positions.tolist() == list(range(start, start + count))
        if row == NO_ROW:
            continue
        prompt_len, wanted, _ = prompts[row]
        assert k == wanted
        assert start + count <= prompt_len - 1
        if have[row] == prompt_len - 1:
            continue  # another step in flight had looked already
        assert start in (0, have[row])
        have[row] = start + count
        if have[row] == prompt_len - 1:
            scheduler.has_prompt_logprobs(row)
    assert begin == len(prompt.tokens)
