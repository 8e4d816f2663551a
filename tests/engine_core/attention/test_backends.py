"""Back ends make the same of a plan, each in the order that it asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.attention import kv_cache
from slipstream_core.attention.backend_choice import AttentionBackend
from slipstream_core.attention.block_tables import BlockTables, table_width
from slipstream_core.attention.cpu_backend import CpuBackend
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionParams
from slipstream_core.attention.torch_backend import Scratch, TorchBackend
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.step.plan import StepPlan, blank_plan

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

CPU = torch.device("cpu")
BLOCK, HEADS, KV_HEADS, DIM = 4, 4, 2, 8
MOST = 60  # tokens of a row
GEOMETRY = LayerGeometry(HEADS, KV_HEADS, DIM, DIM, window=None, softcap=None, has_sinks=False)
LENS = st.integers(0, MOST // 2)
ROWS = st.tuples(
    st.lists(LENS.map(lambda before: (before, 1)), max_size=6),
    st.lists(st.tuples(LENS, st.integers(2, MOST // 2)), max_size=3),
).filter(any)


def plan_of(rows: list[tuple[int, int]], num_decodes: int) -> StepPlan:
    """The first step of rows with so many tokens before it and in it, in blocks at random."""
    rng = np.random.default_rng(len(rows))
    per_row = -(-MOST // BLOCK)
    blocks = 1 + rng.permutation(len(rows) * per_row).reshape(len(rows), per_row)
    slots = rng.permutation(len(rows))
    positions = [np.arange(before, before + count) for before, count in rows]
    kv_slots = [
        own[at // BLOCK] * BLOCK + at % BLOCK for own, at in zip(blocks, positions, strict=True)
    ]
    every = np.concatenate(positions)
    return blank_plan(
        num_decodes=num_decodes,
        token_ids=np.arange(len(every)),
        positions=every,
        kv_slots=np.concatenate(kv_slots),
        slots=slots,
        query_lens=np.array([count for _, count in rows], np.int32),
        kv_lens=np.array([before + count for before, count in rows], np.int32),
        table_slots=np.repeat(slots, per_row),
        table_numbers=np.tile(np.arange(per_row), len(rows)),
        table_blocks=blocks.reshape(-1).astype(np.int32),
    )


@pytest.mark.skipif(kernels() is None, reason="there is no C compiler")
@settings(max_examples=60)
@given(ROWS, st.sampled_from([None, 5]), st.integers(0, 9))
def test_outputs_are_the_same_and_last_tokens_are_found(
    rows: tuple[list[tuple[int, int]], list[tuple[int, int]]], window: int | None, seed: int
) -> None:
    plan = plan_of([*rows[0], *rows[1]], len(rows[0]))
    torch.manual_seed(seed)
    layer = kv_cache.allocate(
        [GEOMETRY],
        num_blocks=1 + len(plan.table_blocks),
        block_size=BLOCK,
        dtype=torch.float32,
        device=CPU,
    )
    for memory in layer[0].blocks:
        memory.normal_()
    query = torch.randn(plan.num_tokens, HEADS, DIM)
    key, value = (torch.randn(plan.num_tokens, KV_HEADS, DIM) for _ in "kv")
    tables = BlockTables(plan.num_requests, table_width(MOST, BLOCK), CPU)
    tables.append(plan)
    scratch, ours = Scratch(torch.float32, CPU), kernels()
    assert ours is not None
    backends: list[AttentionBackend] = [
        TorchBackend(layer, BLOCK, scratch),
        CpuBackend(ours, layer, BLOCK),
    ]
    outputs = []
    for backend in backends:
        order = backend.order(plan)
        last = np.cumsum(plan.query_lens) - 1
        assert plan.token_ids[order.tokens][order.last].tolist() == plan.token_ids[last].tolist()
        tokens = torch.from_numpy(np.arange(plan.num_tokens)[order.tokens])
        context = backend.of_plan(plan, order, tables)
        output = torch.empty(plan.num_tokens, HEADS, DIM)
        params = AttentionParams(scale=0.3, window=window)
        output[tokens] = context.attend(0, query[tokens], key[tokens], value[tokens], params)
        outputs.append(output)
    torch.testing.assert_close(outputs[0], outputs[1], atol=2e-5, rtol=1e-4)
