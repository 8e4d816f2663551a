"""Biases, allowed ids and bad words on a step's logits.

Owns: what they mean, and the last tokens of rows whose bad words are longer than one token. Knows
no requests: a plan's `Rules` say which row has what.

Rules:
- Nothing here depends on values that only the device has: no wait, and no branch but by the plan's
  columns, which are on the host.
- A bad word is looked for in what was output, not in the prompt, as in vLLM.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.rules import NO_TOKEN, Refill, Rules
from slipstream_core.runner.upload import to_device
from slipstream_ipc.token_rules import MAX_BAD_WORD_TOKENS

_TAIL = MAX_BAD_WORD_TOKENS - 1
_FIRST_LANES = 16


class Constraints:
    """Of one runner."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # [lanes, _TAIL] int64: by lane, the last tokens, NO_TOKEN in front
        self._tails = torch.full((_FIRST_LANES, _TAIL), NO_TOKEN, device=device)

    def load(self, rules: Rules) -> None:
        """These rules are meant from now on.

        Raises RuntimeError where a lane of theirs is not there: the step that was to bring its
        tokens failed. A card would look for it outside of the table, which is its end.
        """
        lane = int(rules.tail_lanes.max(initial=-1))
        if lane >= len(self._tails):
            raise RuntimeError(
                f"lane {lane} of {len(self._tails)} is not there: the step that was to fill it "
                "failed"
            )
        self._bias_at = self._to(rules.bias_places), self._to(rules.bias_ids)
        self._biases = self._to(rules.biases)
        self._allowed_places = self._to(rules.allowed_places)
        self._allowed_owners = self._to(rules.allowed_owners)
        self._allowed_ids = self._to(rules.allowed_ids)
        self._banned_at = self._to(rules.banned_places), self._to(rules.banned_ids)
        self._word_at = self._to(rules.word_places), self._to(rules.word_lasts)
        self._word_lanes = self._to(rules.word_lanes)
        self._heads = self._to(rules.word_heads)
        self._tail_places = self._to(rules.tail_places)
        self._tail_lanes = self._to(rules.tail_lanes)

    def refill(self, refill: Refill) -> None:
        """Rows got lanes; these are their last tokens."""
        if not len(refill.tail_lanes):
            return
        missing = int(refill.tail_lanes.max()) + 1 - len(self._tails)
        if missing > 0:
            more = max(missing, len(self._tails))
            self._tails = torch.cat([self._tails, self._tails.new_full((more, _TAIL), NO_TOKEN)])
        self._tails[self._to(refill.tail_lanes)] = self._to(refill.tails)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits of the rows with rules, float32 [C, vocab], in place."""
        if len(self._biases):
            logits[self._bias_at] += self._biases
        if len(self._allowed_places):
            rows = self._allowed_places[self._allowed_owners]
            kept = logits.new_full((len(self._allowed_places), logits.shape[1]), -torch.inf)
            kept[self._allowed_owners, self._allowed_ids] = logits[rows, self._allowed_ids]
            logits[self._allowed_places] = kept
        if len(self._banned_at[0]):
            # a number of the host's would be copied to the card while the host waits
            logits.index_put_(self._banned_at, logits.new_full((1,), -torch.inf))
        if len(self._word_lanes):
            tails = self._tails[self._word_lanes, _TAIL - self._heads.shape[1] :]
            is_next = ((tails == self._heads) | (self._heads == NO_TOKEN)).all(-1)
            # added up, for two words may end with the same token
            never = torch.where(is_next, -torch.inf, 0.0)
            logits.index_put_(self._word_at, never, accumulate=True)

    def sampled(self, token_ids: torch.Tensor) -> None:
        """The rows with rules sampled these, int64 [C]."""
        if len(self._tail_lanes):
            tails = self._tails[self._tail_lanes, 1:]
            new = token_ids[self._tail_places]
            self._tails[self._tail_lanes] = torch.cat([tails, new[:, None]], 1)

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)
