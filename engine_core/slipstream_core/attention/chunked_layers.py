"""Layers that attend in chunks of positions, and queries scaled by their position (Llama 4).

Transformers has the chunks in its mask alone, and counts positions from the first token of a
forward. Here a forward's tokens are of many rows, so a layer is told its chunk, and queries are
scaled by the positions that the model is given.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import nn

_CHUNK = "attention_chunk"  # attributes of an attention module
_SCALE = "query_scale"
POSITIONS = "query_positions"  # the argument that takes positions to attention


class QueryScale(NamedTuple):
    """A factor of queries: 1 + strength * log(1 + floor((position + 1) / interval))."""

    interval: int
    strength: float

    def of(self, positions: torch.Tensor) -> torch.Tensor:
        """The factors float32 of these positions."""
        steps = torch.floor((positions.float() + 1.0) / self.interval)
        return torch.log1p(steps) * self.strength + 1.0


def attend_in_chunks(model: nn.Module, layers: Collection[int], size: int) -> None:
    """Have these layers attend in chunks: a token sees those before it that are of its chunk."""
    for module in model.modules():
        if getattr(module, "layer_idx", None) in layers:
            module.__dict__[_CHUNK] = size


def scale_by_position(model: nn.Module, scale: QueryScale) -> None:
    """Have the layers without rotary embeddings scale their queries. Raises ValueError if layers do
    not say whether they have these.
    """
    layer: Any
    is_known = False
    for layer in model.modules():
        attention = getattr(layer, "self_attn", None)
        if not isinstance(attention, nn.Module) or not hasattr(attention, "use_rope"):
            continue
        is_known = True
        if not attention.use_rope:
            attention.__dict__[_SCALE] = scale
            layer.register_forward_pre_hook(_pass_positions, with_kwargs=True)
    if not is_known:
        raise ValueError("it scales queries by position in an unknown way")


def _pass_positions(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, POSITIONS: kwargs["position_ids"]}


def chunk_of(module: nn.Module) -> int | None:
    """The chunk in which an attention module attends; None: it attends to all."""
    size: int | None = module.__dict__.get(_CHUNK)
    return size


def scaled_query(
    module: nn.Module, query: torch.Tensor, positions: torch.Tensor | None
) -> torch.Tensor:
    """The query [1, num_heads, T, dim] of an attention module; of those of `scale_by_position`,
    scaled by its tokens' positions [1, T].
    """
    scale: QueryScale | None = module.__dict__.get(_SCALE)
    if scale is None:
        return query
    if positions is None:
        raise TypeError("the model does not pass its positions on to attention")
    return (query * scale.of(positions)[:, None, :, None]).to(query.dtype)
