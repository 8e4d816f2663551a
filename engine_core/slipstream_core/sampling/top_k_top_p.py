"""Truncation by top_k, top_p and min_p: the limits of each row, and draws among the tokens kept.

The tokens of a row are cut among its NUM_CANDIDATES most likely ones (`draw_candidates`). A row
whose kept set may reach further is drawn by rejection: from the whole vocabulary, until the token
lies in the kept set (`draw_from_rows`). That is exact and sorts no row, except where top_p follows
a top_k larger than NUM_CANDIDATES: the mass that top_k leaves needs that row's top_k largest
logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from slipstream_core.sampling.noise import draw, exponential, row_keys, rows_per_chunk
from slipstream_core.sampling.top_tokens import most_likely
from slipstream_core.step.plan import TRUNCATING, StepPlan
from slipstream_core.step.staging import to_device
from slipstream_ipc.arrays import Bools, Int32s, Int64s

if TYPE_CHECKING:
    from slipstream_core.sampling.whole_vocab_sampling import WholeVocabSampler

NUM_CANDIDATES = 256


class TruncationLimits:
    """Scaled logits [S, vocab] and the truncation that each of the S rows asks for."""

    def __init__(
        self,
        scaled: torch.Tensor,
        columns: Mapping[str, torch.Tensor],
        log_total: torch.Tensor | None = None,
    ) -> None:
        """columns: `truncation_columns` on the device. log_total: [S, 1], the logarithm of the sum
        of exp(scaled), if it is known.
        """
        self.scaled = scaled
        self._columns = columns
        self.top_ks = columns["top_ks"][:, None]  # 0 is off
        # 1 is off; as a bound it would still cut the last tokens, as sums are rounded
        top_ps = columns["top_ps"]
        self.top_ps = torch.where(top_ps < 1, top_ps, torch.inf)[:, None]
        self.min_ps = columns["min_ps"][:, None]
        self.log_total = scaled.logsumexp(-1, keepdim=True) if log_total is None else log_total

    def least(self) -> torch.Tensor:
        """The scaled logits below which min_p cuts, [S, 1]."""
        return self.scaled.amax(-1, keepdim=True) + self.min_ps.log()

    def masses(self, rows: torch.Tensor, widest: int) -> torch.Tensor:
        """The bound on the mass of the tokens likelier than a kept one, [S, 1].

        It is top_p, times the mass that top_k leaves for `rows`, int64 [B], which have both. Their
        top_k is at most `widest`.
        """
        probs = self.scaled[rows].topk(widest, dim=-1).values.sub_(self.log_total[rows]).exp_()
        kept_mass = probs.cumsum(-1).gather(1, self.top_ks[rows].long() - 1)
        return self.top_ps.index_copy(0, rows, self.top_ps[rows] * kept_mass)

    def of(self, index: torch.Tensor) -> TruncationLimits:
        """The limits of some rows."""
        columns = {name: column[index] for name, column in self._columns.items()}
        return TruncationLimits(self.scaled[index], columns, self.log_total[index])


def log_total_by_slices(scaled: torch.Tensor, share: int) -> torch.Tensor:
    """The logarithm of each row's sum of exp, [S, 1], added up as ranks do that have slices.

    share: columns of a slice; the last one may have fewer.
    """
    parts = [part.contiguous().logsumexp(-1) for part in torch.split(scaled, share, 1)]
    return torch.stack(parts, 1).logsumexp(-1, keepdim=True)


def truncation_columns(plan: StepPlan, vocab_size: int) -> dict[str, npt.NDArray[Any]]:
    """The columns that say how the sampled rows are truncated, [S] each; a top_k that keeps the
    whole vocabulary is 0.
    """
    columns = {name: getattr(plan, name) for name in TRUNCATING}
    return columns | {"top_ks": effective_top_ks(plan, vocab_size)}


def effective_top_ks(plan: StepPlan, vocab_size: int) -> Int32s:
    """top_k of the sampled rows, [S]; 0 where it keeps the whole vocabulary."""
    return np.where(plan.top_ks >= vocab_size, 0, plan.top_ks)


def may_reach_further(plan: StepPlan, top_ks: Int32s, vocab_size: int) -> Bools:
    """True for rows that may keep tokens beyond the candidates, bool [S]."""
    if vocab_size <= NUM_CANDIDATES:
        return np.zeros(len(top_ks), np.bool_)
    bounded = (top_ks > 0) & (top_ks <= NUM_CANDIDATES)
    result: Bools = ~bounded & (plan.temperatures > 0)
    return result


def limited_twice(plan: StepPlan, top_ks: Int32s, vocab_size: int) -> Int64s:
    """Rows of `may_reach_further` that have both top_k and top_p, int64 [B].

    Their top_p is a share of the mass that top_k leaves.
    """
    has_both = (top_ks > 0) & (plan.top_ps < 1)
    return np.flatnonzero(has_both & may_reach_further(plan, top_ks, vocab_size))


def draw_candidates(
    limits: TruncationLimits, keys: torch.Tensor, whole: WholeVocabSampler | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the candidates; returns tokens int64 [S] and bool [S].

    The second is whether the candidates contain a row's whole kept set; it is False for rows with
    top_k, see `may_reach_further`. `keys` is int32 [2, S].
    """
    width = min(NUM_CANDIDATES, limits.scaled.shape[1])
    likeliest = most_likely if whole is None else whole.most_likely
    values, ids = likeliest(limits.scaled, width)
    return draw_among(values, ids, limits, keys)


