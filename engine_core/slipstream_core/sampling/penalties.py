"""Presence, frequency and repetition penalties on a step's logits.

- As in vLLM: first the repetition penalty, over prompt and output (Keskar et al., 2019, CTRL),
  then frequency and presence, over the output only (as OpenAI defines them).
- Only the logits of tokens that a row has seen are touched, so the work grows with the tokens seen,
  not with the vocabulary. A row's list of seen tokens is padded with its first token, which gets
  the same value twice, or with token 0 and count 0 if the row has seen none.
- Tables grow with the number of rows that have penalties and never shrink: 4 bytes per row and
  vocabulary entry, 8 per token seen. Sizes are the maximum halved repeatedly (`grown`), so the
  table copied while growing is at most half the maximum.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.step.constraint_plan import (
    NO_TOKEN,
    ConstraintRefill,
    DraftsAhead,
    StepConstraints,
)
from slipstream_core.step.staging import to_device

_FIRST_WIDTH = 64


def most_bytes(num_state_slots: int, vocab_size: int, max_model_len: int) -> int:
    """Bytes that the tables take at most, with `num_state_slots` rows of `max_model_len` tokens.

    Includes the old half of a table that is being grown.
    """
    state_slots, width = (size + _half(size) for size in (num_state_slots, max_model_len))
    seen = max(state_slots * max_model_len, num_state_slots * width)
    return 4 * vocab_size * state_slots + 8 * seen


def grown(needed: int, most: int) -> int:
    """The smallest of `most`, `most` / 2, `most` / 4, ... that is at least `needed`.

    `needed` exceeds `most` only after a failed step, for tokens that do not matter.
    """
    size = max(needed, most)
    while size > 1 and _half(size) >= needed:
        size = _half(size)
    return size


def _half(size: int) -> int:
    return -(-size // 2)


class Penalties:
    """Penalties of one runner, for at most `num_state_slots` rows at once."""

    def __init__(
        self, vocab_size: int, device: torch.device, *, num_state_slots: int, max_model_len: int
    ) -> None:
        self._device = device
        self._most_state_slots = num_state_slots
        self._most_seen = max_model_len
        # [state slots, vocab]: how often each token was output
        self._counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        # [state slots, width]: the tokens seen, padded with the first of them or 0
        width = grown(min(_FIRST_WIDTH, max_model_len), max_model_len)
        self._seen = torch.zeros((0, width), dtype=torch.int64, device=device)
        self._num_seen = np.zeros(0, np.int64)  # [state slots], on the host

    def load(self, constraints: StepConstraints) -> None:
        """Use these penalties from now on."""
        self._host_state_slots = constraints.count_state_slots
        self._host_rows = constraints.penalty_rows
        self._rows = self._to(constraints.penalty_rows)[:, None]
        self._state_slots = self._to(constraints.count_state_slots)[:, None]
        self._repetitions = self._to(constraints.repetitions)[:, None]
        self._frequencies = self._to(constraints.frequencies)[:, None]
        self._presences = self._to(constraints.presences)[:, None]
        self._any_repetition = constraints.any_repetition

    def refill(self, refill: ConstraintRefill) -> None:
        """Fill newly assigned state slots with the tokens seen so far."""
        if not len(refill.count_state_slots):
            return
        self._make_room(int(refill.count_state_slots.max()) + 1, refill.seen.shape[1])
        state_slots = self._to(refill.count_state_slots)
        self._num_seen[refill.count_state_slots] = refill.num_seen
        seen = self._to(refill.seen)
        self._seen[state_slots] = seen[:, :1]
        self._seen[state_slots, : seen.shape[1]] = seen
        self._counts.index_fill_(0, state_slots, 0)  # assigning a scalar would make the host wait
        at = self._to(refill.output_state_slots), self._to(refill.output_ids)
        once = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(at[0]))
        self._counts.index_put_(at, once, accumulate=True)

    def apply(self, logits: torch.Tensor, drafts: DraftsAhead | None = None) -> None:
        """Change the logits of the constrained rows, float32 [C, vocab], in place."""
        if not len(self._host_state_slots):
            return
        if drafts is not None:
            ahead = drafts.token_ids[self._host_rows]  # [P, most]
            at, number = np.nonzero(ahead != NO_TOKEN)
            token_ids = ahead[at, number]
            of_row, ids = self._to(at), self._to(token_ids)
            nums = self._to((ahead[at] == token_ids[:, None]).sum(1).astype(np.int32))
            drafted = logits[self._rows[of_row, 0], ids]
        width = max(1, int(self._num_seen[self._host_state_slots].max()))
        seen = self._seen[self._state_slots[:, 0], :width]
        counts = self._counts[self._state_slots, seen]
        values = logits[self._rows, seen]
        every = self._repetitions, self._frequencies, self._presences
        logits[self._rows, seen] = self._penalised(values, counts, *every)
        if drafts is not None:  # the ids of drafts again, with these drafts
            counts = self._counts[self._state_slots[of_row, 0], ids] + nums
            own = (each[of_row, 0] for each in every)
            logits[self._rows[of_row, 0], ids] = self._penalised(drafted, counts, *own)

    def _penalised(
        self,
        values: torch.Tensor,
        counts: torch.Tensor,
        repetitions: torch.Tensor,
        frequencies: torch.Tensor,
        presences: torch.Tensor,
    ) -> torch.Tensor:
        """Logits of ids that were output `counts` times."""
        if self._any_repetition:
            r = repetitions
            values = torch.where(values > 0, values / r, values * r)
        values -= frequencies * counts
        values -= presences * (counts > 0)
        return values

    def sampled(self, token_ids: torch.Tensor) -> None:
        """Count the tokens that the constrained rows sampled, int64 [C]."""
        if not len(self._host_state_slots):
            return
        at = self._num_seen[self._host_state_slots]
        self._make_room(0, int(at.max()) + 1)
        new = token_ids[self._rows[:, 0]]
        state_slots = self._state_slots[:, 0]
        self._counts[state_slots, new] += 1
        self._seen[state_slots, self._to(at)] = new
        self._num_seen[self._host_state_slots] = at + 1

    def sampled_behind(
        self, drafts: DraftsAhead, token_ids: torch.Tensor, is_kept: npt.NDArray[np.bool_]
    ) -> None:
        """Count those of the tokens of the constrained rows, int64 [C], that are kept [C]."""
        kept = np.flatnonzero(is_kept[self._host_rows])
        if not len(kept):
            return
        state_slots = self._host_state_slots[kept]
        at = self._num_seen[state_slots] + drafts.lens[self._host_rows[kept]]
        self._make_room(0, int(at.max()) + 1)
        new, on_device = token_ids[self._to(self._host_rows[kept])], self._to(state_slots)
        once = torch.ones(1, dtype=torch.int32, device=self._device).expand(len(kept))
        self._counts.index_put_((on_device, new), once, accumulate=True)
        self._seen[on_device, self._to(at)] = new
        np.add.at(self._num_seen, state_slots, 1)

    def _make_room(self, num_state_slots: int, width: int) -> None:
        # checked separately: if growing one table runs out of memory, a later call grows the rest
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
