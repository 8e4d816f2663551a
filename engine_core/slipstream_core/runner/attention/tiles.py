"""How attention is cut up on a card: tile sizes, warps, and over how many programs a row's keys go.

Pure arithmetic on shapes that the host knows. Knows neither Triton nor tensors.

The sizes were chosen by compiling for sm_90 and looking at registers, spills and shared memory
(tests/engine_core/triton/test_compile.py holds them to it): 227 KiB of shared memory and 255
registers a thread are what there is. They have yet to be timed on a card.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_GROUP = 128  # query heads to a key head
MAX_DIM = 256
MAX_SPLITS = 32
# The block table is read one stage ahead of the keys that it names, so that five stages keep two
# tiles of keys and values in shared memory: one is read while the other is used.
_STAGES = 5
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


def supports(*, group: int, key_dim: int, value_dim: int) -> bool:
    """Whether there are tiles for such a layer."""
    return group <= MAX_GROUP and max(key_dim, value_dim) <= MAX_DIM


def decode_tile(*, group: int, key_dim: int, value_dim: int, itemsize: int) -> Tile:
    """For rows of one token: bound by reading keys, so few rows, many keys on their way."""
    rows = padded(group)
    widest = max(padded(key_dim), padded(value_dim))
    warps = 4 if rows <= 32 else 8
    if itemsize == 4:
        return Tile(rows, 32 if widest <= 64 else 16, warps, 2)
    return Tile(rows, 64 if widest <= 128 else 32, warps, _STAGES)


def prefill_tile(*, group: int, key_dim: int, value_dim: int, itemsize: int) -> Tile:
    """For prompts: bound by the matrix units, so as many rows as registers hold."""
    rows = padded(group)
    widest = max(padded(key_dim), padded(value_dim))
    if itemsize == 4:  # no matrix units for it
        return Tile(max(32, rows), 32 if widest <= 64 else 16, 8, 2)
    if padded(value_dim) > 128:  # the accumulator alone is half of the registers
        return Tile(max(64, rows), 32, 8, _STAGES)
    return Tile(128, 64 if widest <= 128 else 32, 8, _STAGES)


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """Over how many programs each row's keys are dealt out.

    `num_programs` are there without splitting, each with up to `num_tiles` tiles of keys. All of
    it is known on the host, from shapes alone; rows that are shorter leave splits without work.
    """
    wanted = -(-_WAVES * num_processors // max(1, num_programs))
    if num_programs >= num_processors:
        return 1
    return max(1, min(wanted, num_tiles, MAX_SPLITS))
