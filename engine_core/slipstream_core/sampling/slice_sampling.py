"""Samples rows whose logits lie in slices, one on each rank, without bringing the rows together.

Noise is a function of the token id, so the scores of a slice are those of the whole row, and the
best of the slices' best is the row's: 8 bytes for each row and rank. Of a step with truncation the
ranks exchange their NUM_CANDIDATES most likely tokens and the sums of their slices, and the first
rank draws. Rows whose kept set may reach further are brought together after all. What a rank tells
of a slice with NaN or infinity shows it, and so every rank knows the rows that are undefined.

- The tokens are those that `sampler.sample` draws from whole rows with the same `share`, which says
  in what order exponentials are added up. Without truncation there are none to add.
- Slices lie in the order of the ranks, so the first of equal values has the lowest id.
- All ranks make the same exchanges: what the plan does not say, the first rank's ids do.
- A first rank that cannot sample takes part in all exchanges, with some valid id, and then raises:
  the other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import pad

from slipstream_core.sampling.noise import best_scores, row_keys
from slipstream_core.sampling.sampler import are_undefined, argmax, divisors
from slipstream_core.sampling.top_k_top_p import (
    NUM_CANDIDATES,
    TruncationLimits,
    draw_among,
    draw_from_rows,
    limited_twice,
    may_reach_further,
    truncation_columns,
)
from slipstream_core.sampling.top_tokens import most_likely
from slipstream_core.sharding.collectives import (
    gather_over_ranks,
    ids_from_lead,
    share_of,
    slice_of,
)
from slipstream_core.sharding.rank import Rank
from slipstream_core.step.plan import StepFailed, StepPlan
from slipstream_core.step.staging import to_device
from slipstream_ipc.arrays import Int64s

# in place of an id: the row has to be brought together (decision 036)
_FURTHER = -1
_LARGEST = torch.finfo(torch.float32).max  # of a score that is a number


class SliceSampler:
    """One rank's part."""

    def __init__(self, vocab: torch.Tensor, rank: Rank) -> None:
        """vocab: arange(vocab) as int32. Each rank's slice has a column at least."""
        begin, end = slice_of(len(vocab), rank.index, rank.size)
        self._vocab = vocab
        self._ids = vocab[begin:end]
        self._share = share_of(len(vocab), rank.size)
        self._size = rank.size
        self._leads = rank.leads
        self._failed: Exception | None = None

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token for each of the sampled rows of a plan that is `sliced`, int64 [S].

        `logits` is float32 [S, own columns]. Returns as well which rows are undefined, bool [S].
        Raises StepFailed, on the first rank alone.
        """
        self._failed = None
        if plan.any_truncation and not plan.all_greedy:
            found = self._draw_truncated(logits, plan)
        else:
            found = self._choose(logits, plan)
        if self._failed is not None:
            raise StepFailed(plan.step, self._failed) from self._failed
        return found

    def _choose(self, logits: torch.Tensor, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        own = self._tried(
            lambda: best_of_slice(logits, plan, self._ids), logits.new_zeros(len(logits), 2)
        )
        return best_of_slices(self._of_all(own))

    def _of_all(self, own: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks, [S, ranks, N], from each rank's [S, N]."""
        rows, width = own.shape
        return gather_over_ranks(own, self._size * width).view(rows, self._size, width)

    def _draw_truncated(
        self, logits: torch.Tensor, plan: StepPlan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = min(NUM_CANDIDATES, self._share)
        own = self._tried(
            lambda: candidates_of_slice(logits, plan, self._ids, width),
            logits.new_zeros(len(logits), 2 * width + 2),
        )
        slices = self._of_all(own)
        found = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if self._leads:
            found = self._tried(lambda: draw_from_slices(slices, plan, len(self._vocab)), found)
        ids_from_lead(found)
        further = (found == _FURTHER).nonzero()[:, 0]
        if len(further):
            found[further] = self._draw_further(logits[further], slices[further], plan, further)
        return found, _undefined(slices)

    def _draw_further(
        self, logits: torch.Tensor, slices: torch.Tensor, plan: StepPlan, further: torch.Tensor
    ) -> torch.Tensor:
        whole = gather_over_ranks(logits, len(self._vocab))
        found = torch.zeros_like(further)
        if self._leads:
            rows = further.cpu().numpy()
            found = self._tried(
                lambda: draw_gathered(whole, slices, plan, rows, self._vocab), found
            )
        ids_from_lead(found)
        return found

    def _tried(self, work: Callable[[], torch.Tensor], instead: torch.Tensor) -> torch.Tensor:
        """The result of `work`; on the first rank, `instead` from where it raises on."""
        if self._failed is not None:
            return instead
        try:
            return work()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if not self._leads:
                raise
            self._failed = error
            return instead


def best_of_slice(logits: torch.Tensor, plan: StepPlan, ids: torch.Tensor) -> torch.Tensor:
    """The best score of each row of a slice, and the bits of its id: float32 [S, 2]. The score is
    NaN or infinity where a logit is.

    logits: float32 [S, N], of the `ids`, int32 [N]. The plan is without truncation, or greedy.
    """
    columns = argmax(logits)
    scores = logits.gather(1, columns[:, None])[:, 0]
    if not plan.all_greedy:
        keys = to_device(row_keys(plan.seeds, plan.kv_lens[plan.samples]), logits.device)
        scaled = logits / to_device(divisors(plan.temperatures), logits.device)[:, None]
        noisy, drawn = best_scores(scaled, keys, ids)
        is_drawn = to_device(plan.temperatures > 0, logits.device) & ~are_undefined(scores)
        columns = torch.where(is_drawn, drawn, columns)
        scores = torch.where(is_drawn, noisy.clamp(max=_LARGEST), scores)
    return torch.stack([scores, ids[columns].view(torch.float32)], 1)


def best_of_slices(slices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of all rows, int64 [S], from what each rank's `best_of_slice` gives: [S, ranks, 2].
    Returns as well which rows are undefined, bool [S].
    """
    at = argmax(slices[..., 0])[:, None]
    token_ids = _ids(slices[..., 1]).gather(1, at)[:, 0].long()
    return token_ids, are_undefined(slices[..., 0].gather(1, at)[:, 0])


def candidates_of_slice(
    logits: torch.Tensor, plan: StepPlan, ids: torch.Tensor, width: int
) -> torch.Tensor:
    """The `width` most likely tokens of each row of a slice: float32 [S, 2 * width + 2].

    logits: float32 [S, N], of the `ids`, int32 [N]. Logits over temperatures, best first, padded
    where the slice is narrower; the bits of their ids; the logarithm of the sum of exp; and the
    largest logit, or NaN.
    """
    scaled = logits / to_device(divisors(plan.temperatures), logits.device)[:, None]
    values, columns = most_likely(scaled, min(width, len(ids)))
    missing = (0, width - values.shape[1])
    its = pad(ids[columns].view(torch.float32), missing)
    total = scaled.logsumexp(-1, keepdim=True)
    largest = logits.amax(-1, keepdim=True)
    return torch.cat([pad(values, missing, value=-torch.inf), its, total, largest], 1)


def draw_from_slices(slices: torch.Tensor, plan: StepPlan, vocab_size: int) -> torch.Tensor:
    """Tokens of all rows, int64 [S]; _FURTHER where the whole row is needed.

    slices: float32 [S, ranks, 2 * width + 2], what each rank's `candidates_of_slice` gives.
    """
    device, width = slices.device, slices.shape[-1] // 2 - 1
    # padding is behind the last slice, so no equal value is behind it
    values, at = most_likely(slices[..., :width].flatten(1), min(NUM_CANDIDATES, vocab_size))
    ids = _ids(slices[..., width : 2 * width]).flatten(1).gather(1, at)
    columns = truncation_columns(plan, vocab_size)
    on_device = {name: to_device(column, device) for name, column in columns.items()}
    limits = TruncationLimits(values, on_device, _log_total(slices))
    keys = to_device(row_keys(plan.seeds, plan.kv_lens[plan.samples]), device)
    drawn, covered = draw_among(values, ids, limits, keys)
    open_ended = to_device(may_reach_further(plan, columns["top_ks"], vocab_size), device)
    drawn = torch.where(open_ended & ~covered, _FURTHER, drawn)
    is_drawn = to_device(plan.temperatures > 0, device) & ~_undefined(slices)
    return torch.where(is_drawn, drawn, ids[:, 0]).long()


def draw_gathered(
    logits: torch.Tensor, slices: torch.Tensor, plan: StepPlan, rows: Int64s, vocab: torch.Tensor
) -> torch.Tensor:
    """Tokens of those `rows` [F] of the plan, from all of their logits: int64 [F].

    logits: float32 [F, vocab]. slices: as for `draw_from_slices`, of these rows.
    """
    device = logits.device
    scaled = logits / to_device(divisors(plan.temperatures[rows]), device)[:, None]
    columns = truncation_columns(plan, len(vocab))
    top_ks = columns["top_ks"]
    on_device = {name: to_device(column[rows], device) for name, column in columns.items()}
    limits = TruncationLimits(scaled, on_device, _log_total(slices))
    masses, twice = limits.top_ps, limited_twice(plan, top_ks, len(vocab))
    both = np.flatnonzero(np.isin(rows, twice))
    if len(both):
        masses = limits.masses(to_device(both, device), int(top_ks[rows[both]].max()))
    positions = plan.kv_lens[plan.samples][rows]
    return draw_from_rows(limits, masses, np.arange(len(rows)), plan.seeds[rows], positions, vocab)


def _ids(bits: torch.Tensor) -> torch.Tensor:
    return bits.contiguous().view(torch.int32)


def _log_total(slices: torch.Tensor) -> torch.Tensor:
    """The log of the total mass over all slices, [S, 1]."""
    return slices[..., -2].logsumexp(-1, keepdim=True)


def _undefined(slices: torch.Tensor) -> torch.Tensor:
    """True for rows that have NaN or infinity in some slice, bool [S]."""
    return are_undefined(slices[..., -1]).any(-1)
