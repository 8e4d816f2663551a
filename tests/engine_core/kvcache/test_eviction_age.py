"""Held to a pool whose blocks' times are written down."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.kvcache.block_pool import BlockPool
from slipstream_core.kvcache.eviction_age import EvictionAge

_LONGEST_S = 5.0  # between two looks


def test_it_is_unknown_before_an_eviction() -> None:
    pool = BlockPool(8)
    age = EvictionAge(pool)
    held = pool.allocate(3)
    pool.keep(held)
    pool.release(held)
    assert age.age(1.0) is None
    pool.allocate(4)  # those without content come first
    assert age.age(2.0) is None


@given(st.lists(st.tuples(st.floats(0.0, _LONGEST_S), st.integers(1, 3)), min_size=1, max_size=60))
def test_it_is_never_more_than_the_age_and_about_as_much(turns) -> None:
    pool = BlockPool(6)
    age = EvictionAge(pool)
    now, freed_at, evicted_at = 0.0, {}, None
    for after_s, num in turns:
        now += after_s
        kept = {int(block) for block in range(1, 6) if pool.is_kept(block)}
        held = pool.allocate(num)
        lost = [block for block in held.tolist() if block in kept]
        if lost:
            evicted_at = max(freed_at[block] for block in lost)
        pool.keep(held)
        pool.release(held)
        freed_at.update(dict.fromkeys(held.tolist(), now))
        found = age.age(now)
        assert (found is None) == (evicted_at is None)
        if found is not None and evicted_at is not None:
            least_s = now - evicted_at - _LONGEST_S - 1.0  # a note is made of each second at most
            assert least_s - 1e-9 <= found <= now - evicted_at + 1e-9
