"""The memory of the paged cache: per layer one tensor of keys and one of values, in blocks.

Where latents are cached, a value is the beginning of its key, and there are keys alone.

The scheduler decides which block belongs to which request.

- Block 0 is the null block: padding points there, and its content is never used.
- A slot is block * block_size + offset, the same for every layer.
- What lies behind a row's end in its last block is finite: memory starts as zeros, and a block is
  cleared when its first token is written, unless the same step fills it. Attention masks this part
  with -inf, which would not hide a NaN or an infinity left by the block's last owner.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream_core.attention.cache_formats import CacheFormat, dtype_of, elements_of
from slipstream_core.attention.geometry import LayerGeometry


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's cache, by slot and by block; the views share their memory."""

    keys: torch.Tensor  # [num_blocks * block_size, num_kv_heads, key_dim]
    values: torch.Tensor  # [num_blocks * block_size, num_kv_heads, value_dim]
    key_blocks: torch.Tensor  # [num_blocks, block_size * num_kv_heads * key_dim]
    # [num_blocks, block_size * num_kv_heads * value_dim]; None: a value is the beginning of its key
    value_blocks: torch.Tensor | None
    format: CacheFormat = "auto"  # of codes, `dim` is the number of bytes, and tensors are uint8

    @property
    def is_latent(self) -> bool:
        """True if values are the beginnings of their keys."""
        return self.value_blocks is None

    @property
    def blocks(self) -> tuple[torch.Tensor, ...]:
        """The memory, each [num_blocks, width]."""
        if self.value_blocks is None:
            return (self.key_blocks,)
        return (self.key_blocks, self.value_blocks)

    def store(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Write T tokens' keys and values [T, num_kv_heads, dim] to slots int64 [T]."""
        self.keys.index_copy_(0, slots, key)
        if not self.is_latent:
            self.values.index_copy_(0, slots, value)

    def clear(self, blocks: torch.Tensor) -> None:
        """Zero the blocks int64 [n]."""
        for memory in self.blocks:
            memory.index_fill_(0, blocks, 0)


def allocate(
    geometry: Sequence[LayerGeometry],
    *,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
    form: CacheFormat = "auto",
) -> list[LayerCache]:
    """Allocate zeroed caches of all layers."""
    layers = []
    for layer in geometry:
        parts = []
        for dim in (layer.key_dim,) if layer.is_latent else (layer.key_dim, layer.value_dim):
            elements = elements_of(form, dim)
            width = block_size * layer.num_kv_heads * elements
            own = dtype_of(form, dtype)
            blocks = zeros(num_blocks * width, own, device).view(num_blocks, width)
            parts.append((blocks.view(-1, layer.num_kv_heads, elements), blocks))
        keys, key_blocks = parts[0]
        if layer.is_latent:
            layers.append(LayerCache(keys, keys[..., : layer.value_dim], key_blocks, None, form))
        else:
            values, value_blocks = parts[1]
            layers.append(LayerCache(keys, values, key_blocks, value_blocks, form))
    return layers


def widest_block(layers: Sequence[LayerCache]) -> int:
    """The most bytes that a block's keys take in a layer; 1 if none attends."""
    return max((layer.key_blocks[0].nbytes for layer in layers), default=1)


def zeros(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor [size] of zeros, whose memory a CPU takes as it is written."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    # Pages of an anonymous mapping become zeros on first touch, so a large cache costs neither time
    # nor memory until it is used; torch.zeros would write all of it.
    memory = mmap.mmap(-1, size * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # blocks are scattered, so small pages would miss the TLB
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype)
