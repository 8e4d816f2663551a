"""Tile sizes, warps and key splits of attention on a card.

Pure arithmetic on shapes that the host knows; no Triton, no tensors. The sizes were chosen by
compiling for sm_90 and looking at registers, spills and shared memory, which
tests/engine_core/kernels/triton/test_compile.py checks: 227 KiB of shared memory and 255 registers
a thread are available. For heads of 128 in two bytes an H100 chose among them
(benchmarks/gpu/by-hand-2026-11-26.md); `scripts/gpu-check tiles` times others in their place. Cards
with less shared memory get the first of a series of smaller tiles that fits (`shared_bytes`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

MAX_GROUP = 128  # query heads per key head
MAX_DIM = 512
_WIDE = 256  # heads that are wider have fewer rows to a tile, for the registers' sake
_MAX_WIDE_GROUP = 32
MAX_SPLITS = 32  # of a prefill row
H100_SHARED_LIMIT = 227 * 1024  # bytes of shared memory per program; also of an H200
# The block table is read one stage ahead of the keys it names, so five stages keep two tiles of
# keys and values in shared memory: one is loaded while the other is used.
_STAGES = 5
_STAGES_OF_ONE_TILE = 4
_WAVES = 2  # programs per multiprocessor that a step with few rows is split into


StepKind = Literal["decode", "prefill"]
_MOST_LATENT_ROWS: dict[StepKind, int] = {"decode": 64, "prefill": 32}


@dataclass(frozen=True, slots=True)
class Tile:
    """The tile of one program, with its compiler options."""

    block_m: int  # queries times a program's query heads
    block_n: int  # keys
    num_warps: int
    num_stages: int  # loads of keys and values in flight

    def queries(self, group: int) -> int:
        """The number of queries in one tile, each with `group` heads."""
        return self.block_m // group


def padded(size: int) -> int:
    """The next power of two, at least 16, as the matrix units require."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """The properties of a layer that determine its tiles."""

    group: int  # query heads per key head
    key_dim: int
    value_dim: int
    itemsize: int  # bytes of an element
    is_latent: bool = False  # a value is the beginning of its key, loaded once for both

    @property
    def key_pad(self) -> int:
        """The width in which a key is loaded, or what of it is no value."""
        return padded(self.key_dim - self.value_dim if self.is_latent else self.key_dim)

    @property
    def value_pad(self) -> int:
        """The width in which a value is loaded."""
        return padded(self.value_dim)

    @property
    def query_pad(self) -> int:
        """The width in which a query is loaded."""
        return self.key_pad + (self.value_pad if self.is_latent else 0)

    def of_program(self, tile: Tile) -> int:
        """The query heads of one program: of those that share latents as many as have rows."""
        if not self.is_latent:
            return self.group
        most = min(self.group, tile.block_m)
        return next(size for size in range(most, 0, -1) if self.group % size == 0)


class TileRule(NamedTuple):
    """The tile of layers with at most these sizes, padded; its block_m grows with the group."""

    step: StepKind
    itemsize: int  # bytes of an element
    most_dim: int  # of keys and values
    most_value_dim: int
    most_rows: int  # query heads to a key head
    tile: Tile


# The first rule that matches holds. Decode is bound by reading keys, so it has few rows and many
# loads in flight; prefill by the matrix units, so it has as many rows as registers hold. There are
# no matrix units for float32, and wide values take the registers for their sums alone. Two warps
# take 3 to 10 % less than four where a card is full, and 7 % more for a single row; prefill with
# 128 keys takes 7 % less on an H100, but all of its shared memory, and spills.
TILE_TABLE: tuple[TileRule, ...] = (
    TileRule("decode", 2, 128, 128, 16, Tile(16, 64, 2, _STAGES)),
    TileRule("decode", 2, 128, 128, 32, Tile(16, 64, 4, _STAGES)),
    TileRule("decode", 2, 128, 128, MAX_GROUP, Tile(16, 64, 8, _STAGES)),
    TileRule("decode", 2, _WIDE, _WIDE, 32, Tile(16, 32, 4, _STAGES)),
    TileRule("decode", 2, MAX_DIM, MAX_DIM, 16, Tile(16, 32, 4, _STAGES)),
    TileRule("decode", 2, MAX_DIM, MAX_DIM, MAX_GROUP, Tile(16, 32, 8, _STAGES)),
    TileRule("decode", 4, 64, 64, 32, Tile(16, 32, 4, 2)),
    TileRule("decode", 4, 64, 64, MAX_GROUP, Tile(16, 32, 8, 2)),
    TileRule("decode", 4, _WIDE, _WIDE, 32, Tile(16, 16, 4, 2)),
    TileRule("decode", 4, MAX_DIM, MAX_DIM, 16, Tile(16, 16, 4, 2)),
    TileRule("decode", 4, MAX_DIM, MAX_DIM, MAX_GROUP, Tile(16, 16, 8, 2)),
    TileRule("prefill", 2, 128, 128, MAX_GROUP, Tile(128, 64, 8, _STAGES)),
    TileRule("prefill", 2, MAX_DIM, 128, MAX_GROUP, Tile(128, 32, 8, _STAGES)),
    TileRule("prefill", 2, _WIDE, _WIDE, MAX_GROUP, Tile(64, 32, 8, _STAGES)),
    TileRule("prefill", 2, MAX_DIM, MAX_DIM, MAX_GROUP, Tile(32, 32, 8, _STAGES)),
    TileRule("prefill", 4, 64, 64, MAX_GROUP, Tile(32, 32, 8, 2)),
    TileRule("prefill", 4, MAX_DIM, MAX_DIM, MAX_GROUP, Tile(32, 16, 8, 2)),
)


def supports(heads: Heads, shared_limit: int) -> bool:
    """True if there are tiles for the layer that fit into `shared_limit` bytes per program."""
    widest = max(heads.key_pad, heads.value_pad)
    most = MAX_GROUP if widest <= _WIDE else _MAX_WIDE_GROUP
    if widest > MAX_DIM or (heads.group > most and not heads.is_latent):
        return False
    tiles = (decode_tile(heads, shared_limit), prefill_tile(heads, shared_limit))
    return all(shared_bytes(tile, heads) <= shared_limit for tile in tiles)


def decode_tile(heads: Heads, shared_limit: int, table: Sequence[TileRule] = TILE_TABLE) -> Tile:
    """The tile for decode rows."""
    return _fitting("decode", heads, shared_limit, table)


def prefill_tile(heads: Heads, shared_limit: int, table: Sequence[TileRule] = TILE_TABLE) -> Tile:
    """The tile for prefill rows."""
    return _fitting("prefill", heads, shared_limit, table)


def with_tile(step: StepKind, tile: Tile) -> tuple[TileRule, ...]:
    """The table with another tile for all layers of one kind of step, for a sweep."""
    rules = (TileRule(step, size, MAX_DIM, MAX_DIM, MAX_GROUP, tile) for size in (2, 4))
    return (*rules, *TILE_TABLE)


def _chosen(step: StepKind, heads: Heads, table: Sequence[TileRule]) -> Tile:
    rows = padded(heads.group)
    if heads.is_latent:  # the heads may be dealt out to several programs
        rows = min(rows, _MOST_LATENT_ROWS[step])
    value_dim = heads.value_pad
    widest = max(heads.key_pad, value_dim)
    for rule in table:
        if (
            rule.step == step
            and rule.itemsize == heads.itemsize
            and widest <= rule.most_dim
            and value_dim <= rule.most_value_dim
            and rows <= rule.most_rows
        ):
            return replace(rule.tile, block_m=max(rule.tile.block_m, rows))
    raise ValueError(f"no tile for {step} of {heads}")


def shared_bytes(tile: Tile, heads: Heads) -> int:
    """An upper bound on the shared memory of a program with this tile, in bytes.

    Valid for compute capability 8.x and 12.0. An H100 computes products differently and takes up to
    half as much again, which it has. Before 8.0 Triton uses float32, for which this is too low:
    what does not fit there is found at compile time.

    The bound is the larger of two phases. While iterating over the keys: the queries, a tile of
    scores, and the loaded tiles of keys and values with their block numbers. Afterwards: the
    accumulator, in the layout in which it is stored.
    """
    keys, values = tile.block_n * heads.key_pad, tile.block_n * heads.value_pad
    if tile.num_stages == 1 and not heads.is_latent:  # loaded one after the other
        loaded = max(keys, values)
    else:
        loaded = (keys + values) * (2 if tile.num_stages >= _STAGES else 1)
    numbers = tile.block_m * (heads.query_pad + tile.block_n) + loaded
    walking = numbers * heads.itemsize + 16 * tile.block_n + 4 * tile.block_m
    return max(walking, 4 * tile.block_m * heads.value_pad)


def _fitting(step: StepKind, heads: Heads, shared_limit: int, table: Sequence[TileRule]) -> Tile:
    """The first of the table's tile and its smaller variants that fits, or the smallest."""
    fewest_rows = padded(1 if heads.is_latent else heads.group)
    for tile in _smaller(_chosen(step, heads, table), fewest_rows):
        if shared_bytes(tile, heads) <= shared_limit:
            break
    return tile


