"""The part of a plan with token constraints: biases, allowed ids, bad words, penalties.

`constraint_columns` builds these types, `logits_processors` applies them. Like the rest of a plan
they are plain numpy columns; a plan has none if no sampled row is constrained.

- `StepConstraints` index C rows by their position among the constrained rows, not in the batch. The
  same C rows in consecutive steps have the same object: a runner may cache what it derives from it.
- The runner keeps what a row has output so far in state slots: its last tokens in one, token counts
  in another. A row's first sampled step since it got its slot brings its earlier tokens
  (`ConstraintRefill`). From then on the runner adds what it samples, so that a step can be planned
  before the tokens of the step ahead of it are known.
- Allowed ids are kept there too, as a bit for each id: the cost of a step depends neither on how
  many ids a request lists, nor on how many answers it has. A row's first sampled step brings them
  even if another row has brought the same: that row's step may have failed.
- A state slot may be given to another row while steps of its previous owner are in flight: steps
  run in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream_ipc.arrays import Float32s, Int32s, Int64s
from slipstream_ipc.history.pages import spans

NO_TOKEN = -1  # padding of a tail that is not full, and of a word's head


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstraints:
    """The constraints of C rows. `*_rows` are in [0, C), in ascending order."""

    # B biases, added to logits; ids are unique per row
    bias_rows: Int64s
    bias_ids: Int64s
    biases: Float32s

    # A rows with allowed ids
    allowed_rows: Int64s  # [A]
    allowed_state_slots: Int64s  # [A] slots of their masks; rows with the same ids share one

    # K ids that are never sampled
    banned_rows: Int64s
    banned_ids: Int64s

    # W sequences of two tokens and more that must not be completed
    word_rows: Int64s
    word_state_slots: Int64s  # [W] slots of the rows' last tokens
    word_heads: Int64s  # [W, longest] all but the last token, NO_TOKEN in front
    word_lasts: Int64s

    # the M rows that have such sequences
    tail_rows: Int64s
    tail_state_slots: Int64s

    # P rows with penalties
    penalty_rows: Int64s
    count_state_slots: Int64s
    repetitions: Float32s  # 1 is off
    frequencies: Float32s  # 0 is off
    presences: Float32s  # 0 is off
    any_repetition: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintRefill:
    """The initial content of new state slots: earlier outputs, and prompts where they count."""

    tail_state_slots: Int64s  # [F]
    tails: Int64s  # [F, MAX_BAD_WORD_TOKENS - 1] last outputs, NO_TOKEN in front

    allowed_state_slots: Int64s  # [H]
    allowed_bits: Int32s  # [H, words] masks; ids behind the last word are not allowed

    count_state_slots: Int64s  # [G]
    seen: Int64s  # [G, most] distinct penalised ids, padded with the first, or 0
    num_seen: Int64s  # [G]
    output_state_slots: Int64s  # one for each of output_ids
    output_ids: Int64s


@dataclass(frozen=True, slots=True)
class ConstraintPlan:
    """The constraints of one step."""

    rows: Int64s  # [C] indices of the constrained rows among the S sampled rows
    constraints: StepConstraints
    refill: ConstraintRefill | None
    drafts: DraftsAhead | None = None  # if some rows stand behind drafts of theirs


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """The drafts in front of each of C rows, which a step computes as if they were known. The rows
    of a request are adjacent, behind one draft more each.
    """

    lens: Int64s  # [C]
    token_ids: Int64s  # [C, most] padded with NO_TOKEN behind


_BY_OWNER = {
    "bias_rows": ("bias_ids", "biases"),
    "allowed_rows": ("allowed_state_slots",),
    "banned_rows": ("banned_ids",),
    "word_rows": ("word_state_slots", "word_heads", "word_lasts"),
    "tail_rows": ("tail_state_slots",),
    "penalty_rows": ("count_state_slots", "repetitions", "frequencies", "presences"),
}


def repeated(constraints: StepConstraints, rows: Int64s, num_rows: int) -> StepConstraints:
    """The constraints of other rows, each of which has those of one of these `num_rows`: `rows`
    [C], ascending.
    """
    columns: dict[str, Any] = {"any_repetition": constraints.any_repetition}
    for owner, names in _BY_OWNER.items():
        nums = np.bincount(getattr(constraints, owner), minlength=num_rows)
        at = spans((np.cumsum(nums) - nums)[rows], nums[rows])
        columns[owner] = np.repeat(np.arange(len(rows)), nums[rows])
        for name in names:
            columns[name] = getattr(constraints, name)[at]
    return StepConstraints(**columns)
