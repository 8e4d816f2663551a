"""Draws from whole rows by the kernel: those of torch's operators, round for round."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from msgspec.structs import replace
from tests.helpers.sampling_plans import Row, plan_of

from slipstream_core.sampling import top_k_top_p
from slipstream_core.sampling.noise import draw, row_keys
from slipstream_core.sampling.sampler import sample
from slipstream_core.sampling.token_bitmask import masked_rows, masks_of
from slipstream_core.sampling.top_k_top_p import NUM_CANDIDATES, TruncationLimits
from slipstream_core.sampling.top_tokens import most_likely
from slipstream_core.sampling.whole_vocab_sampling import (
    Chosen,
    Draws,
    RowEdits,
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


DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def keys_of(rows: int) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.arange(rows) - 5, np.arange(rows) * 1000)).to(DEVICE)


@DTYPES
def test_draws_from_whole_rows(whole: WholeVocabSampler, dtype: torch.dtype) -> None:
    """Rows that are not drawn get their most likely token, of equals the first."""
    rows = 24
    logits = logits_of(rows, 2.0, 1).to(dtype)
    divisors = torch.linspace(0.3, 2.0, rows, device=DEVICE)
    vocab = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    expected = draw(logits.float() / divisors[:, None], keys_of(rows), vocab)
    drawn = torch.ones(rows, dtype=torch.int32, device=DEVICE)
    drawn[::2] = 0
    expected[::2] = logits.float()[::2].argmax(-1)
    chosen = whole.choose(logits, draws=Draws(divisors, drawn, keys_of(rows)))
    assert chosen.token_ids.tolist() == expected.tolist()
    assert chosen.own is chosen.totals is None


@DTYPES
def test_one_pass_tells_what_log_probabilities_need(
    whole: WholeVocabSampler, dtype: torch.dtype
) -> None:
    logits = logits_of(9, 3.0, 4).to(dtype)
    logits[1] = -torch.inf
    logits[1, 17] = 2.5
    logits[2, 600:] = -torch.inf
    logits[3] = 7.0  # all equal
    chosen = whole.choose(logits, totals=True)
    assert chosen.own is not None
    assert chosen.totals is not None
    ids = logits.float().argmax(-1)
    assert chosen.token_ids.tolist() == ids.tolist()
    assert chosen.own.tolist() == logits.float().gather(1, ids[:, None])[:, 0].tolist()
    torch.testing.assert_close(chosen.totals, logits.double().logsumexp(-1).float())


@DTYPES
def test_edits_are_applied_while_reading(whole: WholeVocabSampler, dtype: torch.dtype) -> None:
    """Other logits for row 1 and 3, a mask for 2 and 3; log-probabilities are of the model's."""
    rows = 5
    logits = logits_of(rows, 2.0, 2).to(dtype)
    edited = logits_of(2, 2.0, 3)
    allowed = torch.rand(2, VOCAB, generator=torch.Generator().manual_seed(5)) < 0.1
    padded = torch.zeros(2, -(-VOCAB // 32) * 32, dtype=torch.bool)
    padded[:, :VOCAB] = allowed
    bits = np.packbits(padded.numpy(), axis=1, bitorder="little").view(np.int32)
    edits = RowEdits(
        edited,
        torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32, device=DEVICE),
        torch.from_numpy(bits).to(DEVICE),
        torch.tensor([-1, -1, 0, 1, -1], dtype=torch.int32, device=DEVICE),
    )
    values = logits.float()
    values[1], values[3] = edited[1], edited[0]
    values[2:4] = values[2:4].masked_fill(~allowed.to(DEVICE), -torch.inf)
    chosen = whole.choose(logits, edits=edits, totals=True)
    assert chosen.token_ids.tolist() == values.argmax(-1).tolist()
    assert chosen.totals is not None
    torch.testing.assert_close(chosen.totals, logits.float().logsumexp(-1))
    divisors = torch.linspace(0.5, 2.0, rows, device=DEVICE)
    vocab = torch.arange(VOCAB, dtype=torch.int32, device=DEVICE)
    draws = Draws(divisors, torch.ones(rows, dtype=torch.int32, device=DEVICE), keys_of(rows))
    expected = draw(values / divisors[:, None], keys_of(rows), vocab)
    drawn = whole.choose(logits, draws=draws, edits=edits)
    assert drawn.token_ids.tolist() == expected.tolist()
    scaled = whole.scaled(logits, divisors, edits)
    assert torch.equal(scaled, values / divisors[:, None])


def rows_of_many_kinds() -> torch.Tensor:
    """bfloat16: zeros of both signs, infinities, nothing but equals, peaks in one slice, NaNs."""
    logits = logits_of(8, 1.0, 6).bfloat16()
    logits[0, ::3] = 0.0
    logits[0, 1::3] = -0.0
    logits[1, 100:] = -torch.inf
    logits[2] = -3.0
    logits[3] = -torch.inf
    logits[4, 130:170] = 9.0
    logits[5, 600:] = torch.inf
    logits[6, :] = -0.0
    logits[6, 650] = 0.0
    return logits


@pytest.mark.parametrize("width", [130, VOCAB])
@pytest.mark.parametrize("num", [1, 5, 20])
def test_the_largest_of_slices_are_those_of_the_row(
    whole: WholeVocabSampler, width: int, num: int
) -> None:
    """By value, then by id, with the rank of another token."""
    logits = rows_of_many_kinds()[:, :width].contiguous()
    expected_values, expected_ids = most_likely(logits.float(), num)
    values, ids = whole.largest(logits, num)
    assert ids.tolist() == expected_ids.tolist()
    assert values.tolist() == expected_values.tolist()
    token_ids = torch.arange(len(logits), device=DEVICE) * 17 % width
    own = logits.float().gather(1, token_ids[:, None])[:, 0]
    totals = torch.linspace(-1, 1, len(logits), device=DEVICE)
    chosen = Chosen(token_ids, own, totals)
    values, ids, ranks = whole.logprob_columns(logits, chosen, num)
    assert ids.tolist() == torch.cat([token_ids[:, None], expected_ids], 1).tolist()
    expected = torch.cat([own[:, None], expected_values], 1) - totals[:, None]
    assert values.tolist() == expected.tolist()
    assert ranks.tolist() == ((logits.float() > own[:, None]).sum(-1) + 1).tolist()


@pytest.mark.parametrize("num_allowed", [0, 3, 19, 20, 200])
def test_the_largest_of_rows_of_which_a_mask_leaves_few(
    whole: WholeVocabSampler, num_allowed: int
) -> None:
    """What is not allowed is equal, and comes by id."""
    logits = torch.full((3, VOCAB), -torch.inf, device=DEVICE)
    generator = torch.Generator().manual_seed(8)
    for row in logits:
        ids = torch.randperm(VOCAB, generator=generator)[:num_allowed].to(DEVICE)
        row[ids] = torch.randn(num_allowed, generator=generator).to(DEVICE)
    values, ids = whole.largest(logits, 20)
    expected_values, expected_ids = most_likely(logits, 20)
    assert values.tolist() == expected_values.tolist()
    assert ids.tolist() == expected_ids.tolist()


def test_nothing_is_out_of_range_where_a_logit_is_no_number(whole: WholeVocabSampler) -> None:
    logits = logits_of(3, 1.0, 6)
    logits[0] = torch.nan
    logits[1, ::2] = -torch.nan
    _, ids = whole.largest(logits, 20)
    assert ((ids >= 0) & (ids < VOCAB)).all()
    assert ids[2].tolist() == logits[2].topk(20).indices.tolist()


@DTYPES
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf], ids=str)
def test_rows_whose_logits_are_not_numbers_are_told_and_harm_no_others(
    whole: WholeVocabSampler, wrong: float, dtype: torch.dtype
) -> None:
    """The first such logit is the row's token, unless no request may have it."""
    rows = 6
    logits = logits_of(rows, 2.0, 5).to(dtype)
    divisors = torch.linspace(0.3, 2.0, rows, device=DEVICE)
    drawn = torch.tensor([0, 1] * 3, dtype=torch.int32, device=DEVICE)
    for draws in (None, Draws(divisors, drawn, keys_of(rows))):
        sound = whole.choose(logits, draws=draws).token_ids.tolist()
        broken = logits.clone()
        broken[0, 699] = broken[1, 130:200] = broken[5, 0] = broken[5, 400] = wrong
        broken[4, 17] = wrong  # which is masked
        words = torch.full((1, -(-VOCAB // 32)), -1, dtype=torch.int32, device=DEVICE)
        words[0, 0] &= ~(1 << 17)
        none = torch.full((rows,), -1, dtype=torch.int32, device=DEVICE)
        mask_rows = none.clone()
        mask_rows[4] = 0
        edits = RowEdits(logits.float(), none, words, mask_rows)
        undefined = torch.full((rows,), 7, dtype=torch.int32, device=DEVICE)
        chosen = whole.choose(broken, draws=draws, edits=edits, totals=True, undefined=undefined)
        assert undefined.tolist() == [1, 1, 0, 0, 0, 1]
        found = chosen.token_ids.tolist()
        assert [found[0], found[1], found[5]] == [699, 130, 0]
        assert found[2:5] == sound[2:5]
        assert sound[4] != 17


def test_scores_that_are_too_large_are_no_fault(whole: WholeVocabSampler) -> None:
    logits = logits_of(2, 1e35, 5)
    divisors = torch.full((2,), 1e-5, device=DEVICE)
    drawn = torch.ones(2, dtype=torch.int32, device=DEVICE)
    undefined = torch.empty(2, dtype=torch.int32, device=DEVICE)
    draws = Draws(divisors, drawn, keys_of(2))
    chosen = whole.choose(logits, draws=draws, undefined=undefined)
    assert undefined.tolist() == [0, 0]
    assert (logits.gather(1, chosen.token_ids[:, None]) > 0).all()


def test_masks_forbid_what_a_grammar_and_min_tokens_forbid() -> None:
    plan = replace(
        plan_of([Row(), Row(masked=(3, 64)), Row(), Row(masked=(699,))]),
        grammar_rows=np.array([1, 2]),
    )
    given = np.random.default_rng(0).integers(-(2**31), 2**31, (2, 22)).astype(np.int32)
    assert masked_rows(plan).tolist() == [1, 2, 3]
    found = np.unpackbits(masks_of(plan, given, VOCAB).view(np.uint8), axis=1, bitorder="little")
    expected = np.ones((3, 22 * 32), np.uint8)
    expected[:2] = np.unpackbits(given.view(np.uint8), axis=1, bitorder="little")
    expected[0, [3, 64]] = 0
    expected[2, 699] = 0
    assert found.tolist() == expected.tolist()


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
        monkeypatch.setattr(top_k_top_p, "NUM_CANDIDATES", 4)
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
    limits = TruncationLimits(
        scaled, {"top_ks": zeros.int(), "top_ps": zeros + 0.5, "min_ps": zeros}
    )
    keys = torch.from_numpy(row_keys(np.arange(3), np.arange(3))).to(DEVICE)
    token_ids = torch.full((3,), -7, device=DEVICE)
    wanted = torch.tensor([False, True, False], device=DEVICE)
    whole.further(limits, keys, wanted, token_ids, limits.top_ps)
    assert [int(it) == -7 for it in token_ids] == [True, False, True]
