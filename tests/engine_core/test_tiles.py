"""How attention is cut up on a card: pure numbers, no card needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from slipstream_core.runner.attention.tiles import (
    MAX_DIM,
    MAX_GROUP,
    MAX_SPLITS,
    decode_tile,
    num_splits,
    padded,
    prefill_tile,
    supports,
)

DIMS = st.integers(1, MAX_DIM)
GROUPS = st.integers(1, MAX_GROUP)


@given(GROUPS, DIMS, DIMS, st.sampled_from([2, 4]))
def test_a_tile_holds_the_whole_group_and_what_the_matrix_units_take(
    group: int, key_dim: int, value_dim: int, itemsize: int
) -> None:
    assert supports(group=group, key_dim=key_dim, value_dim=value_dim)
    for choose in (decode_tile, prefill_tile):
        tile = choose(group=group, key_dim=key_dim, value_dim=value_dim, itemsize=itemsize)
        assert tile.queries(group) >= 1
        for size in (tile.block_m, tile.block_n):
            assert size >= 16
            assert size & (size - 1) == 0


def test_what_is_too_large_is_not_supported() -> None:
    assert not supports(group=MAX_GROUP + 1, key_dim=64, value_dim=64)
    assert not supports(group=1, key_dim=MAX_DIM + 1, value_dim=64)
    assert not supports(group=1, key_dim=64, value_dim=MAX_DIM + 1)


@given(st.integers(1, 10_000))
def test_padded_is_the_next_power_of_two(size: int) -> None:
    assert padded(size) == next(p for p in (2**k for k in range(4, 20)) if p >= size)


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(1, 200))
def test_splits_fill_the_card_and_no_more(programs: int, tiles: int, processors: int) -> None:
    splits = num_splits(programs, tiles, processors)
    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits <= tiles
    if programs >= processors:
        assert splits == 1
    elif programs > 0 and MAX_SPLITS * programs >= 2 * processors and tiles >= MAX_SPLITS:
        assert programs * splits >= 2 * processors
