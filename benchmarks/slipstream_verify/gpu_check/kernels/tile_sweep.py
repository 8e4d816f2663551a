"""The tiles that a sweep tries, and the steps that it tries them on.

A tile is cut down to nothing: one that does not fit a card fails to compile or to launch, and is
told so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from slipstream_core.attention import kv_cache
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionParams
from slipstream_core.attention.triton_backend import Launch, StepRows, TritonAttention
from slipstream_core.kernels.card.tiles import StepKind, Tile, with_tile
from slipstream_verify.gpu_check.setting import SHAPES

BLOCK_SIZE = 16
_ANY_SIZE = 1 << 30  # bytes of shared memory


def heads_of(num_heads: int, num_kv_heads: int, dim: int) -> LayerGeometry:
    """A layer that sees all tokens."""
    return LayerGeometry(num_heads, num_kv_heads, dim, dim, None, None, False)


LAYERS = {
    SHAPES[0]: heads_of(16, 8, 128),
    SHAPES[1]: heads_of(32, 8, 128),
    SHAPES[2]: heads_of(32, 4, 128),
}


@dataclass(frozen=True, slots=True)
class TileCase:
    """A step's attention in one layer."""

    name: str
    step: StepKind
    layer: LayerGeometry
    rows: tuple[tuple[int, int], ...]  # (tokens before, tokens now)

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return sum(now for _, now in self.rows)

    @property
    def num_bytes(self) -> float:
        """Bytes of keys and values that it reads, each once."""
        per_token = self.layer.bytes_per_token(torch.bfloat16)
        return per_token * sum(before + now for before, now in self.rows)

    @property
    def flops(self) -> float:
        """Operations of its two products."""
        layer = self.layer
        seen = sum((before + 1 + before + now) * now / 2 for before, now in self.rows)
        return 2 * layer.num_heads * (layer.key_dim + layer.value_dim) * seen


def tile_cases(*, is_quick: bool) -> tuple[TileCase, ...]:
    """In order of importance."""
    if is_quick:
        tiny = heads_of(2, 1, 16)
        return (
            TileCase("decode, tiny", "decode", tiny, ((30, 1), (4, 1))),
            TileCase("prefill, tiny", "prefill", tiny, ((0, 20),)),
        )
    middle, large = LAYERS[SHAPES[1]], LAYERS[SHAPES[2]]
    decode = ((1023, 1),) * 256
    return (
        TileCase(f"decode of 256, {SHAPES[1]}", "decode", middle, decode),
        TileCase(f"decode of 256, short, {SHAPES[1]}", "decode", middle, ((139, 1),) * 256),
        TileCase(f"decode of 32, {SHAPES[1]}", "decode", middle, ((1023, 1),) * 32),
        TileCase(f"prefill of 8192, {SHAPES[1]}", "prefill", middle, ((0, 8192),)),
        TileCase(f"decode of 256, {SHAPES[2]}", "decode", large, decode),
        # more than a card's L2 cache holds
        TileCase(f"decode of 1, {SHAPES[1]}", "decode", middle, ((32767, 1),)),
        TileCase(f"prefill of 8192, {SHAPES[2]}", "prefill", large, ((0, 8192),)),
    )


def candidates(step: StepKind, *, is_quick: bool) -> Iterator[Tile]:
    """Tiles for one kind of step."""
    if is_quick:
        yield from (Tile(16, 16, 4, 2), Tile(16, 32, 4, 3))
    elif step == "decode":
        for block_n, warps, stages in product((32, 64, 128), (1, 2, 4), (3, 4, 5)):
            yield Tile(16, block_n, warps, stages)
    else:
        for block_m, block_n, warps, stages in product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3, 4, 5)
        ):
            yield Tile(block_m, block_n, warps, stages)


def tile_name(tile: Tile) -> str:
    """As rows name it."""
    return f"{tile.block_m} x {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages"


def launches_to_compile(
    step: StepKind, layer: LayerGeometry, tile: Tile, dtype: torch.dtype = torch.bfloat16
) -> list[Launch]:
    """The kernels by which `layer` attends with this tile, over next to nothing."""
    device = torch.device("cpu")
    cache = kv_cache.allocate(
        [layer], num_blocks=2, block_size=BLOCK_SIZE, dtype=dtype, device=device
    )
    attention = TritonAttention(
        cache,
        block_size=BLOCK_SIZE,
        device=device,
        shared_bytes=_ANY_SIZE,
        tiles=with_tile(step, tile),
    )
    return [
        launch
        for launch in attention.every_launch(0, layer, dtype)
        if launch.arguments.get("DECODE") is (step == "decode")
        and (step == "decode" or launch.arguments.get("SPLIT") is False)
    ]


class TileScene:
    """A case's tensors on a device, with random content."""

    def __init__(self, case: TileCase, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator(device).manual_seed(0)
        layer, rows = case.layer, case.rows
        lens = [before + now for before, now in rows]
        widths = [-(-length // BLOCK_SIZE) for length in lens]
        num_blocks = 1 + sum(widths)
        num_tokens = sum(now for _, now in rows)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        [self._cache] = kv_cache.allocate(
            [layer], num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=device
        )
        self._cache.keys.copy_(normal(*self._cache.keys.shape))
        self._cache.values.copy_(normal(*self._cache.values.shape))
        blocks = torch.randperm(num_blocks - 1, generator=generator, device=device) + 1
        tables = torch.zeros((len(rows), max(widths)), dtype=torch.int32, device=device)
        slots, at = [], 0
        for row, (width, (before, now)) in enumerate(zip(widths, rows, strict=True)):
            tables[row, :width] = blocks[at : at + width].int()
            places = torch.arange(before, before + now, device=device)
            slots.append(
                tables[row].long()[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            )
            at += width
        starts = torch.tensor([0, *(now for _, now in rows)], device=device).cumsum(0)
        self._rows = StepRows(
            len(rows) if case.step == "decode" else 0,
            torch.cat(slots),
            torch.tensor(lens, dtype=torch.int32, device=device),
            torch.arange(len(rows), device=device),
            tables,
            None if case.step == "decode" else starts.int(),
        )
        self._tensors = (
            normal(num_tokens, layer.num_heads, layer.key_dim),
            normal(num_tokens, layer.num_kv_heads, layer.key_dim),
            normal(num_tokens, layer.num_kv_heads, layer.value_dim),
        )
        self._params = AttentionParams(scale=layer.key_dim**-0.5)
        self._case, self._device = case, device

    def attention(self, tile: Tile | None) -> tuple[torch.Tensor, list[Launch]]:
        """The output, and what fills it, with a tile or with the table's own (None); the launch
        that stores keys and values, which has no tile, comes first.
        """
        if tile is None:
            attention = TritonAttention([self._cache], block_size=BLOCK_SIZE, device=self._device)
        else:
            attention = TritonAttention(
                [self._cache],
                block_size=BLOCK_SIZE,
                device=self._device,
                shared_bytes=_ANY_SIZE,
                tiles=with_tile(self._case.step, tile),
            )
        return attention.context(self._rows).launches(0, *self._tensors, self._params)