def draw_among(
    values: torch.Tensor, ids: torch.Tensor, limits: TruncationLimits, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among given candidates, as `draw_candidates` does: scaled logits and ids [S, width],
    best first.
    """
    width = values.shape[1]
    probs = (values - limits.log_total).exp_()
    bounded = (limits.top_ks > 0) & (limits.top_ks <= width)
    ranks = torch.arange(width, device=values.device)
    probs = torch.where(bounded & (ranks >= limits.top_ks), 0, probs)
    kept_mass = torch.where(bounded, probs.sum(-1, keepdim=True), 1.0)
    before = probs.cumsum(-1) - probs  # mass of the likelier tokens
    keep = (
        (probs > 0) & (before < limits.top_ps * kept_mass) & (probs >= limits.min_ps * probs[:, :1])
    )
    keep[:, 0] = True
    noise = exponential(keys, ids.int()).log_()
    choice = (values - noise).masked_fill_(~keep, -torch.inf).argmax(-1, keepdim=True)
    last = probs[:, -1:]
    covered = (limits.top_ks == 0) & (
        (before[:, -1:] + last >= limits.top_ps) | (last < limits.min_ps * probs[:, :1])
    )
    return ids.gather(1, choice)[:, 0], covered[:, 0]


def draw_from_rows(
    limits: TruncationLimits,
    masses: torch.Tensor,  # see TruncationLimits.masses
    rows: Int64s,  # [F] among those of the limits
    seeds: Int64s,  # [F]
    positions: npt.NDArray[np.integer],  # [F]
    vocab: torch.Tensor,
) -> torch.Tensor:
    """Exact tokens of rows whose kept set may exceed the candidates, int64 [F]."""
    chunk = rows_per_chunk(limits.scaled)
    drawn = []
    for start in range(0, len(rows), chunk):
        some = slice(start, start + chunk)
        index = _to(rows[some], limits.scaled)
        drawn.append(
            _draw_by_rejection(limits.of(index), masses[index], seeds[some], positions[some], vocab)
        )
    return torch.cat(drawn)


def _draw_by_rejection(
    limits: TruncationLimits,
    masses: torch.Tensor,  # see TruncationLimits.masses
    seeds: Int64s,
    positions: npt.NDArray[np.integer],
    vocab: torch.Tensor,
) -> torch.Tensor:
    """Draw as `draw_from_rows` does, for all rows at once.

    Whether a token is kept depends on the likelier tokens only. So a rejected token shows that all
    tokens no likelier than it lie outside too, and the next round leaves them out: the draw stays
    exact, and the number of rounds grows with the logarithm of the vocabulary.
    """
    scaled = limits.scaled
    probs = (scaled - limits.log_total).exp_()
    live = scaled.masked_fill(scaled < limits.least(), -torch.inf)
    token_ids = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
    rows = np.arange(len(scaled))
    stream = 0
    while len(rows):
        index = _to(rows, scaled)
        keys = _to(row_keys(seeds[rows], positions[rows], stream), scaled)
        drawn = draw(live[index], keys, vocab)
        token_ids[index] = drawn
        threshold = scaled[index, drawn][:, None]
        likelier = scaled[index] > threshold
        mass = torch.where(likelier, probs[index], 0).sum(-1, keepdim=True)
        top_ks = limits.top_ks[index]
        kept = (mass < masses[index]) & ((top_ks == 0) | (likelier.sum(-1, keepdim=True) < top_ks))
        # the most likely token is always kept, despite rounding, so the loop ends
        kept |= ~likelier.any(-1, keepdim=True)
        live[index] = live[index].masked_fill_(scaled[index] <= threshold, -torch.inf)
        rows = rows[~kept[:, 0].cpu().numpy()]
        stream += 1
    return token_ids


def _to(column: npt.NDArray[np.generic], like: torch.Tensor) -> torch.Tensor:
    return to_device(column, like.device)
