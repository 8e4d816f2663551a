"""The attention function that every model calls, registered with transformers.

It translates transformers' calling convention to an AttentionContext, which travels with each
forward and knows the cache and the device.

- The context is a keyword argument of the forward, passed by the model to its attention; there is
  no module or thread state. Where a model does not pass it, keys bring it (`own_attention`).
- An argument that cannot be honoured raises: ignoring it would compute something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from slipstream_core.attention.chunked_layers import chunk_of, scaled_query
from slipstream_core.attention.indexers import EVERY_TOKEN, EveryToken
from slipstream_core.attention.latent_attention import latent_projections

ATTENTION_NAME = "slipstream_paged"

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # the first since transformers 5.24
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


class NotPassedError(TypeError):
    """A model does not pass its keyword arguments on to attention."""


class SharedLayersError(ValueError):
    """Layers share a module, or attend several times in a forward."""


@dataclass(frozen=True)
class InContext:
    """Keys or values [1, num_kv_heads, T, dim] of a layer, and the context of their forward."""

    context: AttentionContext
    layer: int
    states: torch.Tensor


def cache_argument(forward: Callable[..., object]) -> str:
    """The name of a model's argument that takes its cache."""
    names = inspect.signature(forward).parameters
    return next((each for each in CACHE_NAMES if each in names), CACHE_NAMES[0])


class NoPast:
    """A cache of a model whose keys and values are in the paged cache."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """No past: positions come with the tokens."""
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0, as `get_seq_length` does."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys, for a mask that is not made."""
        return query_length, 0


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
    key: torch.Tensor | InContext,  # [1, num_kv_heads, T, key_dim]
    value: torch.Tensor | InContext,  # [1, num_kv_heads, T, value_dim]
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
    if isinstance(key, InContext) and isinstance(value, InContext):
        paged, key, value = key.context, key.states, value.states
    if paged is None:
        raise NotPassedError("the model does not pass its keyword arguments on to attention")
    assert isinstance(key, torch.Tensor)
    assert isinstance(value, torch.Tensor)
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
    if layer is None and not isinstance(paged, _CallOrder):
        raise SharedLayersError("a module that attends is of no layer")
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


@dataclass
class _CallOrder:
    """A context in which the cache has a layer for each call of attention, in order."""

    context: AttentionContext
    num_calls: int = 0

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attend as `AttentionContext.attend` does, whichever layer calls."""
        number = self.num_calls
        self.num_calls += 1
        return self.context.attend(number, query, key, value, params)


def number_calls(model: torch.nn.Module) -> None:
    """Give each attention call of a model's forward a layer of the cache of its own: layers may be
    shared, run several times or attend twice.
    """
    model.register_forward_pre_hook(_count_calls, with_kwargs=True)


def _count_calls(
    _: torch.nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    paged = kwargs.get("paged")
    return args, kwargs if paged is None else {**kwargs, "paged": _CallOrder(paged)}


def register() -> None:
    """Register the function with transformers as ATTENTION_NAME. Idempotent.

    No mask function is registered under that name, so transformers makes no mask.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
