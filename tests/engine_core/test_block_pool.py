"""The block pool hands every block out once, and takes all of them back."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.block_pool import NULL_BLOCK, BlockPool


def test_low_blocks_come_first_and_the_null_block_never() -> None:
    pool = BlockPool(5)
    assert (pool.num_blocks, pool.num_free) == (5, 4)
    assert pool.allocate(2).tolist() == [1, 2]
    assert pool.allocate(2).tolist() == [3, 4]
    assert pool.num_free == 0
    assert pool.allocate(0).tolist() == []


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 40))))
def test_agrees_with_a_set(num_blocks: int, actions: list[tuple[bool, int]]) -> None:
    pool = BlockPool(num_blocks)
    free = set(range(1, num_blocks))
    owned: list[int] = []
    for allocate, n in actions:
        if allocate:
            ids = pool.allocate(min(n, len(free))).tolist()
            assert len(set(ids)) == len(ids)
            assert set(ids) <= free
            free -= set(ids)
            owned += ids
        else:
            owned, back = owned[n:], owned[:n]
            pool.release(np.array(back, np.int32))
            free |= set(back)
        assert pool.num_free == len(free)
        assert NULL_BLOCK not in owned


def test_what_was_handed_out_is_not_written_again() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(3)
    pool.release(ids[::-1])
    pool.allocate(3)
    assert ids.tolist() == [1, 2, 3]


def test_nobody_releases_what_they_do_not_own() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(2)
    pool.release(ids[:1])
    with pytest.raises(AssertionError, match="not owned"):
        pool.release(ids)
    with pytest.raises(AssertionError, match="not owned"):
        pool.release(np.array([NULL_BLOCK], np.int32))
    with pytest.raises(AssertionError, match="3 blocks asked of 2"):
        pool.allocate(3)


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_besides_the_null_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}, needs at least 2"):
        BlockPool(num_blocks)
