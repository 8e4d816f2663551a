"""The sampler against distributions worked out by a sort in float64, and against itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.helpers.sampling_plans import Row, assert_follows, distribution, plan_of
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream_core.sampling import sampler, top_k_top_p
from slipstream_core.sampling.sampler import RawLogprobs, sample, undefined_of

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


def run(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], RawLogprobs | None]:
    vocab = torch.arange(logits.shape[1], dtype=torch.int32)
    before = logits.clone()
    token_ids, logprobs = sample(logits, plan_of(rows), vocab)
    assert torch.equal(logits, before)
    return token_ids.tolist(), logprobs


def logits_of(vocab_size: int, scale: float, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * scale


def draw(logits: torch.Tensor, row: Row, count: int) -> torch.Tensor:
    """`count` draws of one row, by position, in a few large batches; counts by token."""
    counts = torch.zeros(len(logits), dtype=torch.int64)
    for start in range(1, count + 1, 2000):
        rows = [row._replace(position=p) for p in range(start, min(start + 2000, count + 1))]
        token_ids, _ = run(logits.expand(len(rows), -1), rows)
        counts += torch.bincount(torch.tensor(token_ids), minlength=len(logits))
    return counts


SMALL = [
    Row(),
    Row(temperature=0.5),
    Row(temperature=1.7, seed=2**40 + 3),
    Row(top_k=1),
    Row(top_k=7),
    Row(top_p=0.6),
    Row(top_p=0.01),
    Row(min_p=0.1),
    Row(temperature=1.3, top_k=20, top_p=0.8),
    Row(temperature=0.8, top_k=30, top_p=0.9, min_p=0.05, seed=-5),
    Row(top_p=0.9, masked=(3, 5, 8)),
    Row(masked=(0, 1, 2, 3, 4, 5, 6, 7)),
    Row(top_k=500),  # more than there are: off
]


@pytest.mark.parametrize("row", SMALL, ids=str)
def test_small_vocabulary_follows_the_distribution(row: Row) -> None:
    logits = logits_of(60, 1.5)
    assert_follows(draw(logits, row, 20_000), distribution(logits, row))


# Flat enough that 256 candidates do not hold what is kept; the last ones are covered again.
LARGE = [
    Row(),
    Row(top_p=0.9, seed=1),
    Row(top_p=0.8, seed=2),
    Row(min_p=0.05, seed=3),
    Row(top_k=300, seed=4),
    Row(top_k=500, top_p=0.7, seed=5),
    Row(temperature=1.5, top_k=600, top_p=0.95, min_p=0.1, seed=6),
    Row(top_p=0.95, min_p=0.02, masked=tuple(range(100)), seed=7),
    Row(top_p=0.1, seed=8),
    Row(top_k=256, top_p=0.9, seed=9),
    Row(min_p=0.6, seed=10),
]


@pytest.mark.parametrize("row", LARGE, ids=str)
def test_large_vocabulary_follows_the_distribution(row: Row) -> None:
    logits = logits_of(700, 0.7, seed=1)
    assert_follows(draw(logits, row, 15_000), distribution(logits, row))


def test_the_cases_above_take_the_rejection_path(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = logits_of(700, 0.7, seed=1)
    taken = []
    original = top_k_top_p._draw_by_rejection

    def spy(limits: top_k_top_p.TruncationLimits, *others: object) -> torch.Tensor:
        taken.append(len(limits.scaled))
        return original(limits, *others)

    monkeypatch.setattr(top_k_top_p, "_draw_by_rejection", spy)
    paths = []
    for row in LARGE:
        taken.clear()
        run(logits[None], [row])
        paths.append(bool(taken))
    assert paths == [False] + [True] * 7 + [False] * 3


def test_the_mass_that_top_k_keeps_is_that_of_each_rows_own() -> None:
    scaled = torch.randn(4, 40, generator=torch.Generator().manual_seed(0))
    top_ks, top_ps = torch.tensor([7, 39, 0, 12]), torch.tensor([0.5, 0.5, 0.5, 1.0])
    limits = top_k_top_p.TruncationLimits(
        scaled, {"top_ks": top_ks, "top_ps": top_ps, "min_ps": torch.zeros(4)}
    )
    masses = limits.masses(torch.tensor([1, 0]), 39)[:, 0].tolist()
    shares = scaled.softmax(-1).sort(descending=True).values.cumsum(-1)
    assert masses[:2] == pytest.approx([float(0.5 * shares[0, 6]), float(0.5 * shares[1, 38])])
    assert masses[2:] == [0.5, math.inf]


class LargestTaken(TorchDispatchMode):
    """Of how many rows the largest values were taken, and how many of each."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.topk.default:
            self.sizes.append((len(args[0]), args[1]))
        return func(*args, **(kwargs or {}))


