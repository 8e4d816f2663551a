"""Draws from whole rows by the kernel: those of torch's operators, round for round."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.runner.sampling import sampler
from slipstream_core.runner.sampling.noise import row_keys
from slipstream_core.runner.sampling.sampler import NUM_CANDIDATES, draw, sample
from slipstream_core.runner.sampling.truncation_limits import TruncationLimits
from slipstream_core.runner.sampling.whole_vocab_sampling import (
    WholeVocabSampler,
    whole_vocab_sampler,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCAB = 700  # more than there are candidates, and no multiple of anything


@pytest.fixture(scope="module")
def whole() -> WholeVocabSampler:
    found = whole_vocab_sampler(VOCAB, DEVICE, model="it")
    assert found is not None
    return found


def logits_of(rows: int, scale: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, VOCAB, generator=generator) * scale).to(DEVICE)


def test_draws_from_whole_rows(whole: WholeVocabSampler) -> None:
    rows = 24
    scaled = logits_of(rows, 2.0, 1)
    keys = row_keys(np.arange(rows) - 5, np.arange(rows) * 1000)
    keys = torch.from_numpy(keys).to(DEVICE)
    vocab = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    expected = draw(scaled, keys, vocab)
    wanted = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    assert whole.all(scaled, keys, wanted).tolist() == expected.tolist()
    wanted[::2] = 0
    assert whole.all(scaled, keys, wanted)[1::2].tolist() == expected[1::2].tolist()


ROWS = [
    Row(temperature=1.5, top_p=0.9),
    Row(temperature=1.5, top_p=0.3),
    Row(temperature=1.5, top_p=0.999),
    Row(temperature=1.0, min_p=0.05),
    Row(temperature=2.0, min_p=0.5, top_p=0.7),
    Row(temperature=1.0),
    Row(temperature=0.0),
    Row(temperature=1.0, top_k=20),
    Row(temperature=3.0, top_k=300),
    Row(temperature=3.0, top_k=NUM_CANDIDATES + 40, top_p=0.6),
    Row(temperature=3.0, top_k=VOCAB, top_p=0.8),
]


@pytest.mark.parametrize("scale", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("spread", [False, True], ids=["candidates", "far beyond them"])
def test_truncated_rows_get_the_tokens_of_torchs_operators(
    whole: WholeVocabSampler, scale: float, spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With few candidates most rows reach further, and some take several rounds."""
    if spread:
        monkeypatch.setattr(sampler, "NUM_CANDIDATES", 4)
    rows = [
        row._replace(seed=100 * n + turn, position=turn + 1)
        for n, row in enumerate(ROWS)
        for turn in range(4)
    ]
    logits = logits_of(len(rows), scale, 7)
    if scale == 0.0:
        logits += torch.arange(VOCAB, device=DEVICE) * 1e-3  # all but flat, without ties
    vocab = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    plan = plan_of(rows)
    expected, _ = sample(logits, plan, vocab)
    given, _ = sample(logits, plan, vocab, whole=whole)
    assert given.tolist() == expected.tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf")])
def test_whatever_the_logits_are_it_ends(whole: WholeVocabSampler, bad: float) -> None:
    logits = logits_of(3, 1.0, 3)
    logits[0] = bad
    logits[1, ::2] = bad
    rows = [Row(temperature=1.0, top_p=0.95, seed=n) for n in range(3)]
    vocab = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    token_ids, _ = sample(logits, plan_of(rows), vocab, whole=whole)
    assert all(0 <= token < VOCAB for token in token_ids.tolist())
    alone, _ = sample(logits[2:], plan_of(rows[2:]), vocab, whole=whole)
    assert token_ids[2] == alone[0]  # its neighbours' logits are theirs


def test_rows_that_are_not_wanted_keep_their_tokens(whole: WholeVocabSampler) -> None:
    scaled = logits_of(3, 1.0, 5)
    zeros = torch.zeros(3, device=DEVICE)
    limits = TruncationLimits(scaled, zeros.int(), zeros + 0.5, zeros)
    keys = torch.from_numpy(row_keys(np.arange(3), np.arange(3))).to(DEVICE)
    token_ids = torch.full((3,), -7, device=DEVICE)
    wanted = torch.tensor([False, True, False], device=DEVICE)
    whole.further(limits, keys, wanted, token_ids, limits.top_ps)
    assert [int(it) == -7 for it in token_ids] == [True, False, True]
