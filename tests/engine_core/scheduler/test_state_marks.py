"""Where states are saved: a few places of each prompt."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.scheduler.state_marks import state_marks


def marks(num_tokens: int, block_size: int = 16, branch: int = 0) -> list[int]:
    whole = num_tokens // block_size
    found = state_marks(0, whole, num_tokens=num_tokens, block_size=block_size, branch=branch)
    assert len(set(found)) == len(found)
    return [mark * block_size for mark in sorted(found)]


def test_the_most_useful_marks_come_first() -> None:
    assert state_marks(0, 312, num_tokens=5000, block_size=16, branch=3) == [3, 312, 308, 128, 256]


def test_a_prompt_has_two_marks_and_one_in_each_interval() -> None:
    assert marks(1) == marks(16) == []
    assert marks(17) == marks(32) == [16]
    assert marks(128) == [64, 112]
    assert marks(129) == [64, 128]
    assert marks(130, branch=3) == [48, 64, 128]
    assert marks(5000) == [2048, 4096, 4928, 4992]
    assert marks(1000, block_size=256) == [512, 768]
    assert marks(1000, block_size=24) == [936, 984]  # the least multiple of a block from 64 on


@given(
    num_tokens=st.integers(1, 9000),
    block_size=st.sampled_from([1, 5, 16, 64, 200]),
    branch=st.integers(0, 500),
    cuts=st.lists(st.integers(0, 9000), max_size=5),
)
def test_chunks_have_the_marks_of_the_whole(
    num_tokens: int, block_size: int, branch: int, cuts: list[int]
) -> None:
    whole = num_tokens // block_size
    ends = sorted({0, whole, *(min(cut // block_size, whole) for cut in cuts)})

    def between(start: int, stop: int) -> list[int]:
        return state_marks(start, stop, num_tokens=num_tokens, block_size=block_size, branch=branch)

    every = [mark for start, stop in pairwise(ends) for mark in between(start, stop)]
    assert sorted(every) == sorted(between(0, whole))
    assert len(every) <= 3 + num_tokens // 2048
    assert num_tokens <= block_size or (num_tokens - 1) // block_size in every
