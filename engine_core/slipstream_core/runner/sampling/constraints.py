"""Biases, allowed ids and bad words on a step's logits.

Owns: what they mean, the last tokens of rows whose bad words are longer than one token, and the
bits of allowed ids. Knows no requests: a plan's `StepConstraints` say which row has what.

Rules:
- Nothing here depends on values that only the device has: no wait, and no branch but by the plan's
  columns, which are on the host.
- A bad word is looked for in what was output, not in the prompt, as in vLLM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.sampling.token_bitmask import keep_allowed
from slipstream_core.runner.staging import to_device
from slipstream_core.step.constraint_plan import NO_TOKEN, ConstraintRefill, StepConstraints
from slipstream_ipc.validation.token_constraints import MAX_BAD_WORD_TOKENS

_TAIL = MAX_BAD_WORD_TOKENS - 1
_FIRST_LANES = 16


class Constraints:
    """Of one runner."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        # [state slots, ceil(vocab / 32)] int32: by state slot, a bit for each token id that is
        # allowed
        num_words = -(-vocab_size // 32)
        self._allowed = torch.zeros((_FIRST_LANES, num_words), dtype=torch.int32, device=device)
        # [state slots, _TAIL] int64: by state slot, the last tokens, NO_TOKEN in front
        self._tails = torch.full((_FIRST_LANES, _TAIL), NO_TOKEN, device=device)

    def load(self, rules: StepConstraints) -> None:
        """These rules are meant from now on.

        Raises RuntimeError where a state slot of theirs is not there: the step that was to bring
        its tokens failed. A card would look for it outside of the table, which is its end.
        """
        for state_slots, table in (
            (rules.tail_state_slots, self._tails),
            (rules.allowed_state_slots, self._allowed),
        ):
            state_slot = int(state_slots.max(initial=-1))
            if state_slot >= len(table):
                raise RuntimeError(
                    f"state slot {state_slot} of {len(table)} is missing: its step failed"
                )
        self._bias_at = self._to(rules.bias_places), self._to(rules.bias_ids)
        self._biases = self._to(rules.biases)
        self._allowed_places = self._to(rules.allowed_places)
        self._allowed_state_slots = self._to(rules.allowed_state_slots)
        self._banned_at = self._to(rules.banned_places), self._to(rules.banned_ids)
        self._word_at = self._to(rules.word_places), self._to(rules.word_lasts)
        self._word_state_slots = self._to(rules.word_state_slots)
        self._heads = self._to(rules.word_heads)
        self._tail_places = self._to(rules.tail_places)
        self._tail_state_slots = self._to(rules.tail_state_slots)

    def refill(self, refill: ConstraintRefill) -> None:
        """Rows got state slots; these are their last tokens, and the ids that they may sample."""
        if len(refill.tail_state_slots):
            self._tails = _with_state_slots(self._tails, refill.tail_state_slots, NO_TOKEN)
            self._tails[self._to(refill.tail_state_slots)] = self._to(refill.tails)
        if len(refill.allowed_state_slots):
            self._allowed = _with_state_slots(self._allowed, refill.allowed_state_slots, 0)
            bits = self._allowed.new_zeros(
                (len(refill.allowed_state_slots), self._allowed.shape[1])
            )
            bits[:, : refill.allowed_bits.shape[1]] = self._to(refill.allowed_bits)
            self._allowed.index_copy_(0, self._to(refill.allowed_state_slots), bits)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits of the rows with rules, float32 [C, vocab], in place."""
        if len(self._biases):
            logits[self._bias_at] += self._biases
        if len(self._allowed_places):
            keep_allowed(logits, self._allowed_places, self._allowed, self._allowed_state_slots)
        if len(self._banned_at[0]):
            # a number of the host's would be copied to the card while the host waits
            logits.index_put_(self._banned_at, logits.new_full((1,), -torch.inf))
        if len(self._word_state_slots):
            tails = self._tails[self._word_state_slots, _TAIL - self._heads.shape[1] :]
            is_next = ((tails == self._heads) | (self._heads == NO_TOKEN)).all(-1)
            # added up, for two words may end with the same token
            never = torch.where(is_next, -torch.inf, 0.0)
            logits.index_put_(self._word_at, never, accumulate=True)

    def sampled(self, token_ids: torch.Tensor) -> None:
        """The rows with rules sampled these, int64 [C]."""
        if len(self._tail_state_slots):
            tails = self._tails[self._tail_state_slots, 1:]
            new = token_ids[self._tail_places]
            self._tails[self._tail_state_slots] = torch.cat([tails, new[:, None]], 1)

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)


def _with_state_slots(
    table: torch.Tensor, state_slots: npt.NDArray[np.int64], fill: int
) -> torch.Tensor:
    """The table with room for `state slots`, at least twice as large where there was none."""
    missing = int(state_slots.max()) + 1 - len(table)
    if missing <= 0:
        return table
    more = max(missing, len(table))
    return torch.cat([table, table.new_full((more, table.shape[1]), fill)])
