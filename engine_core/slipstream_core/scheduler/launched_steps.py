"""Records of the steps in flight: their rows with generations, and the blocks that requests share.

A record does not change when a request ends; compare generations (see `request_table`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from slipstream_core.step.plan import StepPlan
from slipstream_ipc.arrays import Int32s, Int64s, UInt32s
from slipstream_ipc.messages import Fault
from slipstream_ipc.row_set import RowSet

_NO_BLOCKS: Int32s = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Blocks that a row of a step reads from others (`shared`), or fills for others to read; and
    snapshots of its state likewise.
    """

    row: int
    generation: int
    shared: Int32s
    filled: Int32s
    loaded: tuple[int, ...] = ()
    saved: tuple[int, ...] = ()


class Launched(Struct, frozen=True, eq=False, gc=False):
    """The R rows of a step, of which S are sampled, with their generations."""

    step: int
    rows: RowSet  # [R]
    generations: Int64s  # [R]
    sampled: RowSet  # [S] rows
    sampled_generations: Int64s  # [S]
    is_suspect: bool  # its only request is one
    has_drafts: bool
    uses: tuple[BlockUse, ...] = ()  # in the order in which the rows were planned


class Sampled(Struct, frozen=True, gc=False):
    """The tokens that a step sampled for the n requests that are still alive."""

    rows: RowSet  # [n]
    token_ids: UInt32s  # [n], or [sum(counts)] row by row
    index: Int64s  # as `token_ids`: their indices in the step's result
    ended: Int64s  # rows that reached their length limit and are removed
    counts: Int64s | None = None  # [n] tokens of each row; None: one each
    faults: tuple[tuple[int, Fault], ...] = ()  # of rows that the device has given up, removed


class LaunchedSteps(deque[Launched]):
    """The steps in flight, oldest first; `popleft` gives the one that is answered next."""

    @property
    def has_suspect(self) -> bool:
        """True if a suspect is in flight; nothing is launched behind it."""
        return len(self) > 0 and self[-1].is_suspect

    @property
    def has_drafts(self) -> bool:
        """True if a step with drafts is in flight, or one of the draft model: what the step behind
        it computes is not known.
        """
        return len(self) > 0 and self[-1].has_drafts

    @property
    def last_step(self) -> int | None:
        """The step launched last, None if none is in flight."""
        return self[-1].step if self else None

    def launch(
        self,
        plan: StepPlan,
        rows: RowSet,
        generations: Int64s,
        sampled: RowSet,
        *,
        is_suspect: bool,
        uses: Sequence[BlockUse] = (),
    ) -> None:
        """Record the launch of `plan` for these rows, of which it samples `sampled`."""
        sampled_generations = generations
        if len(sampled) < len(rows):
            sampled_generations = generations[plan.samples]
        self.append(
            Launched(
                plan.step,
                rows,
                generations,
                sampled,
                sampled_generations,
                is_suspect,
                plan.draft_lens is not None,
                tuple(uses),
            )
        )

    def add_saved(self, step: int, row: int, snapshot: int) -> None:
        """A step saves this snapshot of a row's state; nothing where it is answered already."""
        for at, record in enumerate(self):
            if record.step == step:
                [index] = np.flatnonzero(record.rows.array == row).tolist()
                generation = int(record.generations[index])
                use = BlockUse(row, generation, _NO_BLOCKS, _NO_BLOCKS, saved=(snapshot,))
                self[at] = replace(record, uses=(*record.uses, use))

    def invalidated_by(self, failed: Launched) -> tuple[Int32s, set[int], dict[int, int]]:
        """Return the effects of a failed step, answered already, on the steps behind it.

        The blocks and the snapshots that do not hold their intended content, all different; and the
        rows behind it, with their generations, that read one of these, directly or through another
        row. A block's content may be in another one, too, so a snapshot is not found by its block.
        """
        rows = dict(zip(failed.rows.tolist(), failed.generations.tolist(), strict=True))
        behind: dict[int, int] = {}
        blocks: set[int] = set()
        snapshots: set[int] = set()
        for record in (failed, *self):
            for use in record.uses:
                is_invalid = use.generation in (rows.get(use.row), behind.get(use.row))
                reads_invalid = not (
                    blocks.isdisjoint(use.shared.tolist()) and snapshots.isdisjoint(use.loaded)
                )
                if not is_invalid and reads_invalid:
                    behind[use.row] = use.generation
                    is_invalid = True
                if is_invalid:
                    blocks.update(use.filled.tolist())
                    snapshots.update(use.saved)
        return np.array(sorted(blocks), np.int32), snapshots, behind

    def rows_of(self, plan: StepPlan) -> Int64s:
        """The rows of a step in flight, [R]."""
        return self.record_of(plan).rows.array

    def record_of(self, plan: StepPlan) -> Launched:
        """The record of a step in flight."""
        newest = self[-1]
        if newest.step == plan.step:
            return newest
        return next(record for record in self if record.step == plan.step)
