"""How attention is cut up on a card: tile sizes, warps, and over how many programs a row's keys go.

Pure arithmetic on shapes that the host knows. Knows neither Triton nor tensors.

The sizes were chosen by compiling for sm_90 and looking at registers, spills and shared memory
(tests/engine_core/runner/triton/test_compile.py holds them to it): 227 KiB of shared memory and 255
registers a thread are what there is. They have yet to be timed on a card. Cards with less shared
memory get the first of a row of smaller tiles that fits (`shared_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

MAX_GROUP = 128  # query heads to a key head
MAX_DIM = 256
MAX_SPLITS = 32
H100_SHARED_LIMIT = 227 * 1024  # bytes of shared memory a program; an H200's too
# The block table is read one stage ahead of the keys that it names, so that five stages keep two
# tiles of keys and values in shared memory: one is read while the other is used.
_STAGES = 5
_STAGES_OF_ONE_TILE = 4
_WAVES = 2  # programs to a multiprocessor that a step with few rows is cut into


@dataclass(frozen=True, slots=True)
class Tile:
    """What one program holds, and how the compiler is to lay it out."""

    block_m: int  # queries times query heads of one key head
    block_n: int  # keys
    num_warps: int
    num_stages: int  # loads of keys and values under way at a time

    def queries(self, group: int) -> int:
        """How many queries one tile has, all with their `group` heads."""
        return self.block_m // group


def padded(size: int) -> int:
    """The next power of two, at least 16: what the matrix units take."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """What of a layer its tiles hang on. itemsize: bytes of a number."""

    group: int  # query heads to a key head
    key_dim: int
    value_dim: int
    itemsize: int


def supports(heads: Heads, shared_limit: int) -> bool:
    """Whether there are tiles for such a layer, in so many bytes of shared memory a program."""
    if heads.group > MAX_GROUP or max(heads.key_dim, heads.value_dim) > MAX_DIM:
        return False
    tiles = (decode_tile(heads, shared_limit), prefill_tile(heads, shared_limit))
    return all(shared_bytes(tile, heads) <= shared_limit for tile in tiles)


def decode_tile(heads: Heads, shared_limit: int) -> Tile:
    """For rows of one token: bound by reading keys, so few rows, many keys on their way."""
    rows = padded(heads.group)
    widest = max(padded(heads.key_dim), padded(heads.value_dim))
    warps = 4 if rows <= 32 else 8
    if heads.itemsize == 4:
        best = Tile(rows, 32 if widest <= 64 else 16, warps, 2)
    else:
        best = Tile(rows, 64 if widest <= 128 else 32, warps, _STAGES)
    return _fitting(best, heads, shared_limit)


def prefill_tile(heads: Heads, shared_limit: int) -> Tile:
    """For prompts: bound by the matrix units, so as many rows as registers hold."""
    rows = padded(heads.group)
    widest = max(padded(heads.key_dim), padded(heads.value_dim))
    if heads.itemsize == 4:  # no matrix units for it
        best = Tile(max(32, rows), 32 if widest <= 64 else 16, 8, 2)
    elif padded(heads.value_dim) > 128:  # the accumulator alone is half of the registers
        best = Tile(max(64, rows), 32, 8, _STAGES)
    else:
        best = Tile(128, 64 if widest <= 128 else 32, 8, _STAGES)
    return _fitting(best, heads, shared_limit)


def shared_bytes(tile: Tile, heads: Heads) -> int:
    """What a program with this tile takes of shared memory at most, on a card of 8.x or 12.0.

    An H100 makes products otherwise, which takes up to half as much again; it has enough of it.
    Before 8.0 Triton makes them in float32, for which this is too little: what does not fit such a
    card is found when it is compiled.

    While it walks the keys: the queries, a tile of scores, and the tiles of keys and values that
    are there at a time, with the blocks that name them. Behind them: its accumulator, laid out
    anew to be stored.
    """
    key_pad, value_pad = padded(heads.key_dim), padded(heads.value_dim)
    keys, values = tile.block_n * key_pad, tile.block_n * value_pad
    if tile.num_stages == 1:  # one after the other
        loaded = max(keys, values)
    else:
        loaded = (keys + values) * (2 if tile.num_stages >= _STAGES else 1)
    numbers = tile.block_m * (key_pad + tile.block_n) + loaded
    walking = numbers * heads.itemsize + 16 * tile.block_n + 4 * tile.block_m
    return max(walking, 4 * tile.block_m * value_pad)


def _fitting(best: Tile, heads: Heads, shared_limit: int) -> Tile:
    """The first of `best` and what is smaller that fits; the smallest where none does."""
    for tile in _smaller(best, padded(heads.group)):
        if shared_bytes(tile, heads) <= shared_limit:
            break
    return tile


def _smaller(best: Tile, fewest_rows: int) -> Iterator[Tile]:
    """`best`, and what is smaller, in order of worth: fewer loads under way, rows, keys."""
    stages = (2, 1) if best.num_stages == 2 else (_STAGES, _STAGES_OF_ONE_TILE)
    block_n = best.block_n
    while block_n >= 16:
        block_m = best.block_m
        while block_m >= fewest_rows:
            for num_stages in stages:
                yield replace(best, block_m=block_m, block_n=block_n, num_stages=num_stages)
            block_m //= 2
        block_n //= 2


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Over how many programs each row's keys are dealt out.

    `num_programs` are there without splitting, each with up to `num_tiles` tiles of keys. All of
    it is known on the host, from shapes alone; rows that are shorter leave splits without work.
    """
    wanted = -(-_WAVES * num_processors // max(1, num_programs))
    if num_programs >= num_processors:
        return 1
    return max(1, min(wanted, num_tiles, MAX_SPLITS))
