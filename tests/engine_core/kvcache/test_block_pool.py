"""The block pool hands every block out once, and takes all of them back; kept ones come last."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slipstream_core.kvcache.block_pool import NULL_BLOCK, BlockPool


def ids_of(blocks: list[int]) -> np.ndarray:
    return np.array(blocks, np.int32)


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
    with pytest.raises(AssertionError, match="3 blocks requested, 2 free"):
        pool.allocate(3)


def test_nobody_releases_more_often_than_they_own() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.release(ids_of([1, 1]))


def test_only_what_is_kept_is_shared_and_only_what_is_held_is_kept() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(1)
    with pytest.raises(AssertionError, match="not kept"):
        pool.share(ids)
    with pytest.raises(AssertionError, match=r"free blocks cannot be kept: \[2\]"):
        pool.keep(ids_of([1, 2]))


def test_what_nobody_wants_goes_first_then_the_kept_block_that_was_freed_longest_ago() -> None:
    pool = BlockPool(6)
    ids = pool.allocate(4)
    pool.keep(ids_of([1, 2, 3]))
    pool.release(ids[1:3][::-1])  # 3, then 2
    pool.release(ids[:1])
    pool.release(ids[3:])
    assert pool._num_queued == 3
    assert pool.allocate(2).tolist() == [4, 5]
    assert pool.allocate(1).tolist() == [3]
    assert not pool.is_kept(3)
    pool.share(ids_of([2]))
    assert pool.allocate(1).tolist() == [1]
    assert pool.num_free == 0


@pytest.mark.parametrize("num_blocks", [-1, 0, 1])
def test_a_pool_needs_a_block_besides_the_null_block(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}, allowed: 2 or more"):
        BlockPool(num_blocks)


class AgainstLists(RuleBasedStateMachine):
    """Everything at once, against counters and lists."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.refs: Counter[int] = Counter()
        self.unwanted = list(range(num_blocks - 1, 0, -1))  # the last goes first
        self.kept_free: list[int] = []  # the first goes first
        self.kept: set[int] = set()

    @rule(n=st.integers(0, 6))
    def allocate(self, n: int) -> None:
        n = min(n, self.pool.num_free)
        want = []
        for _ in range(n):
            if self.unwanted:
                want.append(self.unwanted.pop())
            else:
                want.append(self.kept_free.pop(0))
                self.kept.remove(want[-1])
        assert self.pool.allocate(n).tolist() == want
        self.refs.update(want)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.pool.share(ids_of(ids))
        self.refs.update(ids)
        self.kept_free = [block for block in self.kept_free if block not in ids]

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(+self.refs)))
        self.pool.keep(ids_of([block]))
        self.kept.add(block)

    @precondition(lambda self: +self.refs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        held = sorted(self.refs.elements())
        order = data.draw(st.permutations(range(len(held))))
        ids = [held[at] for at in order[: data.draw(st.integers(0, len(held)))]]
        self.pool.release(ids_of(ids))
        self.refs.subtract(ids)
        freed = [block for at, block in enumerate(ids) if block not in ids[at + 1 :]]
        for block in freed:
            if self.refs[block] == 0:
                (self.kept_free if block in self.kept else self.unwanted).append(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True))
        self.pool.forget(ids_of(ids))
        self.kept -= set(ids)
        self.unwanted += [block for block in ids if block in self.kept_free]
        self.kept_free = [block for block in self.kept_free if block not in ids]

    @rule()
    def forget_all(self) -> None:
        self.pool.forget_all()
        self.unwanted += sorted(self.kept_free)
        self.kept_free, self.kept = [], set()

    @invariant()
    def agrees(self) -> None:
        pool = self.pool
        blocks = range(1, pool.num_blocks)
        assert pool.refs(ids_of(list(blocks))).tolist() == [self.refs[block] for block in blocks]
        assert [block for block in blocks if pool.is_kept(block)] == sorted(self.kept)
        assert pool.num_free == len(self.unwanted) + len(self.kept_free)
        assert pool._num_queued == len(self.kept_free)
        assert pool._tail - pool._head <= 2 * pool.num_blocks


TestAgainstLists = AgainstLists.TestCase
