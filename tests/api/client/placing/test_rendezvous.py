"""Rendezvous hashing against its definition, and what a change of members moves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.client.placing.rendezvous import homes, mix64

U64 = st.integers(0, 2**64 - 1)
NUM_KEYS = 4000


def plain_mix(value: int) -> int:
    """SplitMix64 in Python's integers."""
    mask = 2**64 - 1
    value = (value + 0x9E3779B97F4A7C15) & mask
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
    return value ^ (value >> 31)


def test_mix64_gives_splitmix64s_first_numbers() -> None:
    """The first outputs of the generator with seed 0, as its author publishes them."""
    step = 0x9E3779B97F4A7C15
    states = np.array([0, step], np.uint64)
    assert [hex(value) for value in mix64(states).tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]


@given(U64, st.lists(U64, unique=True, min_size=1, max_size=20), st.integers(1, 5))
def test_homes_are_the_highest_hashes(key: int, salts: list[int], num: int) -> None:
    expected = sorted(range(len(salts)), key=lambda at: plain_mix(key ^ salts[at]), reverse=True)
    assert homes(key, np.array(salts, np.uint64), num) == expected[:num]


@pytest.mark.long
@given(st.integers(0, 2**32), st.integers(2, 24))
def test_rendezvous_moves_one_nth(seed: int, num: int) -> None:
    """A member less moves its own keys alone, to their second homes; a member more gets 1/n."""
    random = np.random.default_rng(seed)
    salts = random.integers(0, 2**64, num, np.uint64)
    keys: list[int] = random.integers(0, 2**64, NUM_KEYS, np.uint64).tolist()
    with_all = [homes(key, salts, 2) for key in keys]
    without_last = [homes(key, salts[:-1], 1)[0] for key in keys]
    num_moved = 0
    for (first, second), home in zip(with_all, without_last, strict=True):
        assert home == (second if first == num - 1 else first)
        num_moved += first == num - 1
    expected = NUM_KEYS / num
    assert abs(num_moved - expected) < 6 * expected**0.5
