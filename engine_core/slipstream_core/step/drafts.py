"""Steps with drafts: a row has its last known token and, behind it, tokens that may follow it.

A runner computes such a row as rows of one token each, which share its slot: all rows of a step
store their keys before any of them attends, so a draft sees the drafts before it. At each place a
token is sampled with the noise of its own position. A draft is right where it equals the token that
is sampled in front of it, and what is sampled behind a wrong one is dropped. So a step gives a row
exactly the tokens that it would have got one by one.
"""

from __future__ import annotations

from dataclasses import replace as replaced
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from slipstream_core.step.constraint_plan import (
    NO_TOKEN,
    ConstraintPlan,
    DraftsAhead,
    repeated,
)
from slipstream_core.step.plan import (
    Logprobs,
    StepPlan,
    StepResult,
    columns_over,
)
from slipstream_ipc.arrays import Bools, Int64s
from slipstream_ipc.history.pages import spans

_COMPUTED = ("query_lens", "kv_lens")
_BY_ROW = tuple(name for name in columns_over("R") if name not in _COMPUTED)
_BY_SAMPLE = tuple(columns_over("S"))


class Unfolded(NamedTuple):
    """A step with drafts, in rows that have none."""

    plan: StepPlan  # its sampled rows are the V places at which the step samples
    num_places: Int64s  # [S] of each sampled row of the step: one, and one for each draft
    inputs: Int64s  # [V] the token that each place is sampled behind


class Accepted(NamedTuple):
    """The tokens that a step with drafts gives to its S sampled rows."""

    counts: Int64s  # [S], one more than drafts that are right
    places: Int64s  # [sum(counts)] of the V places, those that are kept
    is_kept: Bools  # [V]


def unfold(plan: StepPlan) -> Unfolded:
    """Put a row of one token in place of each token of the rows that have drafts. Recurrent states
    are those of the plan's own rows.
    """
    drafts = plan.draft_lens
    assert drafts is not None
    num_rows = 1 + drafts  # [R], of one token each where there are drafts
    rows = np.repeat(np.arange(plan.num_requests), num_rows)
    behind = (np.cumsum(num_rows) - 1)[rows] - np.arange(len(rows))  # tokens of the row
    query_lens = np.where(drafts > 0, 1, plan.query_lens).astype(np.int32)[rows]
    num_places = num_rows[plan.samples]
    places = np.repeat(np.arange(len(num_places)), num_places)
    firsts = np.cumsum(num_places) - num_places
    columns: dict[str, Any] = {name: getattr(plan, name)[rows] for name in _BY_ROW}
    columns |= {name: getattr(plan, name)[places] for name in _BY_SAMPLE}
    if plan.constraints is not None:
        columns["constraints"] = _at_places(plan.constraints, plan, firsts, num_places)
    if plan.listed is not None:
        nums = num_places[plan.listed.rows]
        at = spans(firsts[plan.listed.rows], nums)
        columns["listed"] = replaced(plan.listed, rows=at, ids=plan.listed.ids.repeat(nums, 0))
    if plan.prompt is not None:
        columns["prompt"] = replaced(
            plan.prompt, rows=(np.cumsum(num_rows) - num_rows)[plan.prompt.rows]
        )
    rowwise = replace(
        plan,
        num_decodes=int(np.count_nonzero(np.logical_and.accumulate(query_lens == 1))),
        query_lens=query_lens,
        kv_lens=(plan.kv_lens[rows] - behind).astype(np.int32),
        grammar_rows=spans(firsts[plan.grammar_rows], num_places[plan.grammar_rows]),
        draft_lens=None,
        snapshots=None,
        **columns,
    )
    lasts = np.cumsum(query_lens, dtype=np.int64) - 1
    inputs = plan.token_ids[lasts[rowwise.samples]]
    return Unfolded(rowwise, num_places, inputs)


def _at_places(
    constraints: ConstraintPlan, plan: StepPlan, firsts: Int64s, num_places: Int64s
) -> ConstraintPlan:
    """The constraints of all places of their rows. firsts, num_places: [S] places of each row."""
    nums = num_places[constraints.rows]
    if nums.max() == 1:
        return replaced(constraints, rows=firsts[constraints.rows])
    owners = np.repeat(np.arange(len(nums)), nums)
    lens = np.arange(len(owners)) - np.repeat(np.cumsum(nums) - nums, nums)
    # a row's drafts are the last of its tokens in the step
    ends = np.cumsum(plan.query_lens, dtype=np.int64)[plan.samples][constraints.rows]
    numbers = np.arange(int(nums.max()) - 1)
    at = (ends - nums + 1)[owners, None] + numbers
    is_ahead = numbers < lens[:, None]
    token_ids = np.where(is_ahead, plan.token_ids[np.where(is_ahead, at, 0)], NO_TOKEN)
    return replaced(
        constraints,
        rows=spans(firsts[constraints.rows], nums),
        constraints=repeated(constraints.constraints, owners, len(nums)),
        drafts=DraftsAhead(lens, token_ids),
    )


def accepted(step: Unfolded, token_ids: Int64s, undefined: Int64s | None = None) -> Accepted:
    """The longest right beginning of each row's drafts; token_ids: [V] as sampled. It ends in front
    of `undefined` places, where nothing was.
    """
    num_places = step.num_places
    firsts = np.cumsum(num_places) - num_places
    is_wrong = np.zeros(len(token_ids), np.bool_)  # of a row's first place it says nothing
    is_wrong[1:] = step.inputs[1:] != token_ids[:-1]
    if undefined is not None:
        is_wrong[undefined] = True
    wrong = np.cumsum(is_wrong)  # up to each place
    is_kept = wrong == np.repeat(wrong[firsts], num_places)
    counts = np.add.reduceat(is_kept.astype(np.int64), firsts)
    return Accepted(counts, np.flatnonzero(is_kept), is_kept)


def only_accepted(result: StepResult, step: Unfolded, found: Accepted) -> StepResult:
    """The result of the step with drafts; result: of all V places."""
    logprobs = result.logprobs
    if logprobs is not None:
        at = found.places
        logprobs = Logprobs(logprobs.values[at], logprobs.ids[at], logprobs.ranks[at])
    kept = {place: number for number, place in enumerate(found.places.tolist())}
    undefined = result.undefined
    if undefined is not None:  # as a place behind drafts it is not accepted
        num_places = step.num_places
        undefined = np.flatnonzero(np.isin(np.cumsum(num_places) - num_places, undefined))
    wide = ((kept[place], each) for place, each in result.wide if place in kept)
    return replaced(
        result,
        token_ids=result.token_ids[found.places],
        logprobs=logprobs,
        wide=tuple(wide),
        undefined=undefined if undefined is not None and len(undefined) else None,
        counts=found.counts,
        draft_lens=step.num_places - 1,
    )
