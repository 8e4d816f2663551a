"""What top_k, top_p and min_p leave of a row of logits."""

from __future__ import annotations

import torch


class TruncationLimits:
    """Scaled logits [S, vocab] and the truncation that each of the S rows asks for."""

    def __init__(
        self, scaled: torch.Tensor, top_ks: torch.Tensor, top_ps: torch.Tensor, min_ps: torch.Tensor
    ) -> None:
        self.scaled = scaled
        self.top_ks = top_ks[:, None]  # 0 is off
        # 1 is off; as a bound on a rounded sum it would still cut the last tokens
        self.top_ps = torch.where(top_ps < 1, top_ps, torch.inf)[:, None]
        self.min_ps = min_ps[:, None]
        self.log_total = scaled.logsumexp(-1, keepdim=True)

    def masses(self, rows: torch.Tensor, widest: int) -> torch.Tensor:
        """What is likelier than a kept token has less of, [S, 1], where `rows`, int64 [B], are
        limited twice, with a top_k of at most `widest`; of other rows it is top_ps.
        """
        probs = self.scaled[rows].topk(widest, dim=-1).values.sub_(self.log_total[rows]).exp_()
        kept_mass = probs.cumsum(-1).gather(1, self.top_ks[rows].long() - 1)
        return self.top_ps.index_copy(0, rows, self.top_ps[rows] * kept_mass)

    def of(self, index: torch.Tensor) -> TruncationLimits:
        """The same of some rows."""
        return TruncationLimits(
            self.scaled[index],
            self.top_ks[index, 0],
            self.top_ps[index, 0],
            self.min_ps[index, 0],
        )
