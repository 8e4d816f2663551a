"""Plans of sampled rows, and the distributions that samples have to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from slipstream_core.step.plan import ListedLogprobs, StepPlan, blank_plan


class Row(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 1
    num_logprobs: int = -1
    masked: tuple[int, ...] = ()
    listed: tuple[int, ...] = ()

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def plan_of(rows: Sequence[Row]) -> StepPlan:
    count = len(rows)
    positions = np.array([row.position for row in rows], np.int32)
    masked = [(i, token) for i, row in enumerate(rows) for token in row.masked]
    listing = [i for i, row in enumerate(rows) if row.listed]
    listed = None
    if listing:
        ids = np.zeros((len(listing), max(len(rows[i].listed) for i in listing)), np.int64)
        for at, i in enumerate(listing):
            ids[at, : len(rows[i].listed)] = rows[i].listed
        others = [row.num_logprobs for row in rows if not row.listed]
        listed = ListedLogprobs(
            rows=np.array(listing), ids=ids, max_unlisted=max(others, default=-1)
        )
    return blank_plan(
        positions=positions.astype(np.int64) - 1,
        kv_slots=np.arange(count),
        slots=np.arange(count),
        kv_lens=positions,
        table_slots=np.arange(count),
        table_numbers=np.zeros(count, np.int64),
        table_blocks=np.ones(count, np.int32),
        temperatures=np.array([row.temperature for row in rows], np.float32),
        top_ks=np.array([row.top_k for row in rows], np.int32),
        top_ps=np.array([row.top_p for row in rows], np.float32),
        min_ps=np.array([row.min_p for row in rows], np.float32),
        seeds=np.array([row.seed for row in rows], np.int64),
        num_logprobs=np.array([row.num_logprobs for row in rows], np.int32),
        masked_rows=np.array([i for i, _ in masked], np.int64),
        masked_ids=np.array([token for _, token in masked], np.int64),
        any_wide=False,
        max_logprobs=max(row.num_logprobs for row in rows),
        listed=listed,
    )


def distribution(logits: torch.Tensor, row: Row) -> torch.Tensor:
    """The distribution of a row's samples, float64 [vocab], by sorting the whole vocabulary."""
    logits = logits.double()
    logits[list(row.masked)] = -torch.inf
    probs, order = (logits / row.temperature).softmax(-1).sort(descending=True, stable=True)
    if row.top_k:
        probs[row.top_k :] = 0
    probs = probs / probs.sum()
    kept = (probs.cumsum(-1) - probs < row.top_p) & (probs >= row.min_p * probs[0])
    probs = torch.where(kept, probs, 0)
    return torch.zeros_like(probs).scatter(0, order, probs / probs.sum())


def assert_follows(counts: torch.Tensor, probs: torch.Tensor) -> None:
    """Assert that no sample is outside the support, and that chi-square is within 4.5 standard
    deviations of its mean.
    """
    assert int(counts[probs == 0].sum()) == 0
    expected = probs * counts.sum()
    rare = expected < 5  # pooled: chi-square needs about 5 expected counts per bin
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi_square = float(((observed - expected) ** 2 / expected).sum())
    assert chi_square < freedom + 4.5 * (2 * freedom) ** 0.5 + 4.5, (chi_square, freedom)
