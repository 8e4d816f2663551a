"""How attention is cut up on a card: pure numbers, no card needed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream_core.kernels.card.tiles import (
    H100_SHARED_LIMIT,
    MAX_DIM,
    MAX_GROUP,
    MAX_SPLITS,
    Heads,
    Tile,
    decode_tile,
    num_splits,
    padded,
    prefill_tile,
    shared_bytes,
    supports,
    with_tile,
)

# bytes of shared memory a program: very little; of the capabilities 8.6, 8.9 and 12.0; 8.0; 9.0
LIMITS = (65_536, 101_376, 166_912, H100_SHARED_LIMIT)
SIZES = st.sampled_from([2, 4])
NARROW = st.builds(
    Heads,
    group=st.integers(1, MAX_GROUP),
    key_dim=st.integers(1, 256),
    value_dim=st.integers(1, 256),
    itemsize=SIZES,
)
WIDE = st.builds(
    Heads,
    group=st.integers(1, 32),
    key_dim=st.integers(257, MAX_DIM),
    value_dim=st.integers(1, MAX_DIM),
    itemsize=SIZES,
)
LATENT = st.builds(
    lambda rank, rotated, **others: Heads(
        key_dim=rank + rotated, value_dim=rank, is_latent=True, **others
    ),
    group=st.integers(1, 2 * MAX_GROUP),
    rank=st.integers(1, MAX_DIM),
    rotated=st.integers(1, 128),
    itemsize=SIZES,
)
HEADS = NARROW | WIDE


@given(HEADS | LATENT, st.sampled_from(LIMITS))
def test_a_tile_holds_the_whole_group_and_what_the_matrix_units_take(
    heads: Heads, limit: int
) -> None:
    for choose in (decode_tile, prefill_tile):
        tile = choose(heads, limit)
        assert tile.queries(heads.of_program(tile)) >= 1
        for size in (tile.block_m, tile.block_n):
            assert size >= 16
            assert size & (size - 1) == 0
        if supports(heads, limit):
            assert shared_bytes(tile, heads) <= limit


@given(LATENT, st.sampled_from(LIMITS))
def test_heads_that_share_latents_are_dealt_out_evenly(heads: Heads, limit: int) -> None:
    for choose in (decode_tile, prefill_tile):
        tile = choose(heads, limit)
        group = heads.of_program(tile)
        assert heads.group % group == 0
        fitting = range(1, tile.block_m + 1)
        assert group == max(size for size in fitting if heads.group % size == 0)
    assert supports(heads, limit) or (heads.itemsize == 4 and limit < 101_376)


@settings(max_examples=1000)
@given(HEADS, st.sampled_from(LIMITS))
def test_what_is_supported(heads: Heads, limit: int) -> None:
    """All of it on an H100 and an A100; elsewhere all but very many wide heads to a key head."""
    most = 64 if heads.itemsize == 2 or limit > 65_536 else 32
    is_wide = max(heads.key_dim, heads.value_dim) > 256
    if limit >= 166_912 or (heads.group <= most and not is_wide):
        assert supports(heads, limit)
    if is_wide and limit >= 101_376 and heads.itemsize == 2:
        assert supports(heads, limit)


@pytest.mark.parametrize("limit", LIMITS)
def test_what_is_too_large_is_not_supported(limit: int) -> None:
    assert not supports(heads(group=MAX_GROUP + 1), limit)
    assert not supports(heads(group=33, key_dim=257), limit)
    assert not supports(heads(key_dim=MAX_DIM + 1), limit)
    assert not supports(heads(value_dim=MAX_DIM + 1), limit)


def test_what_no_tile_of_fits_is_not_supported() -> None:
    widest = heads(group=MAX_GROUP, key_dim=256, value_dim=256)
    assert supports(widest, 166_912)
    assert not supports(widest, 101_376)


def heads(group: int = 1, key_dim: int = 64, value_dim: int = 64, itemsize: int = 2) -> Heads:
    return Heads(group=group, key_dim=key_dim, value_dim=value_dim, itemsize=itemsize)


def latents(group: int) -> Heads:
    """As DeepSeek's models have them."""
    return Heads(group=group, key_dim=576, value_dim=512, itemsize=2, is_latent=True)


@given(HEADS | LATENT, st.integers(H100_SHARED_LIMIT, 2**20))
def test_where_there_is_as_much_as_on_an_h100_tiles_are_those_that_were_chosen_for_it(
    heads: Heads, limit: int
) -> None:
    for choose in (decode_tile, prefill_tile):
        assert choose(heads, limit) == choose(heads, 2**30)


@pytest.mark.parametrize(
    ("of", "decode", "prefill"),
    [
        (heads(8), Tile(16, 64, 2, 5), Tile(128, 64, 8, 5)),
        (heads(32), Tile(32, 64, 4, 5), Tile(128, 64, 8, 5)),
        (heads(4, 128, 128), Tile(16, 64, 2, 5), Tile(128, 64, 8, 5)),
        (heads(1, 192, 128), Tile(16, 32, 4, 5), Tile(128, 32, 8, 5)),
        (heads(2, 256, 256), Tile(16, 32, 4, 5), Tile(64, 32, 8, 5)),
        (heads(128, 256, 256), Tile(128, 32, 8, 5), Tile(128, 32, 8, 5)),
        (heads(8, 512, 512), Tile(16, 32, 4, 5), Tile(32, 32, 8, 5)),
        (latents(128), Tile(64, 32, 8, 5), Tile(32, 32, 8, 5)),
        (latents(16), Tile(16, 32, 4, 5), Tile(32, 32, 8, 5)),
        (heads(4, 128, 128, 4), Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
        (heads(128, 256, 256, 4), Tile(128, 16, 8, 2), Tile(128, 16, 8, 2)),
    ],
)
def test_an_h100s_tiles(of: Heads, decode: Tile, prefill: Tile) -> None:
    assert decode_tile(of, H100_SHARED_LIMIT) == decode
    assert prefill_tile(of, H100_SHARED_LIMIT) == prefill


def test_heads_of_256_on_cards_with_less_shared_memory() -> None:
    """As Gemma has them: with fewer loads under way, then with fewer queries."""
    gemma = heads(2, 256, 256)
    assert prefill_tile(gemma, 166_912) == Tile(64, 32, 8, 5)
    assert prefill_tile(gemma, 101_376) == Tile(64, 32, 8, 4)
    assert prefill_tile(gemma, 65_536) == Tile(32, 32, 8, 4)
    assert decode_tile(gemma, 101_376) == Tile(16, 32, 4, 5)
    assert decode_tile(gemma, 65_536) == Tile(16, 32, 4, 4)


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


@given(HEADS)
def test_a_sweeps_tile_takes_the_place_of_the_tables(heads: Heads) -> None:
    tile = Tile(32, 16, 4, 2)
    table = with_tile("decode", tile)
    chosen = decode_tile(heads, 2**30, table)
    assert chosen.block_m == max(32, padded(heads.group))
    assert (chosen.block_n, chosen.num_warps, chosen.num_stages) == (16, 4, 2)
    assert prefill_tile(heads, 2**30, table) == prefill_tile(heads, 2**30)
