"""A head leaves its logits in slices, unless what is behind it needs whole rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from slipstream_core.forward import projection
from slipstream_core.model import sliced_head
from slipstream_core.model.local_modules import as_local_modules
from slipstream_core.model.sliced_head import slice_head
from slipstream_core.sharding.collectives import slice_of
from slipstream_core.sharding.rank import Rank
from slipstream_core.sharding.sharding_plan import ShardingPlan

VOCAB = 7
WHOLE = torch.randn(VOCAB, 4, generator=torch.Generator().manual_seed(1))
Behind = Callable[[torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """Embeddings and a head of which this rank has a slice; `behind` is what follows."""

    device = torch.device("cpu")

    def __init__(self, rank: Rank, behind: Behind) -> None:
        super().__init__()
        begin, end = slice_of(VOCAB, rank.index, rank.size)
        self.embedding = nn.Embedding(VOCAB, 4)
        self.head = nn.Linear(4, VOCAB, bias=False)  # which keeps the number of its columns
        self.head.weight = nn.Parameter(WHOLE[begin:end], requires_grad=False)
        self.behind = behind

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
        self.hidden = self.embedding(input_ids)
        return SimpleNamespace(logits=self.behind(self.head(self.hidden)))


def model_of(
    rank: Rank, behind: Behind, monkeypatch: pytest.MonkeyPatch, style: str = "colwise_rep"
) -> Model:
    torch.manual_seed(2)
    model = Model(rank, behind)
    as_local_modules(model, ShardingPlan({"head": style}), rank)
    monkeypatch.setattr(
        projection, "gather_over_ranks", lambda _, width: (model.hidden @ WHOLE.T)[..., :width]
    )
    monkeypatch.setattr(sliced_head, "least_over_ranks", lambda number, _: number)
    return model


def soft_capped(logits: torch.Tensor) -> torch.Tensor:
    return (logits / 3).tanh() * 3


@pytest.mark.parametrize("index", [0, 1])
def test_what_goes_by_element_is_done_in_slices(
    index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank(index, 2)
    model = model_of(rank, soft_capped, monkeypatch)
    assert slice_head(model, VOCAB, rank)
    begin, end = slice_of(VOCAB, index, 2)
    logits = model(torch.tensor([[3, 5]])).logits
    expected = soft_capped(model.hidden @ WHOLE.T)[..., begin:end]
    torch.testing.assert_close(logits, expected)


def biased(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.arange(VOCAB)


@pytest.mark.parametrize("behind", [lambda logits: logits.log_softmax(-1), biased])
def test_what_needs_whole_rows_goes_on_gathering(
    behind: Behind, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(Rank(0, 2), behind, monkeypatch)
    assert not slice_head(model, VOCAB, Rank(0, 2))
    logits = model(torch.tensor([[3, 5]])).logits
    torch.testing.assert_close(logits, behind(model.hidden @ WHOLE.T))


def test_ranks_that_disagree_go_on_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(Rank(0, 2), soft_capped, monkeypatch)
    monkeypatch.setattr(sliced_head, "least_over_ranks", lambda *_: 0)
    assert not slice_head(model, VOCAB, Rank(0, 2))
    logits = model(torch.tensor([[3, 5]])).logits
    torch.testing.assert_close(logits, soft_capped(model.hidden @ WHOLE.T))


def test_a_head_that_is_whole_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(Rank(0, 1), soft_capped, monkeypatch, "replicate")
    assert not slice_head(model, VOCAB, Rank(0, 1))


def test_no_rank_is_left_without_a_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Five ranks take two columns each, so the last one would have none."""
    model = model_of(Rank(0, 5), soft_capped, monkeypatch)
    assert not slice_head(model, VOCAB, Rank(0, 5))
