"""The order in which the model sees a step's rows and tokens, from a plan's columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.step.plan import StepPlan

Selector = slice | npt.NDArray[np.int64]


def begun_blocks(plan: StepPlan, block_size: int) -> npt.NDArray[np.int64]:
    """The blocks that this step begins but does not fill, int64 [n].

    Only a row's last block can be one. In decode that is one row in `block_size` on average, so
    clearing these blocks writes about as much as storing one token per row.
    """
    num_in_last = plan.kv_lens % block_size
    begun = np.flatnonzero((num_in_last > 0) & (num_in_last <= plan.query_lens))
    last = np.cumsum(plan.query_lens, dtype=np.int64)[begun] - 1
    return plan.kv_slots[last] // block_size


def plan_order(plan: StepPlan) -> tuple[Selector, Selector, npt.NDArray[np.int64]]:
    """The plan's own order, in the form of `by_length`."""
    return slice(None), slice(None), np.cumsum(plan.query_lens, dtype=np.int64) - 1


def by_length(
    plan: StepPlan,
) -> tuple[Selector, Selector, npt.NDArray[np.int64]]:
    """Decode rows by ascending length, as TorchAttention needs them, then prefill rows.

    Attention buckets are then contiguous in every layer. Restoring the plan's order is free, as the
    rows whose logits are kept are picked by index anyway.

    Returns selectors of the rows and of the tokens, and for each row of the plan the new index of
    its last token, [R].
    """
    last = np.cumsum(plan.query_lens, dtype=np.int64) - 1
    decodes = plan.kv_lens[: plan.num_decodes]
    if len(decodes) < 2 or bool((decodes[1:] >= decodes[:-1]).all()):
        return slice(None), slice(None), last
    order = np.argsort(decodes, kind="stable")
    last[order] = np.arange(len(order))
    rows = np.concatenate([order, np.arange(len(order), plan.num_requests)])
    tokens = np.concatenate([order, np.arange(len(order), plan.num_tokens)])
    return rows, tokens, last