def test_only_rows_that_are_limited_twice_have_their_top_k_looked_at() -> None:
    others = [Row(seed=seed, top_p=0.9) for seed in range(5)] + [Row(temperature=0.0, top_k=600)]
    logits = logits_of(700, 0.7).expand(7, -1)
    for row, expected in (
        (Row(top_k=500), []),
        (Row(top_k=500, top_p=0.9), [(1, 500)]),
        (Row(top_k=200, top_p=0.9), []),
    ):
        with LargestTaken() as taken:
            run(logits, [*others, row])
        assert taken.sizes == [(7, top_k_top_p.NUM_CANDIDATES), *expected]


def test_rejection_ends_where_little_is_kept() -> None:
    # 257 of 100,000 equal tokens: one in 400 draws would do, were nothing learned from the others
    logits = logits_of(100_000, 0.01)
    rows = [Row(top_k=257, seed=seed, top_p=0.99) for seed in range(8)]
    token_ids, _ = run(logits.expand(8, -1), rows)
    kept = set(logits.topk(257).indices.tolist())
    assert set(token_ids) <= kept
    assert len(set(token_ids)) > 4


def test_rejection_of_equal_logits_ends() -> None:
    token_ids, _ = run(torch.zeros(8, 5000), [Row(top_p=0.2, seed=seed) for seed in range(8)])
    assert len(set(token_ids)) > 4


@st.composite
def batches(draw_from: st.DrawFn) -> tuple[list[Row], int, float, int]:
    rows = draw_from(
        st.lists(
            st.builds(
                Row,
                temperature=st.sampled_from([0.0, 1e-7, 0.7, 1.0, 2.0]),
                top_k=st.sampled_from([0, 0, 1, 5, 200, 300, 5000]),
                top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
                min_p=st.sampled_from([0.0, 0.0, 0.05, 0.9]),
                seed=st.integers(-(2**63), 2**63 - 1),
                position=st.integers(1, 2**31 - 1),
                num_logprobs=st.sampled_from([-1, -1, 0, 3]),
                masked=st.sampled_from([(), (), (0, 1), tuple(range(40))]),
                listed=st.just(()),
            ),
            min_size=1,
            max_size=7,
        )
    )
    listing = draw_from(st.booleans())
    rows = [
        row._replace(listed=tuple(range(row.num_logprobs))) if listing and i % 2 else row
        for i, row in enumerate(rows)
    ]
    size = draw_from(st.sampled_from([50, 700]))
    return rows, size, draw_from(st.sampled_from([0.3, 1.0, 4.0])), draw_from(st.integers(0, 99))


@given(batches(), st.randoms(use_true_random=False))
def test_a_row_gets_the_same_token_in_any_batch(
    batch: tuple[list[Row], int, float, int], random: object
) -> None:
    rows, vocab_size, scale, seed = batch
    logits = torch.stack([logits_of(vocab_size, scale, seed + i) for i in range(len(rows))])
    alone = [run(logits[i : i + 1], [row])[0][0] for i, row in enumerate(rows)]
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    together, logprobs = run(logits[order], [rows[i] for i in order])
    assert together == [alone[i] for i in order]
    for i, row in enumerate(rows):
        assert alone[i] not in row.masked
        allowed = logits[i].clone()
        allowed[list(row.masked)] = -torch.inf
        if row.temperature <= 1e-7 or row.top_k == 1:
            assert alone[i] == int(allowed.argmax())
        elif row.truncates or row.masked:
            assert distribution(logits[i], row)[alone[i]] > 0
    assert (logprobs is None) == all(row.num_logprobs < 0 for row in rows)