def _smaller(best: Tile, fewest_rows: int) -> Iterator[Tile]:
    """`best` and smaller tiles, best first: fewer loads in flight, then rows, then keys."""
    fewer = 1 if best.num_stages <= _STAGES_OF_ONE_TILE else _STAGES_OF_ONE_TILE
    stages = (best.num_stages, fewer)
    block_n = best.block_n
    while block_n >= 16:
        block_m = best.block_m
        while block_m >= fewest_rows:
            for num_stages in stages:
                yield replace(best, block_m=block_m, block_n=block_n, num_stages=num_stages)
            block_m //= 2
        block_n //= 2


def item_budget(num_kv_heads: int, num_processors: int) -> int:
    """The number of parts that all decode rows' keys are cut into, each row's rest aside."""
    return -(-_WAVES * num_processors // num_kv_heads)


def num_splits(num_programs: int, num_tiles: int, num_processors: int) -> int:
    """The number of programs that share each prefill row's keys.

    `num_programs` is the number without splitting, each with up to `num_tiles` tiles of keys. All
    of it follows from shapes known on the host; shorter rows leave some splits without work.
    """
    wanted = -(-_WAVES * num_processors // max(1, num_programs))
    if num_programs >= num_processors:
        return 1
    return max(1, min(wanted, num_tiles, MAX_SPLITS))
