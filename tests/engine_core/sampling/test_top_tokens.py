"""The most likely tokens do not depend on what torch.topk does with equal values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.sampling import top_tokens as module
from slipstream_core.sampling.logprobs import candidates
from slipstream_core.sampling.sampler import sample
from slipstream_core.sampling.top_k_top_p import NUM_CANDIDATES
from slipstream_core.sampling.top_tokens import most_likely
from slipstream_ipc.history.wide_logprobs import Candidates

torch.set_num_threads(1)


def adversarial(patch: pytest.MonkeyPatch, seed: int) -> list[int]:
    """torch.topk on the same values in another order each time: of equal ones any may come, in any
    order. Returns a list that gets the `k` of each call.
    """
    generator = torch.Generator().manual_seed(seed)
    own = torch.Tensor.topk
    calls: list[int] = []

    def topk(values: torch.Tensor, k: int, dim: int = -1) -> torch.return_types.topk:
        assert dim == -1
        calls.append(k)
        order = torch.randperm(values.shape[-1], generator=generator)
        found = own(values[..., order], k, dim=-1)
        return torch.return_types.topk((found.values, order[found.indices]))

    patch.setattr(torch.Tensor, "topk", topk)
    return calls


@pytest.fixture(params=["looks", "a card's way"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "looks":
        monkeypatch.setattr(module, "_may_look", lambda _logits: False)


@pytest.mark.usefixtures("way")
@settings(deadline=None, max_examples=60)
@given(
    rows=st.integers(1, 4),
    vocab=st.integers(1, 60),
    num_different=st.integers(1, 6),
    num=st.integers(1, 60),
    seed=st.integers(0, 2**20),
)
def test_equal_values_come_by_id_whatever_topk_does(
    rows: int, vocab: int, num_different: int, num: int, seed: int
) -> None:
    num = min(num, vocab)
    generator = torch.Generator().manual_seed(seed)
    some = torch.tensor([1.5, -torch.inf, 0.0, -0.0, 3.25, -2.0])[:num_different]
    logits = some[torch.randint(num_different, (rows, vocab), generator=generator)]
    with pytest.MonkeyPatch.context() as patch:
        adversarial(patch, seed)
        values, ids = most_likely(logits, num)
    assert ids.dtype == torch.int64
    for row in range(rows):
        expected = np.lexsort((np.arange(vocab), -logits[row].numpy()))[:num]
        assert ids[row].tolist() == expected.tolist()
        assert values[row].tolist() == logits[row].numpy()[expected].tolist()


@pytest.mark.usefixtures("way")
def test_what_is_sampled_and_told_is_the_same_whatever_topk_does() -> None:
    """Logits as coarse as bfloat16 makes them, 4,000 of them: most have equals, and each of the
    limits cuts among equals.
    """
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 4000, generator=generator).mul(2).round().div(2)
    vocab = torch.arange(4000, dtype=torch.int32)
    rows = [
        Row(top_k=k, top_p=p, num_logprobs=5, seed=n)
        for n, (k, p) in enumerate([(3, 1), (50, 1), (256, 1), (0, 0.02), (40, 0.5), (200, 0.9)])
    ]
    told = set()
    for seed in range(8):
        with pytest.MonkeyPatch.context() as patch:
            calls = adversarial(patch, seed)
            token_ids, raw = sample(logits, plan_of(rows), vocab)
            wide = candidates(logits, token_ids, 300)
        assert {5, NUM_CANDIDATES, 300} <= set(calls)
        assert raw is not None
        assert isinstance(wide, Candidates)
        told.add((*token_ids.tolist(), *raw.ids.reshape(-1).tolist(), wide.ids.tobytes()))
    assert len(told) == 1
