"""A step's rows as a host has them, and the order in which the model sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from slipstream_core.step.plan import StepPlan
from slipstream_ipc.arrays import Int32s, Int64s

Selector = slice | Int64s


class BatchOrder(NamedTuple):
    """The model's order of a plan's rows and tokens."""

    rows: Selector
    tokens: Selector
    last: Int64s  # [R]: the index of the last token of each row of the plan, in this order


@dataclass(frozen=True, slots=True)
class HostRows:
    """A step's rows and their places in the cache, decode rows first."""

    num_decodes: int
    query_lens: Int32s  # [R]
    kv_lens: Int32s  # [R], with this step's tokens
    slots: Int64s  # [R]: whose tables in `block_tables` are the rows'
    block_tables: Int32s  # [slots, width]
    block_size: int


def begun_blocks(plan: StepPlan, block_size: int) -> Int64s:
    """The blocks that this step begins but does not fill, int64 [n].

    Only a row's last block can be one. In decode that is one row in `block_size` on average, so
    clearing these blocks writes about as much as storing one token per row.
    """
    num_in_last = plan.kv_lens % block_size
    begun = np.flatnonzero((num_in_last > 0) & (num_in_last <= plan.query_lens))
    last = np.cumsum(plan.query_lens, dtype=np.int64)[begun] - 1
    return plan.kv_slots[last] // block_size


def plan_order(plan: StepPlan) -> BatchOrder:
    """The plan's own order."""
    last = np.cumsum(plan.query_lens, dtype=np.int64) - 1
    return BatchOrder(slice(None), slice(None), last)


def by_length(plan: StepPlan) -> BatchOrder:
    """Decode rows by ascending length, as TorchAttention needs them, then prefill rows.

    Attention buckets are then contiguous in every layer. Restoring the plan's order is free, as the
    rows whose logits are kept are picked by index anyway.
    """
    unsorted = plan_order(plan)
    decodes = plan.kv_lens[: plan.num_decodes]
    if len(decodes) < 2 or bool((decodes[1:] >= decodes[:-1]).all()):
        return unsorted
    order = np.argsort(decodes, kind="stable")
    last = unsorted.last
    last[order] = np.arange(len(order))
    rows = np.concatenate([order, np.arange(len(order), plan.num_requests)])
    tokens = np.concatenate([order, np.arange(len(order), plan.num_tokens)])
    return BatchOrder(rows, tokens, last)
