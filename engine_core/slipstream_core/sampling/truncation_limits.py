"""Truncation of a row's logits by top_k, top_p and min_p."""

from __future__ import annotations

import torch


class TruncationLimits:
    """Scaled logits [S, vocab] and the truncation that each of the S rows asks for."""

    def __init__(
        self,
        scaled: torch.Tensor,
        top_ks: torch.Tensor,
        top_ps: torch.Tensor,
        min_ps: torch.Tensor,
        log_total: torch.Tensor | None = None,
    ) -> None:
        """log_total: [S, 1], the logarithm of the sum of exp(scaled), if it is known."""
        self.scaled = scaled
        self.top_ks = top_ks[:, None]  # 0 is off
        # 1 is off; as a bound it would still cut the last tokens, as sums are rounded
        self.top_ps = torch.where(top_ps < 1, top_ps, torch.inf)[:, None]
        self.min_ps = min_ps[:, None]
        self.log_total = scaled.logsumexp(-1, keepdim=True) if log_total is None else log_total

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
        return TruncationLimits(
            self.scaled[index],
            self.top_ks[index, 0],
            self.top_ps[index, 0],
            self.min_ps[index, 0],
            self.log_total[index],
        )


def log_total_by_slices(scaled: torch.Tensor, share: int) -> torch.Tensor:
    """The logarithm of each row's sum of exp, [S, 1], added up as ranks do that have slices.

    share: columns of a slice; the last one may have fewer.
    """
    parts = [part.contiguous().logsumexp(-1) for part in torch.split(scaled, share, 1)]
    return torch.stack(parts, 1).logsumexp(-1, keepdim=True)
