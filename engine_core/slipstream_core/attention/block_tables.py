"""The block table of each slot, where attention reads it.

A plan brings the entries that are new (`step/plan`), so a step copies a few numbers, however long
its rows are. What a table names behind a row's tokens is left from a row before, and may be
anything that once was a block; what reads the tables goes by lengths.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream_core.step.plan import StepPlan
from slipstream_core.step.staging import Copies, Staging
from slipstream_ipc.arrays import Int32s, Int64s

_STAGING_BYTES = 1 << 16  # grows with what is appended in a step
_MULTIPLE = 16  # of entries; rows are aligned for kernels


def table_width(max_model_len: int, block_size: int) -> int:
    """The number of entries of a table that holds rows of `max_model_len` tokens."""
    blocks = -(-max_model_len // block_size)
    return -(-blocks // _MULTIPLE) * _MULTIPLE


def table_bytes(num_slots: int, width: int) -> int:
    """Bytes of the tables of `num_slots` slots."""
    return 4 * (num_slots + 1) * width


class BlockTables:
    """Tables of `num_slots` slots, and one more of null blocks for padding rows."""

    def __init__(
        self, num_slots: int, width: int, device: torch.device, copies: Copies | None = None
    ) -> None:
        """Without `copies` the device is a CPU, and the tables are written in place."""
        self.tensor = torch.zeros((num_slots + 1, width), dtype=torch.int32, device=device)
        self._staging = None if copies is None else Staging(copies, device, _STAGING_BYTES)

    @property
    def array(self) -> Int32s:
        """The tables on a CPU, [num_slots + 1, width]; the same memory."""
        array: Int32s = self.tensor.numpy()
        return array

    def append(self, plan: StepPlan) -> None:
        """Write a plan's entries, in order with the steps before it."""
        if not len(plan.table_slots):
            return
        if self._staging is None:
            self.array[plan.table_slots, plan.table_numbers] = plan.table_blocks
            return
        sent, blocks = self._staging.send_columns((places_of(plan, self.tensor), plan.table_blocks))
        self.tensor.view(-1).index_copy_(0, sent, blocks)


def places_of(plan: StepPlan, tables: torch.Tensor) -> Int64s:
    """The places of a plan's entries in flat `tables` [slots, width], [E]."""
    return plan.table_slots * tables.shape[1] + plan.table_numbers


def padded_rows(tables: Int32s, slots: Int64s, num_blocks: Int32s) -> Int32s:
    """The tables of `slots` [R] up to `num_blocks` [R] of each, [R, most of them], padded with the
    null block.
    """
    most = int(num_blocks.max(initial=0))
    rows = tables[slots, :most]
    rows[np.arange(most) >= num_blocks[:, None]] = 0
    return rows
