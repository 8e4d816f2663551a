"""Applies a plan's constraints to the logits before sampling, and records the tokens sampled after.

The order is biases, allowed ids, bad words, then penalties.

- The raw logits stay unchanged: log-probabilities are computed from them.
- Every method is called on the device's thread, in launch order.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.sampling.logit_biases import LogitBiases
from slipstream_core.sampling.penalties import Penalties
from slipstream_core.step.constraint_plan import ConstraintPlan, DraftsAhead, StepConstraints
from slipstream_core.step.staging import to_device


class LogitsProcessors:
    """Biases and penalties of one runner, with state slots for `num_state_slots` rows."""

    def __init__(
        self, vocab_size: int, device: torch.device, *, num_state_slots: int, max_model_len: int
    ) -> None:
        self._device = device
        self._biases = LogitBiases(vocab_size, device)
        self._penalties = Penalties(
            vocab_size, device, num_state_slots=num_state_slots, max_model_len=max_model_len
        )
        self._loaded: StepConstraints | None = None
        self._rows = torch.empty(0, dtype=torch.int64, device=device)
        self._drafts: DraftsAhead | None = None

    def apply(self, logits: torch.Tensor, plan: ConstraintPlan) -> torch.Tensor:
        """A copy of the model's logits, float32 [S, vocab], with the plan's constraints applied."""
        changed = self.changed_rows(logits, plan)
        if len(changed) == len(logits):
            return changed  # rows are in ascending order, so these are all of them
        return logits.index_put((self._rows,), changed)

    def changed_rows(self, logits: torch.Tensor, plan: ConstraintPlan) -> torch.Tensor:
        """The plan's constrained rows of `logits` [S, vocab], changed; float32 [C, vocab]."""
        if plan.refill is not None:
            self._biases.refill(plan.refill)
            self._penalties.refill(plan.refill)
        if plan.constraints is not self._loaded:
            self._biases.load(plan.constraints)
            self._penalties.load(plan.constraints)
            self._loaded = plan.constraints
        self._rows = to_device(plan.rows, self._device)
        self._drafts = plan.drafts
        changed = logits[self._rows].float()
        self._biases.apply(changed, plan.drafts)
        self._penalties.apply(changed, plan.drafts)
        return changed

    def sampled(
        self, token_ids: torch.Tensor, is_kept: npt.NDArray[np.bool_] | None = None
    ) -> None:
        """Record the tokens sampled by the step applied last, int64 [S]; of a step with drafts,
        those that are kept, [S].
        """
        if self._drafts is not None:
            assert is_kept is not None
            kept = is_kept[self._rows.numpy()]
            token_ids = token_ids[self._rows]
            self._biases.sampled_behind(self._drafts, token_ids, kept)
            self._penalties.sampled_behind(self._drafts, token_ids, kept)
            return
        token_ids = token_ids[self._rows]
        self._biases.sampled(token_ids)
        self._penalties.sampled(token_ids)
