"""The shape of each layer's attention, read off one forward on the meta device.

A model without weights computes only shapes, and its attention calls carry everything needed, so no
architecture is known by name. A model is served only if every layer attends exactly once, or its
calls are numbered, through our attention function, with known arguments; anything else would run
and compute something else.
Where layers carry recurrent states (`state`), some of them may not attend.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slipstream_core.attention.cache_formats import CacheFormat, dtype_of, elements_of
from slipstream_core.attention.interface import (
    AttentionParams,
    SharedLayersError,
    TrialContext,
)

_META = torch.device("meta")


@dataclass(frozen=True, slots=True)
class LayerGeometry:
    """The shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None  # number of tokens a query sees, itself included; None is all
    softcap: float | None
    has_sinks: bool
    is_latent: bool = False  # a value is the beginning of its key, and not cached itself

    def bytes_per_token(self, dtype: torch.dtype, form: CacheFormat = "auto") -> int:
        """Bytes of cache that a token takes in this layer of a model that computes in `dtype`."""
        dims = (self.key_dim,) if self.is_latent else (self.key_dim, self.value_dim)
        width = sum(elements_of(form, dim) for dim in dims)
        return self.num_kv_heads * width * dtype_of(form, dtype).itemsize


class GeometryRecorder(TrialContext):
    """An attention context that records its calls and returns empty tensors."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerGeometry] = {}
        self.num_calls = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Record the call; shapes as in AttentionContext.attend."""
        self.num_calls += 1
        self.layers[layer] = LayerGeometry(
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[2],
            value_dim=value.shape[2],
            window=params.window,
            softcap=params.softcap,
            has_sinks=params.sinks is not None,
            is_latent=params.is_latent,
        )
        return query.new_empty(*query.shape[:2], value.shape[2])


class AllLogitsError(ValueError):
    """A model computes logits of all tokens where those of some were asked for."""


def read_geometry(
    model: Callable[..., object],
    num_layers: int,
    vocab_size: int,
    device: torch.device = _META,
) -> tuple[LayerGeometry, ...]:
    """Each layer's geometry, from a forward of a model; the meta device computes shapes alone.

    Raises ValueError if the layers do not attend once each through our function, AllLogitsError if
    logits are those of all tokens. Exceptions of the model itself propagate.
    """
    layers = read_attending_layers(model, vocab_size, device)
    if set(layers) != set(range(num_layers)):
        raise ValueError(
            f"{_calls(len(layers), len(layers))} where the configuration names {num_layers}"
        )
    return tuple(layers[i] for i in range(num_layers))


def read_attending_layers(
    model: Callable[..., object], vocab_size: int, device: torch.device = _META
) -> dict[int, LayerGeometry]:
    """Return the geometry of the layers that attend, by number; the others may carry states."""
    recorder = GeometryRecorder()
    ids = torch.zeros(1, min(8, vocab_size), dtype=torch.int64, device=device)
    keep = torch.zeros(2, dtype=torch.int64, device=device)
    with torch.inference_mode():
        output: Any = model(
            input_ids=ids,
            position_ids=ids,
            use_cache=False,
            logits_to_keep=keep,
            paged=recorder,
        )
    if recorder.num_calls != len(recorder.layers):
        raise SharedLayersError(_calls(recorder.num_calls, len(recorder.layers)))
    # if logits_to_keep were ignored, rows would be sampled from other rows' logits
    if output.logits.shape == (1, ids.shape[1], vocab_size):
        raise AllLogitsError("it computes logits of all tokens")
    if output.logits.shape != (1, len(keep), vocab_size):
        raise ValueError(
            f"its logits are {tuple(output.logits.shape)} where 1 x {len(keep)} chosen tokens x "
            f"vocabulary {vocab_size} were asked for"
        )
    return dict(sorted(recorder.layers.items()))


def _calls(num_calls: int, num_layers: int) -> str:
    return f"{num_calls} attention calls over {num_layers} layers"
