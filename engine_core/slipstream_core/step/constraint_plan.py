"""The part of a plan that is about single tokens: biases, allowed ids, bad words, penalties.

Owns: the contract; types alone. `constraint_columns` makes them, `logits_processors` carries them
out. Like the rest of a plan they are plain numpy columns, and there are none where no sampled row
asks for any.

Rules:
- `StepConstraints` speak of C rows by their place among them, not by their place in the batch. It
  is the same object as long as the same C rows ask: a runner may keep what it has made of it.
- What a row has output so far is kept by the runner, in state slots: one where its last tokens are,
  one where its tokens are counted. A row's first sampled step since it got its slot brings what has
  been there before (`ConstraintRefill`); from then on the runner adds what it samples, so that a
  step can be planned before the tokens of the one ahead of it are known.
- Which ids a row may sample is kept there too, as a bit for each id: what a step costs does not
  depend on how many ids a request lists, nor on how many answers it has. A row's first sampled step
  brings them even where another row has brought the same: that row's step may have failed.
- A state slot may be given to another row while steps of the one before are in flight: steps run in
  order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]

NO_TOKEN = -1  # where a tail has no token yet; where a word's head asks for none in particular


@dataclass(frozen=True, slots=True, kw_only=True)
class StepConstraints:
    """What C rows ask. `*_places` are in [0, C), in ascending order."""

    # B numbers that are added to logits; no place has an id twice
    bias_places: Int64s
    bias_ids: Int64s
    biases: Float32s

    # A rows that may sample certain ids only
    allowed_places: Int64s  # [A]
    allowed_state_slots: (
        Int64s  # [A] where the bits of those ids are; rows with the same ids share one
    )

    # K ids that are never sampled
    banned_places: Int64s
    banned_ids: Int64s

    # W sequences that must not be completed, of two tokens and more
    word_places: Int64s
    word_state_slots: Int64s  # where the row's last tokens are
    word_heads: Int64s  # [W, longest] all but the last token, NO_TOKEN in front
    word_lasts: Int64s

    # the M rows that have such sequences
    tail_places: Int64s
    tail_state_slots: Int64s

    # P rows with penalties
    penalty_places: Int64s
    count_state_slots: Int64s
    repetitions: Float32s  # 1 is off
    frequencies: Float32s  # 0 is off
    presences: Float32s  # 0 is off
    any_repetition: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstraintRefill:
    """What rows that have just got state slots had output before, prompts included where they
    count."""

    tail_state_slots: Int64s  # [F]
    tails: Int64s  # [F, MAX_BAD_WORD_TOKENS - 1] their last outputs, NO_TOKEN in front

    allowed_state_slots: Int64s  # [H]
    allowed_bits: (
        Int32s  # [H, words] as in `token_bitmask`; ids behind the last word are not allowed
    )

    count_state_slots: Int64s  # [G]
    seen: Int64s  # [G, most] the tokens that penalties are about; the first again behind them, or 0
    num_seen: Int64s  # [G]
    output_state_slots: Int64s  # by token of their outputs
    output_ids: Int64s


@dataclass(frozen=True, slots=True)
class ConstraintPlan:
    """Of one step."""

    rows: Int64s  # [C] the places of those who ask among the S sampled rows
    rules: StepConstraints
    refill: ConstraintRefill | None
