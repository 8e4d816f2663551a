"""Builds the columns of a step from rows and token counts.

Arrays made here are never written again, so some are shared: between the columns of a plan, and
sampling columns between consecutive steps.

- A token that is in the history is given by its id, a token in flight by the slot in which it is
  sampled. Only the last known token of a row can be in flight, so only a row that computes one
  token can need it.
- A row is sampled when the step computes all of its known tokens.
- Drafts stand behind a row's last known token. They count neither as known nor as computed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from slipstream_core.drafting.drafter import Drafts
from slipstream_core.scheduler.request_table import RequestTable, SlotTable
from slipstream_core.step.plan import COLUMNS, SnapshotPlan, StepPlan, columns_over
from slipstream_ipc.arrays import Int32s, Int64s
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

# what is gathered of a step's rows: its name in the request table by its name in a plan
_GATHERED = {
    name: (each.declared.source, each.dtype)
    for name, each in columns_over("R").items()
    if each.declared.source
}


# the columns that differ between steps of the same rows
_NOTHING_BY_STEP: dict[str, Any] = {
    name: each.blank(0)
    for name, each in COLUMNS.items()
    if each.declared.over in ("T", "E", "M", "G") or name == "kv_lens"
}


class TokenColumns(Struct, frozen=True, eq=False, gc=False):
    """The tokens that a step computes, without sampling; fields as in StepPlan."""

    token_ids: Int64s
    gather_slots: Int64s
    positions: Int64s
    kv_slots: Int64s
    kv_lens: Int32s
    table_slots: Int64s
    table_numbers: Int64s
    table_blocks: Int32s
    # columns [R] that decode steps of the same rows have in common, and num_decodes
    by_row: dict[str, Any]
    sampled: RowSet  # the sampled rows, [S]
    draft_lens: Int64s | None = None

    @property
    def slots(self) -> Int64s:
        """The slot of each row, [R]."""
        slots: Int64s = self.by_row["slots"]
        return slots


def token_columns(
    requests: RequestTable,
    slots: SlotTable,
    tokens: TokenLog,
    *,
    rows: RowSet,
    counts: Int64s,
    num_decodes: int,
    block_size: int,
    drafts: Drafts | None = None,
) -> TokenColumns:
    """The columns in which `rows` [R] compute `counts` [R] tokens, the first `num_decodes` 1 each.

    Their block tables already have room for these tokens. drafts: of these rows, behind their known
    tokens; none is in flight, and `counts` count both.
    """
    own = rows.array
    at = requests.slot[own]
    known = requests.known[own]
    starts = requests.computed[own]
    kv_lens = starts + counts
    in_flight = known > tokens.lengths(rows)

    # by token; where each row has one token, columns by token equal columns by row
    positions, token_rows, gathered = starts, np.arange(len(rows)), in_flight
    if num_decodes < len(rows):
        token_rows = np.repeat(token_rows, counts)
        offsets = np.cumsum(counts) - counts
        positions = np.arange(len(token_rows)) + (starts - offsets)[token_rows]
        gathered = in_flight[token_rows]
    if drafts is not None:
        token_ids = np.empty(len(positions), np.int64)
        num_known = counts - drafts.lens
        is_known = positions < (starts + num_known)[token_rows]
        token_ids[is_known] = tokens.gather(rows, starts, num_known)
        token_ids[~is_known] = drafts.token_ids
        gather_slots = np.full(len(positions), -1)
    elif in_flight.all():
        token_ids = np.zeros(len(positions), np.int64)
        gather_slots = at
    elif not in_flight.any():
        is_one_each = None if len(positions) == len(rows) else counts
        token_ids = tokens.gather(rows, starts, is_one_each).astype(np.int64)
        gather_slots = np.full(len(positions), -1)
    else:
        token_ids = np.zeros(len(positions), np.int64)
        on_host = ~in_flight
        ids = tokens.gather(own[on_host], starts[on_host], counts[on_host])
        token_ids[~gathered] = ids
        gather_slots = np.where(gathered, at[token_rows], -1)

    token_slots = at if num_decodes == len(rows) else at[token_rows]
    numbers = positions // block_size
    blocks = slots.blocks_at(token_slots, numbers)
    # positions - numbers * block_size takes a third of the time of a modulo
    within = positions - numbers * block_size
    kv_slots = blocks.astype(np.int64) * block_size + within
    begun = np.flatnonzero(within == 0)
    table_slots, table_numbers = token_slots[begun], numbers[begun]
    if num_decodes < len(rows):  # a row's first step is a chunk
        shared = _shared_entries(requests, own[num_decodes:], block_size)
        if shared is not None:
            table_slots = np.concatenate([shared[0], table_slots])
            table_numbers = np.concatenate([shared[1], table_numbers])

    samples = (kv_lens if drafts is None else kv_lens - drafts.lens) == known
    sampled = rows if samples.all() else RowSet(own[samples])
    by_row: dict[str, Any] = {
        "num_decodes": num_decodes,
        "slots": at,
        "query_lens": counts.astype(np.int32),
        "samples": samples,
    }
    for name, (source, dtype) in _GATHERED.items():
        by_row[name] = getattr(requests, source)[own].astype(dtype)
    return TokenColumns(
        token_ids=token_ids,
        gather_slots=gather_slots,
        positions=positions,
        kv_slots=kv_slots,
        kv_lens=kv_lens.astype(np.int32),
        table_slots=table_slots,
        table_numbers=table_numbers,
        table_blocks=slots.blocks_at(table_slots, table_numbers),
        by_row=by_row,
        sampled=sampled,
        draft_lens=None if drafts is None else drafts.lens,
    )


def _shared_entries(
    requests: RequestTable, rows: Int64s, block_size: int
) -> tuple[Int64s, Int64s] | None:
    """Slot and number of each block that `rows` share, of those that begin with this step."""
    num_shared, computed = requests.num_shared[rows], requests.computed[rows]
    begins = (num_shared > 0) & (computed == num_shared)
    if not begins.any():
        return None
    counts = num_shared[begins] // block_size
    firsts = np.cumsum(counts) - counts
    numbers = np.arange(counts.sum()) - np.repeat(firsts, counts)
    return np.repeat(requests.slot[rows[begins]], counts), numbers


class PlanBuilder:
    """Builds plans from what steps compute, with the sampling columns of their sampled rows.

    Most plans have the rows of the one before: then only what differs is replaced, at a fifth of
    the cost.
    """

    def __init__(self, requests: RequestTable, tokens: TokenLog) -> None:
        self._requests = requests
        self._tokens = tokens
        # of the last plan: what its rows have in common with those of the next, and itself
        self._last: tuple[dict[str, Any], dict[str, Any], StepPlan] | None = None

    def build(
        self, columns: TokenColumns, *, step: int, snapshots: SnapshotPlan | None = None
    ) -> StepPlan:
        """The plan of these columns."""
        requests, sampled = self._requests, columns.sampled.array
        sampling = requests.sampling(columns.sampled)
        places, ahead = sampled, None
        if columns.draft_lens is not None:  # sampled behind each of the drafts, too
            nums = 1 + columns.draft_lens[columns.by_row["samples"]]
            places = np.repeat(sampled, nums)
            ahead = np.arange(len(places)) - np.repeat(np.cumsum(nums) - nums, nums)
        masked_rows, masked_ids = requests.masks(places, ahead)
        constraints = None
        if requests.constraints:
            asking = np.flatnonzero(requests.has_constraints[sampled])
            if len(asking):
                constraints = requests.constraints.plan(
                    sampled[asking], asking, self._tokens, requests.prompt_len
                )
        last = self._last
        if last is None or last[0] is not columns.by_row or last[1] is not sampling:
            like = StepPlan(
                step=step,
                **columns.by_row,
                **sampling,
                **_NOTHING_BY_STEP,
            )
            self._last = last = columns.by_row, sampling, like
        return replace(
            last[2],
            step=step,
            token_ids=columns.token_ids,
            gather_slots=columns.gather_slots,
            positions=columns.positions,
            kv_slots=columns.kv_slots,
            kv_lens=columns.kv_lens,
            table_slots=columns.table_slots,
            table_numbers=columns.table_numbers,
            table_blocks=columns.table_blocks,
            masked_rows=masked_rows,
            masked_ids=masked_ids,
            grammar_rows=requests.needing_masks(sampled),
            constraints=constraints,
            draft_lens=columns.draft_lens,
            snapshots=snapshots,
        )
