"""The attention context of one forward, passed to the model as a keyword argument.

It ties a step's tokens to their slots in the cache. A context serves one forward only, so it holds
no state across steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream_core.attention.interface import AttentionParams
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.attention.torch_backend import TorchAttention


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """An AttentionContext over the paged cache."""

    layers: Sequence[LayerCache]
    kv_slots: torch.Tensor  # [T] int64: the slot of each token's key and value
    attention: TorchAttention  # shared by all layers of the step
    begun_blocks: torch.Tensor | None = None  # [n] int64: cleared before storing

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
