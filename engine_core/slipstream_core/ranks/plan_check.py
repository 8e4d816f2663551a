"""Checks that a plan stays within the sizes of the runners that are to compute it.

All ranks have the same sizes, so the first one checks for all, before any other has heard of the
plan. Without it a token in the wrong place of the cache, or an id beyond the vocabulary, would end
the ranks' processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_core.step.plan import StepPlan

_UNSIGNED = {4: np.uint32, 8: np.uint64}
_largest = np.maximum.reduce  # `max` costs twice as much for a thousand numbers


class PlanBoundsError(ValueError):
    """A plan names a place that the ranks do not have."""


class PlanBounds(NamedTuple):
    """The sizes that plans refer to."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    vocab_size: int

    def check(self, plan: StepPlan) -> None:
        """Raises PlanBoundsError."""
        _check("token_ids", plan.token_ids, self.vocab_size)
        _check("kv_slots", plan.kv_slots, self.num_blocks * self.block_size)
        _check("slots", plan.slots, self.max_num_seqs)
        _check("block_tables", plan.block_tables, self.num_blocks)
        _check("gather_slots", plan.gather_slots + 1, self.max_num_seqs + 1)  # -1: none
        # every position of a row, and so every key that is attended to, is in its table
        room = plan.block_tables.shape[1] * self.block_size
        _check("kv_lens", plan.kv_lens, room + 1)
        _check("positions", plan.positions, room)
        if (plan.query_lens > plan.kv_lens).any():
            raise PlanBoundsError("a row computes more tokens than it has")


def _check(name: str, column: npt.NDArray[Any], end: int) -> None:
    """One pass over the column: as unsigned numbers, negative ones are large."""
    if column.size and _largest(column.view(_UNSIGNED[column.itemsize]), axis=None) >= end:
        raise PlanBoundsError(f"{name} reaches beyond {end - 1}")
