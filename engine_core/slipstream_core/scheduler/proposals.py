"""Steps of the draft model, which foresees tokens of rows for the step behind.

- It has a cache of its own in the same blocks, under the same tables, so blocks are found, shared
  and freed for both. What it has computed lags behind: nothing is computed for a row that is not
  drafted. A row that is catches up first: those that lack least before others, in slices that
  take a part of a step's time, so no stream waits for another's prompt. One that lacks more has
  no drafts yet, and one that ends before it would have caught up never has any. Of shared blocks
  it is known which the draft model has filled, too.
- Catching up and foreseeing is one plan. Rows that lack a few tokens, as those do that are drafted
  in each step, compute them as rows of one token; those that lack more compute a chunk.
- Drafts are known tokens only once they have arrived: what the draft model has computed of wrong
  ones is written again (`took_in`), also where another drafter's were right instead.
- A plan comes alone, behind steps that are answered, and has the number of the last one.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from slipstream_core.drafting.model_drafter import ModelDrafter
from slipstream_core.scheduler.launched_steps import Launched
from slipstream_core.scheduler.request_blocks import RequestBlocks
from slipstream_core.scheduler.request_table import NO_SLOT, RequestTable, SlotTable
from slipstream_core.step.plan import (
    ProposalPlan,
    StepPlan,
    blank_plan,
    columns_over,
    sampling_flags,
)
from slipstream_ipc.arrays import Int64s, UInt32s
from slipstream_ipc.history.pages import spans
from slipstream_ipc.history.token_log import TokenLog
from slipstream_ipc.row_set import RowSet

logger = logging.getLogger(__name__)

_MOST_FAILURES = 3  # in a row, after which the draft model is not asked any more
_ONE_BY_ONE = 17  # tokens that a row lacks at most whose drafts of a step were all right
_USUALLY_LACKED = 2  # tokens, at most, of a row that was drafted in the step before
_BY_SAMPLE = tuple(columns_over("S"))


class Planned(NamedTuple):
    """A plan, its rows [R], and those of them that it foresees tokens of, [S]."""

    plan: StepPlan
    rows: RowSet
    sampled: RowSet


class Proposals:
    """Plans the draft model's steps and takes in what they foresee."""

    def __init__(
        self,
        drafter: ModelDrafter,
        requests: RequestTable,
        slots: SlotTable,
        blocks: RequestBlocks,
        tokens: TokenLog,
        block_size: int,
    ) -> None:
        self._drafter = drafter
        self._requests, self._slots, self._blocks = requests, slots, blocks
        self._tokens = tokens
        self._block_size = block_size
        self._num_failed = 0  # plans, in a row
        # rows of the plan answered last, with their generations, until a step may use its tokens
        self._answered: tuple[Int64s, Int64s] | None = None
        self._ends = np.empty(0, np.int64)  # [R] tokens that the planned rows will have computed

    @property
    def are_answered(self) -> bool:
        """True if the next step of the model may use what was foreseen."""
        return self._answered is not None

    def leave_out(self, rows: Int64s) -> None:
        """Nothing is foreseen of these rows any more."""
        self._drafter.close(rows)

    def plan(
        self, step: int, decoding: Int64s, most: Int64s, budget: int, num_beside: int = 0
    ) -> Planned | None:
        """The plan for these rows [n], each of which lacks its last known token alone, with at most
        `most` [n] drafts and `budget` tokens; None where no drafts are wanted, or there are some.
        num_beside: tokens of prompts that the step behind computes besides, which has the same
        budget: drafts for which it has no room are not foreseen.
        """
        if self._answered is not None:
            return None
        room = budget - len(decoding) - num_beside
        if room <= 0:
            return None
        requests = self._requests
        known = requests.known[decoding]
        lacking = known - np.minimum(requests.draft_computed[decoding], known - 1)
        slice_len = budget
        if lacking.max(initial=0) > _USUALLY_LACKED:
            slice_len = self._drafter.num_beside(len(decoding), budget)
            num_slices = -(-lacking // slice_len)
            is_late = (lacking > slice_len) & (requests.limit[decoding] - known <= num_slices)
            if is_late.any():
                self.leave_out(decoding[is_late])
        lens = self._drafter.wanted(decoding, most, known, num_beside)
        if lens is None:
            return None
        order = np.flatnonzero(lens > 0)
        order = order[np.argsort(lacking[order], kind="stable")]
        rows, lens, known, lacking = (each[order] for each in (decoding, lens, known, lacking))
        counts = lacking.copy()
        behind = counts[counts > _USUALLY_LACKED]
        counts[len(counts) - len(behind) :] = _first(behind, slice_len)
        counts = _first(counts, budget)
        lens = np.where(counts == lacking, lens, 0)  # it catches up, and has no drafts yet
        lens = _first(lens, room)
        # of rows with drafts alone: `used` frees what is left over of theirs
        lens = self._blocks.grow_for_drafts(requests.slot[rows], lens)
        has_some = (counts > 0) & ((lens > 0) | (lacking > _USUALLY_LACKED))
        order = np.flatnonzero(has_some)
        order = order[np.argsort(counts[order] > _ONE_BY_ONE, kind="stable")]  # chunks come behind
        if not len(order):
            return None
        starts = known - lacking
        rows, lens, starts, counts = (each[order] for each in (rows, lens, starts, counts))
        return self._planned(step, rows, lens, starts, counts)

    def _planned(
        self, step: int, rows: Int64s, lens: Int64s, starts: Int64s, counts: Int64s
    ) -> Planned:
        requests, size = self._requests, self._block_size
        row_set, slots = RowSet(rows), requests.slot[rows]
        is_chunk = counts > _ONE_BY_ONE
        nums = np.where(is_chunk, 1, counts)  # rows of the plan
        owners = np.repeat(np.arange(len(rows)), nums)
        query_lens = np.where(is_chunk, counts, 1)[owners]
        is_last = np.zeros(len(owners), np.bool_)
        is_last[np.cumsum(nums) - 1] = True
        # a row of one token is behind those before it of the same request
        behind = np.arange(len(owners)) - np.repeat(np.cumsum(nums) - nums, nums)
        samples = is_last & (lens > 0)[owners]
        sampled = RowSet(rows[lens > 0])
        positions = spans(starts, counts)
        of_tokens = np.repeat(slots, counts)
        # entries that no step of the model has brought: of blocks that begin with the last known
        # token, or with drafts
        num_ahead = np.maximum(lens, 1)
        ahead = spans(requests.known[rows] - 1, num_ahead)
        ahead_slots = np.repeat(slots, num_ahead)
        lens = lens[lens > 0]
        drawn_slots, firsts = requests.slot[sampled.array], requests.known[sampled.array]
        begun = np.flatnonzero(ahead % size == 0)
        numbers, table_slots = ahead[begun] // size, ahead_slots[begun]
        drafts, draft_slots = spans(firsts, lens - 1), np.repeat(drawn_slots, lens - 1)
        sampling = requests.sampling(sampled)
        columns: dict[str, Any] = {name: sampling[name] for name in _BY_SAMPLE}
        columns["num_logprobs"] = np.full(len(sampled), -1, np.int32)
        plan = blank_plan(
            step=step,
            token_ids=self._tokens.gather(row_set, starts, counts).astype(np.int64),
            positions=positions,
            kv_slots=self._kv_slots(of_tokens, positions),
            slots=slots[owners],
            query_lens=query_lens.astype(np.int32),
            kv_lens=(starts[owners] + behind + query_lens).astype(np.int32),
            prompt_lens=requests.prompt_len[rows][owners].astype(np.int32),
            samples=samples,
            table_slots=table_slots,
            table_numbers=numbers,
            table_blocks=self._slots.blocks_at(table_slots, numbers),
            proposals=ProposalPlan(lens, self._kv_slots(draft_slots, drafts)),
            **columns,
            **sampling_flags(columns),
        )
        self._ends = starts + counts
        return Planned(plan, row_set, sampled)

    def _kv_slots(self, slots: Int64s, positions: Int64s) -> Int64s:
        numbers = positions // self._block_size
        blocks = self._slots.blocks_at(slots, numbers).astype(np.int64)
        return blocks * self._block_size + positions - numbers * self._block_size

    def answered(self, plan: StepPlan, record: Launched, token_ids: Int64s) -> None:
        """Take in what a plan has foreseen; token_ids: [sum(lens)] row by row."""
        requests, proposals = self._requests, plan.proposals
        assert proposals is not None
        self._num_failed = 0
        rows, sampled = record.rows.array, record.sampled.array
        is_live = requests.generation[rows] == record.generations
        is_live &= requests.slot[rows] != NO_SLOT
        requests.draft_computed[rows[is_live]] = self._ends[is_live]
        self._blocks.drafted(rows[is_live])
        is_live = requests.generation[sampled] == record.sampled_generations
        is_live &= requests.slot[sampled] != NO_SLOT
        live, lens = sampled[is_live], proposals.lens[is_live]
        requests.draft_computed[live] += lens - 1
        self._drafter.foreseen(live, lens, token_ids[np.repeat(is_live, proposals.lens)])
        self._answered = live, requests.generation[live]

    def failed(self, record: Launched) -> None:
        """A plan raised: its rows are not drafted for any more, which changes nothing they say.
        Where several did in a row, none are.
        """
        rows = record.rows.array
        rows = rows[self._requests.generation[rows] == record.generations]
        self.leave_out(rows)
        self._answered = rows, self._requests.generation[rows]
        self._num_failed += 1
        if self._num_failed == _MOST_FAILURES:
            self._drafter.switch_off()
            logger.error(
                "the draft model failed in %d steps in a row: it is not asked any more until the "
                "core starts anew, and texts are what they would be",
                self._num_failed,
            )

    def used(self, decoding: Int64s, lens: Int64s | None) -> None:
        """A step of the model is planned, of these decoding rows, [n], with `lens` drafts each, or
        none. Blocks that drafts have begun which it does not have are free.
        """
        if self._answered is None:
            return
        requests, (rows, generations) = self._requests, self._answered
        self._answered = None
        more = np.ones(len(requests.known), np.int64)
        if lens is not None:
            more[decoding] += lens
        holds = (requests.generation[rows] == generations) & (requests.slot[rows] != NO_SLOT)
        holds &= requests.known[rows] - requests.computed[rows] == 1  # not begun anew
        rows = rows[holds]
        self._blocks.cut(requests.slot[rows], more[rows])

    def took_in(self, rows: RowSet, ids: UInt32s, counts: Int64s | None) -> None:
        """These rows have got tokens, as of `Drafter.observe`, which comes behind: of what was
        computed for drafts, the right ones count.
        """
        at, computed = rows.array, self._requests.draft_computed
        num = np.ones(len(at), np.int64) if counts is None else counts
        right = self._drafter.num_right(at, ids, num)
        right = np.minimum(right, num - 1)  # nothing is computed of a row's last known token
        computed[at] = np.minimum(computed[at], self._tokens.lengths(rows) - num + right)


def _first(counts: Int64s, num: int) -> Int64s:
    """The parts of `counts`, [n], that are among the first `num` of all that they count."""
    return np.diff(np.minimum(np.cumsum(counts), num), prepend=0)
