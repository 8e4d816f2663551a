"""The sampling noise: reproducible, exponential, independent across seeds, positions, streams."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from slipstream_core.sampling.noise import exponential, row_keys

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine

SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**31 - 1)


def noise(seed: int, position: int, token_ids: torch.Tensor, stream: int = 0) -> torch.Tensor:
    keys = row_keys(np.array([seed]), np.array([position]), stream)
    return exponential(torch.from_numpy(keys), token_ids)[0]


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def reference(seed: int, position: int, token_id: int, stream: int) -> float:
    """The same by Python's integers, whose arithmetic hides nothing."""

    def mix(x: int) -> int:
        for shift, multiplier in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            x = (x ^ (x >> shift)) * multiplier & 0xFFFFFFFF
        return x ^ (x >> 16)

    mask, golden = 0xFFFFFFFF, 0x9E3779B9
    key = mix(seed & mask ^ 0x5BD1E995)
    key = mix(key + (seed >> 32 & mask) & mask)
    key = mix(key ^ position * golden & mask)
    key = mix(key + stream * golden & mask)
    bits = mix(mix(token_id ^ key) + mix(key ^ 0x3C6EF372) & mask) & 0x7FFFFFFF
    return float(-np.log1p(-(bits + 0.5) / 2**31))


@given(SEEDS, POSITIONS, st.integers(0, 2**20), st.integers(0, 40))
@example(478, 33173545, 19447, 27)  # of bits near 2**31, whose last seven float32 has no room for
def test_is_what_integer_arithmetic_says(seed: int, position: int, token: int, stream: int) -> None:
    """But for what float32 rounds: a share of 2**-24 of the bits, twice, and the logarithm's."""
    value = float(noise(seed, position, torch.tensor([token], dtype=torch.int32), stream))
    expected = reference(seed, position, token, stream)
    rounded = np.expm1(expected) * 2.0**-23  # v / (1 - v) of the uniform number v
    np.testing.assert_allclose(value, expected, rtol=2.0**-22, atol=min(rounded, 1.0))


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=6), st.integers(0, 3))
def test_depends_on_nothing_but_seed_position_and_token(
    rows: list[tuple[int, int]], stream: int
) -> None:
    seeds, positions = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    token_ids = torch.arange(50, dtype=torch.int32)
    together = exponential(torch.from_numpy(row_keys(seeds, positions, stream)), token_ids)
    for row, (seed, position) in enumerate(rows):
        assert torch.equal(noise(seed, position, token_ids, stream), together[row])
    # any order and choice of tokens, by row
    picked = torch.randint(0, 50, (len(rows), 7), dtype=torch.int32)
    some = exponential(torch.from_numpy(row_keys(seeds, positions, stream)), picked)
    assert torch.equal(some, together.gather(1, picked.long()))


def test_the_largest_noise_is_finite() -> None:
    """Of 64 values in 2**31; else a token that alone is allowed would not be drawn."""
    for seed in (10683985, 15086564):  # which gave infinity to this token at this position
        value = noise(seed, 40, torch.tensor([100], dtype=torch.int32))
        assert 16 < float(value) < 17
        assert reference(seed, 40, 100, 0) > 17


def test_is_exponential() -> None:
    values = noise(5, 9, torch.arange(200_000, dtype=torch.int32)).double().sort().values
    assert float(values[0]) > 0
    theory = 1 - (-values).exp()
    empirical = (torch.arange(len(values)) + 0.5) / len(values)
    # Kolmogorov-Smirnov, 1.95 / sqrt(n) is the 0.1 % point
    assert float((theory - empirical).abs().max()) < 1.95 / len(values) ** 0.5


def test_neighbours_are_independent() -> None:
    token_ids = torch.arange(100_000, dtype=torch.int32)
    base = noise(7, 100, token_ids)
    others = {
        "seed": noise(8, 100, token_ids),
        "high bits of the seed": noise(7 + 2**32, 100, token_ids),
        "negative seed": noise(-7, 100, token_ids),
        "position": noise(7, 101, token_ids),
        "stream": noise(7, 100, token_ids, stream=1),
        "next token": base.roll(1),
    }
    for name, other in others.items():
        assert abs(correlation(base, other)) < 5 / len(token_ids) ** 0.5, name


def test_streams_differ_at_large_positions() -> None:
    # the trap: a stream folded into the position's bits is lost where those are used up
    token_ids = torch.arange(1000, dtype=torch.int32)
    for position in (2**26, 2**27 - 1, 2**31 - 1):
        draws = [noise(3, position, token_ids, stream) for stream in range(40)]
        assert len({tuple(draw.tolist()) for draw in draws}) == 40


def test_positions_of_one_seed_do_not_repeat_tokens() -> None:
    # per position the token whose clock rings first: uniform, and uncorrelated in time
    positions = np.arange(40_000)
    keys = torch.from_numpy(row_keys(np.full(len(positions), 12345), positions))
    winners = exponential(keys, torch.arange(16, dtype=torch.int32)).argmin(-1)
    pairs = torch.bincount(winners[:-1] * 16 + winners[1:], minlength=256).double()
    expected = (len(positions) - 1) / 256
    chi_square = float(((pairs - expected) ** 2 / expected).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