def test_greedy_rows_in_a_mixed_batch() -> None:
    logits = torch.stack([logits_of(60, 1.0, seed) for seed in range(40)])
    rows = [
        Row(temperature=(0.0, 1.0)[i % 2], top_p=(1.0, 0.9)[i % 3 == 0], seed=i) for i in range(40)
    ]
    token_ids, _ = run(logits, rows)
    best = logits.argmax(-1).tolist()
    assert token_ids[::2] == best[::2]
    assert token_ids[1::2] != best[1::2]


def test_logprobs_are_raw_and_ranked() -> None:
    logits = torch.stack([logits_of(300, 2.0, seed) for seed in range(5)])
    rows = [
        Row(temperature=0.3, num_logprobs=4, seed=1),
        Row(num_logprobs=-1),
        Row(num_logprobs=2, masked=(int(logits[2].argmax()),), temperature=0.0),
        Row(num_logprobs=0, top_k=3),
        Row(),
    ]
    token_ids, logprobs = run(logits, rows)
    assert logprobs is not None
    assert logprobs.rows.tolist() == [0, 2, 3]
    assert logprobs.values.shape == logprobs.ids.shape == (3, 5)
    expected = logits.log_softmax(-1)
    for place, row in enumerate(logprobs.rows.tolist()):
        assert logprobs.ids[place].tolist() == [
            token_ids[row],
            *expected[row].topk(4).indices.tolist(),
        ]
        torch.testing.assert_close(logprobs.values[place], expected[row, logprobs.ids[place]])
        rank = int((expected[row] > expected[row, token_ids[row]]).sum()) + 1
        assert int(logprobs.ranks[place]) == rank
    assert int(logprobs.ranks[1]) == 2  # the most likely was masked, and still counts


