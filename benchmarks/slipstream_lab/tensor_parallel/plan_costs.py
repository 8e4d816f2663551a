"""What a step's plan costs on its way to other ranks: checking and packing, viewing."""

from __future__ import annotations

import time

import numpy as np

from slipstream_bench.common.measures import Row
from slipstream_core.ranks.bus import PlanBus, PlanReader, slot_bytes
from slipstream_core.step.buffer import PlanBounds
from slipstream_core.step.plan import StepPlan, blank_plan

BLOCK_SIZE = 16


def decode_plan(num_rows: int, num_blocks: int) -> StepPlan:
    """Each of the rows decodes a token and has `num_blocks`; one in BLOCK_SIZE begins its last."""
    rows = np.arange(num_rows)
    lens = (num_blocks * BLOCK_SIZE - rows % BLOCK_SIZE).astype(np.int32)
    positions = lens - np.int64(1)
    blocks = rows * num_blocks + positions // BLOCK_SIZE
    begun = np.flatnonzero(positions % BLOCK_SIZE == 0)
    return blank_plan(
        gather_slots=rows,
        positions=positions,
        kv_slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        slots=rows,
        kv_lens=lens,
        prompt_lens=lens,
        table_slots=rows[begun],
        table_numbers=positions[begun] // BLOCK_SIZE,
        table_blocks=blocks[begun].astype(np.int32),
        temperatures=np.ones(num_rows, np.float32),
        seeds=rows,
    )


def measure_plans(num_rows: int, num_blocks: int, num_plans: int) -> Row:
    """Medians over `num_plans` plans, in one thread: writer and reader in turns, wall time."""
    plan = decode_plan(num_rows, num_blocks)
    bounds = PlanBounds(
        num_blocks=num_rows * num_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_rows,
        max_blocks=num_blocks,
        vocab_size=2,
    )
    bus = PlanBus(1)
    bus.allocate(
        slot_bytes(
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows,
            max_blocks=num_blocks,
            max_scored=0,
        ),
        bounds,
    )
    reader = PlanReader(0, bus.memory_fd, bus.doorbells[0], bus.room_fd)
    spent = np.empty((num_plans, 2), np.int64)
    clock = time.perf_counter_ns
    try:
        for at in range(num_plans):
            begin = clock()
            bus.put(plan, timeout_s=1)
            put = clock()
            reader.take()
            spent[at] = put - begin, clock() - put
            reader.release()
    finally:
        bus.close()
    put_us, take_us = (np.median(spent, axis=0) / 1e3).round(1).tolist()
    return {
        "benchmark": "tp",
        "rows": num_rows,
        "blocks": num_blocks,
        "put_us": put_us,
        "take_us": take_us,
    }
