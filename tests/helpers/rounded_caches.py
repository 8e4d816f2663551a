"""Keys and values as a cache of 8 bits holds them, by torch."""

from __future__ import annotations

from typing import Any

import torch

from slipstream_core.attention.cache_formats import CacheFormat
from slipstream_core.attention.interface import AttentionParams


def encoded(form: CacheFormat, numbers: torch.Tensor) -> torch.Tensor:
    """The codes of numbers [..., dim], as the cache lays them: [..., elements] uint8."""
    if form == "fp8_e4m3":
        return numbers.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    if not numbers.numel():
        return numbers.new_zeros(*numbers.shape[:-1], numbers.shape[-1] + 4, dtype=torch.uint8)
    scales = numbers.abs().amax(-1, keepdim=True) / 127
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    codes = torch.where(scales > 0, torch.round(numbers / scales), 0)
    codes = codes.clamp(-127, 127).to(torch.int8)  # a subnormal scale may have been rounded down
    return torch.cat([codes.view(torch.uint8), scales.view(torch.uint8)], dim=-1)


def decoded(form: CacheFormat, codes: torch.Tensor) -> torch.Tensor:
    """The numbers that are stored, in float32: [..., elements] uint8 gives [..., dim]."""
    if form == "fp8_e4m3":
        return codes.view(torch.float8_e4m3fn).float()
    scales = codes[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    return codes[..., :-4].contiguous().view(torch.int8).float() * scales


class RoundedHistory:
    """An attention context of one row, which keeps what a cache of this format would hold."""

    def __init__(self, form: CacheFormat) -> None:
        self._form = form
        self._layers: dict[int, Any] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Shapes as in AttentionContext.attend."""
        key, value = (decoded(self._form, encoded(self._form, each)) for each in (key, value))
        before = self._layers.get(layer)
        if before is not None:
            key, value = (torch.cat(both) for both in zip(before, (key, value), strict=True))
        self._layers[layer] = key, value
        if params.is_latent:
            value = key[..., : value.shape[2]]
        group = query.shape[1] // key.shape[1]
        keys, values = (each.repeat_interleave(group, dim=1).double() for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        ends = torch.arange(len(key) - len(query), len(key))[:, None]
        positions = torch.arange(len(key))
        hidden = positions > ends
        if params.window is not None:
            hidden |= positions <= ends - params.window
        scores = scores.masked_fill(hidden, -torch.inf)
        if params.sinks is not None:
            sinks = params.sinks.double()[:, None, None].expand(-1, len(query), 1)
            scores = torch.cat([scores, sinks], dim=-1)
        probs = scores.softmax(-1)[..., : len(key)]
        return torch.einsum("hqk,khd->qhd", probs, values).to(query.dtype)
