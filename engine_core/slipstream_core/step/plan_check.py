"""Checks that a plan stays within the sizes of the runners that are to compute it.

All ranks have the same sizes, so the first one checks for all, before any other has heard of the
plan. Without it a token in the wrong place of the cache, or an id beyond the vocabulary, would end
the ranks' processes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream_core.step.columns import Size
from slipstream_core.step.plan import COLUMNS, StepPlan

_UNSIGNED = {4: np.uint32, 8: np.uint64}
_largest = np.maximum.reduce  # `max` costs twice as much for a thousand numbers


class PlanBoundsError(ValueError):
    """A plan names a place that the ranks do not have."""


class PlanBounds(NamedTuple):
    """The sizes that plans refer to."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_blocks: int  # of a row
    vocab_size: int

    def checks(self) -> dict[str, tuple[int, int]]:
        """The offset that is added to the numbers of each column, and the bound that they are below
        then, not being negative.
        """
        sizes: dict[Size, int] = {
            "vocab": self.vocab_size,
            "cache_slots": self.num_blocks * self.block_size,
            "rows": self.max_num_seqs,
            "table": self.max_blocks,
            "blocks": self.num_blocks,
            # every position of a row, so every key attended to, has a place in its table
            "length": self.max_blocks * self.block_size,
        }
        found = {}
        for name, column in COLUMNS.items():
            _, below, least, reaches, *_ = column.declared
            if below is not None:
                found[name] = -least, sizes[below] - least + reaches
        return found

    def check(self, plan: StepPlan) -> None:
        """Raises PlanBoundsError."""
        for name, (shift, end) in self.checks().items():
            column = getattr(plan, name)
            _check(name, column + shift if shift else column, end)
        if (plan.query_lens > plan.kv_lens).any():
            raise PlanBoundsError("a row computes more tokens than it has")


def _check(name: str, column: npt.NDArray[Any], end: int) -> None:
    """One pass over the column: as unsigned numbers, negative ones are large."""
    if column.size and _largest(column.view(_UNSIGNED[column.itemsize]), axis=None) >= end:
        raise PlanBoundsError(f"{name} reaches beyond {end - 1}")
