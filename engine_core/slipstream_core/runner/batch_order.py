"""In which order the model sees a step's rows and tokens.

Pure functions of a plan's columns; which order is wanted is the attention back end's to say.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from slipstream_core.step.plan import StepPlan

Selector = slice | npt.NDArray[np.int64]


def begun_blocks(plan: StepPlan, block_size: int) -> npt.NDArray[np.int64]:
    """The blocks whose first token this step writes and whose last it does not, [n].

    A row's blocks are written in order, so only its last one can be such a block. On average that
    is one row in `block_size`, and clearing its block writes as much as storing one token per row.
    """
    numbers, num_in_last = np.divmod(plan.kv_lens, block_size)
    begun = np.flatnonzero((num_in_last > 0) & (num_in_last <= plan.query_lens))
    return plan.block_tables[begun, numbers[begun]].astype(np.int64)


def as_they_come(plan: StepPlan) -> tuple[Selector, Selector, npt.NDArray[np.int64]]:
    """As by_length, for attention that asks for no order."""
    return slice(None), slice(None), np.cumsum(plan.query_lens, dtype=np.int64) - 1


def by_length(
    plan: StepPlan,
) -> tuple[Selector, Selector, npt.NDArray[np.int64]]:
    """The order in which the model sees a step: decode rows by ascending length, as TorchAttention
    wants them. Attention then finds its buckets side by side in every layer, and the way back
    costs nothing, as the rows whose logits are kept are picked by index anyhow.

    Returns what selects the rows, what selects the tokens, and for each row of the plan where
    its last token has come to lie, [R].
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
