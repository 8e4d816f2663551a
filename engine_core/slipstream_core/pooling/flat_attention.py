"""Attention among sequences that stand one behind another in a forward, each of which sees itself
alone. Nothing is cached, and nothing is padded.

A model calls it through transformers' attention interface. Arguments that are not known raise, as
ignoring them would compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from slipstream_core.attention.interface import WITHOUT_EFFECT

FLAT_ATTENTION = "slipstream_flat"

_WITHOUT_EFFECT = WITHOUT_EFFECT | {"deterministic"}


class FlatBatch:
    """The sequences of one forward. They stand sorted by length, so that equal ones are a batch."""

    def __init__(self, lens: Sequence[int]) -> None:
        """lens: tokens of each sequence, ascending."""
        self._groups: list[tuple[int, int, int]] = []  # first token, sequences, their length
        first = 0
        for length in lens:
            if self._groups and self._groups[-1][2] == length:
                begin, num, _ = self._groups[-1]
                self._groups[-1] = begin, num + 1, length
            else:
                self._groups.append((first, 1, length))
            first += length
        self._masks: dict[tuple[int, int, bool], torch.Tensor] = {}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None,
        is_causal: bool,
    ) -> torch.Tensor:
        """query [heads, T, key_dim], key and value [kv_heads, T, …]; returns [T, heads, value_dim].

        window: a token sees those that are less far away; None: all.
        """
        num_heads, num_tokens, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, value.shape[-1])
        for first, num, length in self._groups:
            own = slice(first, first + num * length)
            mask = None
            if window is not None and window < length:
                mask = self._mask(length, window, is_causal, query.device)
            attended = scaled_dot_product_attention(
                _batched(query[:, own], num),
                _batched(key[:, own], num),
                _batched(value[:, own], num),
                attn_mask=mask,
                is_causal=is_causal and mask is None,
                scale=scale,
                enable_gqa=key.shape[0] != num_heads,
            )
            output[own] = attended.transpose(1, 2).reshape(num * length, num_heads, -1)
        return output

    def _mask(
        self, length: int, window: int, is_causal: bool, device: torch.device
    ) -> torch.Tensor:
        """True where a query, by rows, sees a key; [length, length]."""
        key = length, window, is_causal
        mask = self._masks.get(key)
        if mask is None:
            positions = torch.arange(length, device=device)
            back = positions[:, None] - positions
            mask = (back < window) & (back >= 0) if is_causal else back.abs() < window
            self._masks[key] = mask
        return mask


def _batched(heads: torch.Tensor, num: int) -> torch.Tensor:
    """[heads, num * length, dim] as [num, heads, length, dim]."""
    return heads.reshape(heads.shape[0], num, -1, heads.shape[2]).transpose(0, 1)


def flat_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, T, key_dim]
    key: torch.Tensor,  # [1, kv_heads, T, key_dim]
    value: torch.Tensor,  # [1, kv_heads, T, value_dim]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    flat: FlatBatch | None = None,
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence; called by transformers in place of its own functions.

    Raises TypeError for a call that means something else.
    """
    if flat is None:
        raise TypeError("the model does not pass its keyword arguments on to attention")
    if attention_mask is not None:
        raise TypeError("the model builds its own attention mask")
    for name, argument in others.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise TypeError(f"the model passes {name!r} to attention, whose meaning is not known")
    is_causal = others.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    attended = flat.attend(
        query[0],
        key[0],
        value[0],
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        is_causal=bool(is_causal),
    )
    return attended[None], None


def register() -> None:
    """Register the function with transformers as FLAT_ATTENTION. Idempotent.

    No mask function is registered under that name, so transformers makes no mask.
    """
    AttentionInterface.register(FLAT_ATTENTION, flat_attention)
