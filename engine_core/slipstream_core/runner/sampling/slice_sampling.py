"""Samples rows whose logits lie in slices, one on each rank, without bringing the rows together.

Noise is a function of the token id, so the scores of a slice are those of the whole row, and the
best of the slices' best is the row's: 8 bytes for each row and rank. Of a step with truncation the
ranks exchange their NUM_CANDIDATES most likely tokens and the sums of their slices, and the first
rank draws. Rows whose kept set may reach further are brought together after all.

- The tokens are those that `sampler.sample` draws from whole rows with the same `share`.
- All ranks make the same exchanges: what the plan does not say, the first rank's ids do.
- A first rank that cannot sample takes part in all exchanges, with some valid id, and then raises:
  the other ranks would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from msgspec.structs import replace
from torch.nn.functional import pad

from slipstream_core.runner.sampling.noise import row_keys
from slipstream_core.runner.sampling.sampler import (
    NUM_CANDIDATES,
    argmax,
    best_scores,
    divisors,
    draw_among,
    effective_top_ks,
    may_reach_further,
    sample,
)
from slipstream_core.runner.sampling.top_tokens import (
    LOWEST_KEY,
    most_likely,
    ordering_keys,
    values_and_ids,
)
from slipstream_core.runner.sampling.truncation_limits import TruncationLimits
from slipstream_core.runner.sharding.collectives import (
    gather_over_ranks,
    ids_from_lead,
    longs_of_ranks,
    share_of,
    slice_of,
)
from slipstream_core.runner.sharding.rank import Rank
from slipstream_core.runner.staging import to_device
from slipstream_core.step.plan import Int64s, StepFailed, StepPlan

_FURTHER = -1  # in place of an id: the row has to be brought together


class SliceSampler:
    """One rank's part."""

    def __init__(self, vocab: torch.Tensor, rank: Rank) -> None:
        """vocab: arange(vocab) as int32. Each rank's slice has a column at least."""
        begin, end = slice_of(len(vocab), rank.index, rank.size)
        self._vocab = vocab
        self._ids = vocab[begin:end]
        self._share = share_of(len(vocab), rank.size)
        self._leads = rank.leads
        self._failed: Exception | None = None

    def sample(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        """Sample one token for each of the sampled rows of a plan that is `sliced`, int64 [S].

        `logits` is float32 [S, own columns]. Raises StepFailed, on the first rank alone.
        """
        self._failed = None
        if plan.any_truncation and not plan.all_greedy:
            token_ids = self._draw_truncated(logits, plan)
        else:
            token_ids = self._choose(logits, plan)
        if self._failed is not None:
            raise StepFailed(plan.step, self._failed) from self._failed
        return token_ids

    def _choose(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        own = self._tried(lambda: best_of_slice(logits, plan, self._ids), self._some_keys(logits))
        return values_and_ids(longs_of_ranks(own[:, None]).amax(-1))[1]

    def _draw_truncated(self, logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        width = 1 + min(NUM_CANDIDATES, self._share)
        own = self._tried(
            lambda: candidates_of_slice(logits, plan, self._ids, width - 1),
            self._some_keys(logits)[:, None].expand(-1, width),
        )
        slices = longs_of_ranks(own).view(len(own), -1, width)
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if self._leads:
            token_ids = self._tried(
                lambda: draw_from_slices(slices, plan, len(self._vocab)), token_ids
            )
        ids_from_lead(token_ids)
        further = (token_ids == _FURTHER).nonzero()[:, 0]
        if len(further):
            token_ids[further] = self._draw_further(logits, plan, further)
        return token_ids

    def _draw_further(
        self, logits: torch.Tensor, plan: StepPlan, further: torch.Tensor
    ) -> torch.Tensor:
        whole = gather_over_ranks(logits[further], len(self._vocab))
        token_ids = torch.zeros_like(further)
        if self._leads:
            some = _of_rows(plan, further.cpu().numpy())
            token_ids = self._tried(
                lambda: sample(whole, some, self._vocab, share=self._share)[0], token_ids
            )
        ids_from_lead(token_ids)
        return token_ids

    def _tried(self, work: Callable[[], torch.Tensor], instead: torch.Tensor) -> torch.Tensor:
        """The result of `work`; on the first rank, `instead` where it raises."""
        try:
            return work()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            if not self._leads:
                raise
            self._failed = self._failed or error
            return instead

    def _some_keys(self, logits: torch.Tensor) -> torch.Tensor:
        """Keys of valid ids, int64 [S]."""
        return ordering_keys(logits.new_zeros(len(logits)), self._ids[:1].long())


def best_of_slice(logits: torch.Tensor, plan: StepPlan, ids: torch.Tensor) -> torch.Tensor:
    """The best score of each row of a slice, and its id: int64 [S], `ordering_keys`.

    logits: float32 [S, N], of the `ids`, int32 [N]. The plan is without truncation, or greedy.
    """
    if plan.all_greedy:
        columns = argmax(logits)
        values = logits.gather(1, columns[:, None])[:, 0]
        return ordering_keys(values, ids[columns].long())
    keys = to_device(row_keys(plan.seeds, plan.kv_lens[plan.samples]), logits.device)
    scaled = logits / to_device(divisors(plan.temperatures), logits.device)[:, None]
    values, columns = best_scores(scaled, keys, ids)
    greedy = np.flatnonzero(plan.temperatures == 0)
    if len(greedy):
        rows = to_device(greedy, logits.device)
        those = argmax(logits[rows])
        columns[rows] = those
        values[rows] = logits[rows, those]
    return ordering_keys(values, ids[columns].long())


def candidates_of_slice(
    logits: torch.Tensor, plan: StepPlan, ids: torch.Tensor, width: int
) -> torch.Tensor:
    """The `width` most likely tokens of each row of a slice: int64 [S, width + 1].

    logits: float32 [S, N], of the `ids`, int32 [N]. `ordering_keys` of logits over temperatures,
    best first, with the lowest key where the slice is narrower; and then the bits of the logarithm
    of the sum of exp.
    """
    scaled = logits / to_device(divisors(plan.temperatures), logits.device)[:, None]
    values, columns = most_likely(scaled, min(width, len(ids)))
    keys = ordering_keys(values, ids[columns].long())
    keys = pad(keys, (0, width - keys.shape[1]), value=LOWEST_KEY)
    totals = scaled.logsumexp(-1).view(torch.int32).long()
    return torch.cat([keys, totals[:, None]], 1)


def draw_from_slices(slices: torch.Tensor, plan: StepPlan, vocab_size: int) -> torch.Tensor:
    """Tokens of all rows, int64 [S]; _FURTHER where the whole row is needed.

    slices: int64 [S, ranks, width + 1], what each rank's `candidates_of_slice` gives.
    """
    device = slices.device
    width = min(NUM_CANDIDATES, vocab_size)
    best = slices[..., :-1].flatten(1).topk(width, dim=-1).values
    values, ids = values_and_ids(best)
    log_total = slices[..., -1].int().view(torch.float32).logsumexp(-1, keepdim=True)
    top_ks = effective_top_ks(plan, vocab_size)
    limits = TruncationLimits(
        values,
        to_device(top_ks, device),
        to_device(plan.top_ps, device),
        to_device(plan.min_ps, device),
        log_total,
    )
    keys = to_device(row_keys(plan.seeds, plan.kv_lens[plan.samples]), device)
    drawn, covered = draw_among(values, ids, limits, keys)
    open_ended = to_device(may_reach_further(plan, top_ks, vocab_size), device)
    drawn = torch.where(open_ended & ~covered, _FURTHER, drawn)
    return torch.where(to_device(plan.temperatures > 0, device), drawn, ids[:, 0])


def _of_rows(plan: StepPlan, rows: Int64s) -> StepPlan:
    """The plan with these of its sampled rows alone, for `sample`."""
    samples = np.zeros_like(plan.samples)
    samples[np.flatnonzero(plan.samples)[rows]] = True
    columns = ("temperatures", "top_ks", "top_ps", "min_ps", "seeds", "num_logprobs")
    some = {name: getattr(plan, name)[rows] for name in columns}
    return replace(plan, samples=samples, **some)
