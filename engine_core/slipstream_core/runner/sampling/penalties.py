"""Presence, frequency and repetition penalties on a step's logits.

Owns: what they mean, and which tokens a row has seen how often. Knows no requests: a plan's
`StepConstraints` say which row has what.

Rules:
- As in vLLM: first the repetition penalty, over prompt and outputs (Keskar et al., 2019, CTRL),
  then frequency and presence, over outputs alone (as OpenAI defines them).
- Only the logits of tokens that a row has seen are touched: the work grows with what it has seen,
  not with the vocabulary. A token that is listed twice gets the same value twice; so a list is
  filled up with its first token, or with 0 while a row has seen none, whose count is then 0.
- Memory grows with the rows that have penalties at once, and is kept: 4 bytes a token of the
  vocabulary and row, and 8 for each token that one of them has seen. It grows by way of halves of
  the most there can be (`grown`), so that the table that is copied is never more than half of it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.runner.staging import to_device
from slipstream_core.step.constraint_plan import ConstraintRefill, StepConstraints

_FIRST_WIDTH = 64


def most_bytes(num_state_slots: int, vocab_size: int, max_model_len: int) -> int:
    """What the tables take when `num_state_slots` rows have penalties and have seen all they can.

    While a table grows the old half is there too.
    """
    state_slots, width = (size + _half(size) for size in (num_state_slots, max_model_len))
    seen = max(state_slots * max_model_len, num_state_slots * width)
    return 4 * vocab_size * state_slots + 8 * seen


def grown(needed: int, most: int) -> int:
    """The size of a table that holds `needed`: `most`, halved as often as that allows.

    More than `most` is needed only of what counts for nothing, behind a step that failed.
    """
    size = max(needed, most)
    while size > 1 and _half(size) >= needed:
        size = _half(size)
    return size


def _half(size: int) -> int:
    return -(-size // 2)


class Penalties:
    """Of one runner, at most `num_state_slots` of whose rows have penalties at once."""

    def __init__(
        self, vocab_size: int, device: torch.device, *, num_state_slots: int, max_model_len: int
    ) -> None:
        self._device = device
        self._most_state_slots = num_state_slots
        self._most_seen = max_model_len
        # by state slot and token: how often it was output
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # by state slot: the tokens that its penalties are about; behind them one of these, or 0
        width = grown(min(_FIRST_WIDTH, max_model_len), max_model_len)
        self._seen = torch.zeros((0, width), dtype=torch.int64, device=device)
        self._num_seen = np.zeros(0, np.int64)  # by state slot, on the host

    def load(self, rules: StepConstraints) -> None:
        """These rules are meant from now on."""
        self._host_state_slots = rules.count_state_slots
        self._places = self._to(rules.penalty_places)[:, None]
        self._state_slots = self._to(rules.count_state_slots)[:, None]
        self._repetitions = self._to(rules.repetitions)[:, None]
        self._frequencies = self._to(rules.frequencies)[:, None]
        self._presences = self._to(rules.presences)[:, None]
        self._any_repetition = rules.any_repetition

    def refill(self, refill: ConstraintRefill) -> None:
        """Rows got state slots; these are their tokens."""
        if not len(refill.count_state_slots):
            return
        self._make_room(int(refill.count_state_slots.max()) + 1, refill.seen.shape[1])
        state_slots = self._to(refill.count_state_slots)
        self._num_seen[refill.count_state_slots] = refill.num_seen
        seen = self._to(refill.seen)
        self._seen[state_slots] = seen[:, :1]
        self._seen[state_slots, : seen.shape[1]] = seen
        self._counts.index_fill_(0, state_slots, 0)  # assigning a number would make the host wait
        at = self._to(refill.output_state_slots), self._to(refill.output_ids)
        once = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(at[0]))
        self._counts.index_put_(at, once, accumulate=True)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the logits of the rows with rules, float32 [C, vocab], in place."""
        if not len(self._host_state_slots):
            return
        width = max(1, int(self._num_seen[self._host_state_slots].max()))
        seen = self._seen[self._state_slots[:, 0], :width]
        counts = self._counts[self._state_slots, seen]
        values = logits[self._places, seen]
        if self._any_repetition:
            r = self._repetitions
            values = torch.where(values > 0, values / r, values * r)
        values -= self._frequencies * counts
        values -= self._presences * (counts > 0)
        logits[self._places, seen] = values

    def sampled(self, token_ids: torch.Tensor) -> None:
        """The rows with rules sampled these, int64 [C]."""
        if not len(self._host_state_slots):
            return
        at = self._num_seen[self._host_state_slots]
        self._make_room(0, int(at.max()) + 1)
        new = token_ids[self._places[:, 0]]
        state_slots = self._state_slots[:, 0]
        self._counts[state_slots, new] += 1
        self._seen[state_slots, self._to(at)] = new
        self._num_seen[self._host_state_slots] = at + 1

    def _make_room(self, num_state_slots: int, width: int) -> None:
        # each by itself: where there is no memory for one, the others stay as they are
        if num_state_slots > len(self._counts):
            self._counts = _padded(self._counts, grown(num_state_slots, self._most_state_slots))
        if num_state_slots > len(self._seen):
            self._seen = _padded(self._seen, grown(num_state_slots, self._most_state_slots))
        if num_state_slots > len(self._num_seen):
            more = grown(num_state_slots, self._most_state_slots) - len(self._num_seen)
            self._num_seen = np.pad(self._num_seen, (0, more))
        if width > self._seen.shape[1]:
            more = grown(width, self._most_seen) - self._seen.shape[1]
            self._seen = torch.cat([self._seen, self._seen[:, :1].expand(-1, more)], 1)

    def _to(self, column: npt.NDArray[np.generic]) -> torch.Tensor:
        return to_device(column, self._device)


def _padded(table: torch.Tensor, num_state_slots: int) -> torch.Tensor:
    padded = table.new_zeros((num_state_slots, table.shape[1]))
    padded[: len(table)] = table
    return padded
