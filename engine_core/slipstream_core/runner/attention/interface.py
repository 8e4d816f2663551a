"""The one attention function that every model calls, registered with transformers.

Owns the translation from transformers' calling convention to ours. Knows no cache and no device:
both lie behind the AttentionContext that travels with each forward.

Rules:
- The context is a keyword argument of the forward, handed on by the model to its attention: no
  state of a module or of a thread. A model that does not hand it on is refused when it is loaded.
- What cannot be honoured raises. An argument that is ignored here would be a model that runs and
  computes something else.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from transformers import AttentionInterface

ATTENTION_NAME = "slipstream_paged"

# Arguments of transformers' attention functions that change nothing here: inference has no
# dropout, positions are already in the keys, and the context knows which tokens see which (an
# `is_causal` that is not so is refused).
_WITHOUT_EFFECT = frozenset(
    {
        "cache_position",
        "dropout",
        "is_causal",
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
    """What a layer asks beside its query, key and value."""

    scale: float
    window: int | None = None  # tokens a query sees, itself included; None is all
    softcap: float | None = None  # scores s become softcap * tanh(s / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], a logit per head that takes mass, gives none


class AttentionContext(Protocol):
    """One forward's attention: where its tokens lie in the cache, and who sees whom."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store T tokens' keys and values, attend with their queries.

        query [T, num_heads, key_dim], key [T, num_kv_heads, key_dim], value [T, num_kv_heads,
        value_dim]; returns [T, num_heads, value_dim], dense: recorded forwards rely on it.
        """


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, T, key_dim]
    key: torch.Tensor,  # [1, num_kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, num_kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    paged: AttentionContext | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend over the paged cache; what transformers calls in place of its own functions."""
    if paged is None:
        raise TypeError("the model does not hand its keyword arguments on to attention")
    if attention_mask is not None:
        raise TypeError("the model makes an attention mask of its own")
    if not (getattr(module, "is_causal", True) and others.get("is_causal", True) is not False):
        raise TypeError("its tokens attend to those that come after them")
    for name, argument in others.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise TypeError(f"the model passes {name!r} to attention, whose meaning is not known")
    params = AttentionParams(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    layer = module.layer_idx
    assert isinstance(layer, int)
    output = paged.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        params,
    )
    return output[None], None


def register() -> None:
    """Make the function known to transformers by ATTENTION_NAME. Idempotent.

    No mask is registered under the name: transformers then makes none.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)
