"""The attention function that every model calls, registered with transformers.

It translates transformers' calling convention to an AttentionContext, which travels with each
forward and knows the cache and the device.

- The context is a keyword argument of the forward, passed by the model to its attention; there is
  no module or thread state. A model that does not pass it is refused when it is loaded.
- An argument that cannot be honoured raises: ignoring it would compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from slipstream_core.attention.chunked_layers import chunk_of, scaled_query
from slipstream_core.attention.indexers import EVERY_TOKEN, EveryToken
from slipstream_core.attention.latent_attention import latent_projections

ATTENTION_NAME = "slipstream_paged"

_CACHE_LAYER = "cache_layer"  # attribute of a module whose layer has another number in the cache

# Arguments of transformers' attention functions without effect here: inference has no dropout,
# positions are already in the keys, and the context knows which tokens see which (a false
# `is_causal` is refused).
WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
        "logits_to_keep",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)


class AttentionParams(NamedTuple):
    """A layer's attention parameters beside query, key and value."""

    scale: float
    window: int | None = None  # number of tokens a query sees, itself included; None is all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], logits in the denominator only
    is_latent: bool = False  # a value is the beginning of its key, of which all heads share one
    chunk: int | None = None  # tokens see those of their chunk of so many positions; None is all


class CacheSlots(NamedTuple):
    """The slots of a layer's paged cache that take a step's keys and values."""

    keys: torch.Tensor  # [slots, num_kv_heads, key_dim], contiguous
    values: torch.Tensor  # [slots, num_kv_heads, value_dim]; the beginning of keys with latents
    kv_slots: torch.Tensor  # [T] int64, of each token


class AttentionContext(Protocol):
    """One forward's attention: its tokens' cache slots, and which tokens see which."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store T tokens' keys and values, then attend with their queries.

        query [T, num_heads, key_dim], key [T, num_kv_heads, key_dim], value [T, num_kv_heads,
        value_dim]. Returns [T, num_heads, value_dim], contiguous: recorded forwards rely on it.
        """


class TrialContext:
    """A context of a trial forward, in which no token has a past."""


class FusedContext(AttentionContext, Protocol):
    """The context of a fused forward, whose kernels may store keys and values before attention."""

    def cache_slots(self, layer: int) -> CacheSlots:
        """The slots that keys and values are stored in for `attend_stored`."""

    def attend_stored(
        self, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend as `attend` does, to keys and values that are stored already."""


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, T, value_dim]
    attention_mask: torch.Tensor | EveryToken | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: AttentionContext | None = None,
    query_positions: torch.Tensor | None = None,  # [1, T], where queries are scaled by them
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend over the paged cache; called by transformers in place of its own functions.

    Raises TypeError for a call that the paged cache cannot serve.
    """
    if paged is None:
        raise TypeError("the model does not pass its keyword arguments on to attention")
    if attention_mask is not None and attention_mask is not EVERY_TOKEN:
        raise TypeError("the model builds its own attention mask")
    if not (getattr(module, "is_causal", True) and others.get("is_causal", True) is not False):
        raise TypeError("its attention is not causal")
    for name, argument in others.items():
        if argument is not None and argument is not EVERY_TOKEN and name not in WITHOUT_EFFECT:
            raise TypeError(f"the model passes {name!r} to attention, whose meaning is not known")
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
        chunk=chunk_of(module),
    )
    query = scaled_query(module, query, query_positions)
    layer = module.__dict__.get(_CACHE_LAYER, module.layer_idx)
    assert isinstance(layer, int)
    heads = query[0]
    latents = latent_projections(module)
    if latents is not None:
        heads, params = latents.absorb(heads), params._replace(is_latent=True)
        if key.shape[1:] != (1, *heads.shape[1:]) or value.shape[3] != latents.rank:
            raise TypeError("the model passes other keys to attention than its latents")
    output = paged.attend(
        layer,
        heads.transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        params,
    )
    if latents is not None:
        output = latents.expand(output)
    return output[None], None


def number_layers(model: torch.nn.Module, attending: Sequence[int]) -> None:
    """Give the layers that attend, of a model in which some do not, the cache's layers in order."""
    numbers = {layer: number for number, layer in enumerate(attending)}
    for module in model.modules():
        number = numbers.get(getattr(module, "layer_idx", None))  # type: ignore[arg-type]
        if number is not None:
            module.__dict__[_CACHE_LAYER] = number


def register() -> None:
    """Register the function with transformers as ATTENTION_NAME. Idempotent.

    No mask function is registered under that name, so transformers makes no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