@given(st.integers(0, 2**32), st.integers(1, 120), st.integers(33, 700))
def test_masks_are_logits_that_were_never_there(seed: int, most: int, vocab_size: int) -> None:
    """What a mask forbids is as if its logit were -inf; raw log-probabilities do not know of it."""
    rng = np.random.default_rng(seed)
    rows = [
        Row(temperature=(0.0, 1.0)[i % 2], top_k=(0, 5)[i % 3 == 0], seed=i, num_logprobs=2)
        for i in range(6)
    ]
    logits = torch.stack([logits_of(vocab_size, 2.0, seed=i) for i in range(6)])
    with_grammar = np.flatnonzero(rng.random(6) < 0.5)
    bits = np.zeros((len(with_grammar), -(-vocab_size // 32) * 32), np.uint8)
    without = logits.clone()
    for i, row in enumerate(with_grammar.tolist()):
        ids = rng.choice(vocab_size, min(most, vocab_size), replace=False)
        bits[i, ids] = 1
        without[row, np.setdiff1d(np.arange(vocab_size), ids)] = -torch.inf
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    vocab = torch.arange(vocab_size, dtype=torch.int32)
    plan = replace(plan_of(rows), grammar_rows=with_grammar)
    before = logits.clone()
    token_ids, logprobs = sample(logits, plan, vocab, masks=masks)
    assert torch.equal(logits, before)
    assert token_ids.tolist() == run(without, rows)[0]
    assert logprobs is not None
    raw = logits.log_softmax(-1).gather(1, logprobs.ids)
    torch.testing.assert_close(logprobs.values, raw)


def test_listed_ids_have_the_raw_log_probabilities_of_a_softmax() -> None:
    """Whatever other rows of the batch ask for, in the list's order."""
    logits = torch.stack([logits_of(300, 2.0, seed) for seed in range(6)])
    least = logits.argmin(-1).tolist()
    rows = [
        Row(temperature=0.0, num_logprobs=2, listed=(least[0], int(logits[0].argmax()))),
        Row(num_logprobs=4),
        Row(),
        Row(top_k=3, num_logprobs=3, listed=(7, 7, 0), masked=(7,), seed=3),
        Row(num_logprobs=0),
        Row(num_logprobs=1, listed=(299,)),
    ]
    token_ids, logprobs = run(logits, rows)
    assert logprobs is not None
    expected = logits.log_softmax(-1)
    assert logprobs.rows.tolist() == [0, 1, 3, 4, 5]
    for place, row in enumerate(logprobs.rows.tolist()):
        num, own = rows[row].num_logprobs, token_ids[row]
        likeliest = expected[row].topk(4).indices.tolist()
        wanted = [own, *(rows[row].listed or likeliest)][: 1 + num]
        assert logprobs.ids[place, : 1 + num].tolist() == wanted
        torch.testing.assert_close(logprobs.values[place, : 1 + num], expected[row, wanted])
        rank = int((expected[row] > expected[row, own]).sum()) + 1
        assert int(logprobs.ranks[place]) == rank


def test_nothing_is_ranked_for_rows_that_list_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "most_likely", None)
    logits = torch.stack([logits_of(300, 2.0, seed) for seed in range(2)])
    rows = [Row(temperature=0.0, num_logprobs=2, listed=(1, 2)), Row(temperature=0.0)]
    _, logprobs = run(logits, rows)
    assert logprobs is not None
    assert logprobs.ids[0, 1:].tolist() == [1, 2]


def test_log_probability_of_the_sampled_token_alone() -> None:
    logits = logits_of(300, 2.0)[None]
    token_ids, logprobs = run(logits, [Row(num_logprobs=0)])
    assert logprobs is not None
    assert logprobs.ids.tolist() == [token_ids]
    torch.testing.assert_close(logprobs.values[0, 0], logits.log_softmax(-1)[0, token_ids[0]])


@pytest.mark.parametrize("wrong", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("columns", [slice(None), [0], [150], [299]], ids=str)
def test_rows_whose_logits_are_not_numbers_are_told_and_harm_no_others(
    wrong: float, columns: Any
) -> None:
    rows = [Row(temperature=0.0), *LARGE, *SMALL]
    rows = [row._replace(masked=()) for row in rows for _ in range(2)]  # one of each is sound
    logits = torch.stack([logits_of(300, 0.3, seed) for seed in range(len(rows))])
    expected, _ = run(logits, rows)
    assert not undefined_of(logits, torch.tensor(expected)).any()
    broken = logits.clone()
    broken[::2, columns] = wrong
    token_ids, _ = sample(broken, plan_of(rows), torch.arange(300, dtype=torch.int32))
    found = undefined_of(broken, token_ids)
    assert found.tolist() == [True, False] * (len(rows) // 2)
    assert token_ids[1::2].tolist() == expected[1::2]
    assert 0 <= int(token_ids.min()) <= int(token_ids.max()) < 300


def test_logits_that_no_request_may_have_are_no_fault() -> None:
    logits = logits_of(300, 2.0)[None].clone()
    logits[0, 7] = math.nan
    for row in (Row(masked=(7,)), Row(masked=(7,), top_p=0.9), Row(masked=(7,), temperature=0.0)):
        token_ids, _ = sample(logits, plan_of([row]), torch.arange(300, dtype=torch.int32))
        assert not undefined_of(logits, token_ids).any()
    logits[0] = -math.inf
    logits[0, 5] = 1.0
    token_ids, _ = sample(logits, plan_of([Row()]), torch.arange(300, dtype=torch.int32))
    assert token_ids.tolist() == [5]
    assert not undefined_of(logits, token_ids).any()
