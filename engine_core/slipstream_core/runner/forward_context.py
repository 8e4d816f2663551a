"""What a forward's attention needs, travelling with the forward as a keyword argument.

Owns the tie between a step's tokens and the cache. Knows no model and no plan: who built it knows
both. One context serves one forward, so nothing in it outlives or outruns its step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream_core.runner.attention.interface import AttentionParams
from slipstream_core.runner.attention.kv_cache import LayerCache
from slipstream_core.runner.attention.torch_backend import TorchAttention


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """An AttentionContext over the paged cache."""

    layers: Sequence[LayerCache]
    kv_slots: torch.Tensor  # [T] int64: where each token's key and value go
    attention: TorchAttention  # this step's, shared by its layers
    begun_blocks: torch.Tensor | None = None  # [n] int64: to be cleared first, if any

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        cache = self.layers[layer]
        if self.begun_blocks is not None:
            cache.clear(self.begun_blocks)
        cache.store(self.kv_slots, key, value)
        return self.attention.attend(query, key, value, cache, params)
