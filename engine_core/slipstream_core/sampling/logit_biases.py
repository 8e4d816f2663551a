"""Applies logit biases, allowed ids and bad words to a step's logits.

State on the device, by state slot: the bits of allowed ids, and the last tokens of rows whose bad
words are longer than one token. A plan's `StepConstraints` name the rows and their constraints.

- Nothing depends on values that only the device has: every branch is taken by the plan's columns,
  which are on the host, so nothing waits.
- A bad word is matched against the output, not the prompt, as in vLLM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.sampling.token_bitmask import keep_allowed
from slipstream_core.step.constraint_plan import (
    NO_TOKEN,
    ConstraintRefill,
    DraftsAhead,
    StepConstraints,
)
from slipstream_core.step.staging import to_device
from slipstream_ipc.validation.token_constraints import MAX_BAD_WORD_TOKENS

_TAIL = MAX_BAD_WORD_TOKENS - 1
_INITIAL_STATE_SLOTS = 16


class LogitBiases:
    """The biases, allowed ids and bad words of one runner's rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        # [state slots, ceil(vocab / 32)] int32: a bit for each allowed token id
        num_words = -(-vocab_size // 32)
        self._allowed = torch.zeros(
            (_INITIAL_STATE_SLOTS, num_words), dtype=torch.int32, device=device
        )
        # [state slots, _TAIL] int64: the last tokens, padded in front with NO_TOKEN
        self._tails = torch.full((_INITIAL_STATE_SLOTS, _TAIL), NO_TOKEN, device=device)

    def load(self, constraints: StepConstraints) -> None:
        """Use these constraints from now on.

        Raises RuntimeError if one of their state slots does not exist, because the step that was to
        fill it failed. On a card, an index beyond the table would make the context unusable.
        """
        for state_slots, table in (
            (constraints.tail_state_slots, self._tails),
            (constraints.allowed_state_slots, self._allowed),
        ):
            state_slot = int(state_slots.max(initial=-1))
            if state_slot >= len(table):
                raise RuntimeError(
                    f"state slot {state_slot} of {len(table)} is missing: its step failed"
                )
        self._bias_at = self._to(constraints.bias_rows), self._to(constraints.bias_ids)
        self._biases = self._to(constraints.biases)
        self._allowed_rows = self._to(constraints.allowed_rows)
        self._allowed_state_slots = self._to(constraints.allowed_state_slots)
        self._banned_at = self._to(constraints.banned_rows), self._to(constraints.banned_ids)
        self._word_at = self._to(constraints.word_rows), self._to(constraints.word_lasts)
        self._word_state_slots = self._to(constraints.word_state_slots)
        self._heads = self._to(constraints.word_heads)
        self._host_rows = constraints.word_rows, constraints.tail_rows
        self._tail_rows = self._to(constraints.tail_rows)
        self._tail_state_slots = self._to(constraints.tail_state_slots)

    def refill(self, refill: ConstraintRefill) -> None:
        """Fill newly assigned state slots with last tokens and allowed ids."""
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

    def apply(self, logits: torch.Tensor, drafts: DraftsAhead | None = None) -> None:
        """Change the logits of the constrained rows, float32 [C, vocab], in place."""
        if len(self._biases):
            logits[self._bias_at] += self._biases
        if len(self._allowed_rows):
            keep_allowed(logits, self._allowed_rows, self._allowed, self._allowed_state_slots)
        if len(self._banned_at[0]):
            # a Python scalar would be copied to the card synchronously
            logits.index_put_(self._banned_at, logits.new_full((1,), -torch.inf))
        if len(self._word_state_slots):
            tails = self._tails[self._word_state_slots]
            if drafts is not None:
                tails = self._behind(tails, drafts, self._host_rows[0])
            tails = tails[:, _TAIL - self._heads.shape[1] :]
            is_next = ((tails == self._heads) | (self._heads == NO_TOKEN)).all(-1)
            # accumulated, as two words may end with the same token
            never = torch.where(is_next, -torch.inf, 0.0)
            logits.index_put_(self._word_at, never, accumulate=True)

    def sampled(self, token_ids: torch.Tensor) -> None:
        """Append the tokens that the constrained rows sampled, int64 [C]."""
        if len(self._tail_state_slots):
            tails = self._tails[self._tail_state_slots, 1:]
            new = token_ids[self._tail_rows]
            self._tails[self._tail_state_slots] = torch.cat([tails, new[:, None]], 1)

    def sampled_behind(
        self, drafts: DraftsAhead, token_ids: torch.Tensor, is_kept: npt.NDArray[np.bool_]
    ) -> None:
        """Append those of the tokens of the constrained rows, int64 [C], that are kept [C]."""
        if not len(self._tail_state_slots):
            return
        rows = self._host_rows[1]
        # of a request's rows, the last one that is kept has the others' tokens in front of it
        is_last = is_kept[rows]
        goes_on = is_last[1:] & (drafts.lens[rows][1:] > 0)
        is_last[:-1] &= ~goes_on
        at = self._to(np.flatnonzero(is_last))
        state_slots = self._tail_state_slots[at]
        tails = self._behind(self._tails[state_slots], drafts, rows[is_last])
        new = token_ids[self._tail_rows[at]]
        self._tails[state_slots] = torch.cat([tails[:, 1:], new[:, None]], 1)

    def _behind(
        self, tails: torch.Tensor, drafts: DraftsAhead, rows: npt.NDArray[np.int64]
    ) -> torch.Tensor:
        """The last tokens of rows behind their drafts; tails: [n, _TAIL] of their requests."""
        longer = torch.cat([tails, self._to(drafts.token_ids[rows])], 1)
        return longer.gather(1, self._to(drafts.lens[rows, None] + np.arange(_TAIL)))

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)


def _with_state_slots(
    table: torch.Tensor, state_slots: npt.NDArray[np.int64], fill: int
) -> torch.Tensor:
    """The table, grown to at least twice its size if it lacks one of `state_slots`."""
    missing = int(state_slots.max()) + 1 - len(table)
    if missing <= 0:
        return table
    more = max(missing, len(table))
    return torch.cat([table, table.new_full((more, table.shape[1]), fill)])
