"""Multi-head latent attention with latents in the cache instead of keys and values.

Keys and values of all heads are made from one latent per token, and a rotated part of the key is
common to them (DeepSeek-AI 2024, arXiv 2405.04434). A cached token is that latent with the rotated
part behind it, once for all heads. Keys and values are never made: a query is multiplied by what
makes the keys, and what a head has gathered of latents by what makes the values.

- Transformers' models make keys and values in a method of their attention, `expand_kv`. It is tried
  with small numbers; one that does anything else is left alone, and its keys and values are cached.
- Both projections are views of the model's own weight.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

_PROJECTIONS = "latent_projections"  # attribute of a module whose latents are cached


class LatentProjections(NamedTuple):
    """The weights that expand latents into keys and values."""

    of_keys: torch.Tensor  # [num_heads, dim that is not rotated, rank]
    of_values: torch.Tensor  # [num_heads, rank, value_dim]

    @property
    def rank(self) -> int:
        """The size of a latent."""
        return self.of_keys.shape[2]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [num_heads, T, key_dim] for cached rows, [num_heads, T, rank + rotated dim]."""
        nope_dim = self.of_keys.shape[1]
        nope = torch.bmm(query[..., :nope_dim], self.of_keys)
        return torch.cat((nope, query[..., nope_dim:]), dim=-1)

    def expand(self, output: torch.Tensor) -> torch.Tensor:
        """Values [T, num_heads, value_dim] of gathered latents [T, num_heads, rank]."""
        return torch.bmm(output.transpose(0, 1), self.of_values).transpose(0, 1)


def cache_latents(model: nn.Module) -> None:
    """Make the model hand its latents to `paged_attention`, in place of keys and values.

    A model without latents stays as it is. Weights must not be replaced afterwards.
    """
    is_known: dict[type, bool] = {}
    module: Any
    for module in model.modules():
        kind = type(module)
        if kind not in is_known:
            is_known[kind] = _is_known(getattr(kind, "expand_kv", None))
        if is_known[kind] and module.kv_b_proj.bias is None:
            setattr(module, _PROJECTIONS, _projections(module, module.kv_b_proj.weight.detach()))
            module.expand_kv = _cached_row


def latent_projections(module: nn.Module) -> LatentProjections | None:
    """The projections of an attention that caches latents, or None for any other attention."""
    found: LatentProjections | None = module.__dict__.get(_PROJECTIONS)
    return found


def _projections(sizes: Any, weight: torch.Tensor) -> LatentProjections:
    """weight: [heads of (key and value) dims, rank]; of several ranks, this one's heads."""
    nope_dim = sizes.qk_nope_head_dim
    by_head = weight.view(-1, nope_dim + sizes.v_head_dim, weight.shape[1])
    return LatentProjections(by_head[:, :nope_dim], by_head[:, nope_dim:].transpose(1, 2))


def _cached_row(latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `expand_kv` by a key that begins with its value; both [1, 1, T, dim]."""
    return torch.cat((latent, rotated), dim=-1), latent


def _is_known(expand_kv: Callable[..., Any] | None) -> bool:
    """True if `expand_kv` makes keys and values as this module does."""
    if expand_kv is None:
        return False
    heads, rank, tokens = 2, 5, 3
    sizes = SimpleNamespace(qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3)
    width = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)
    with torch.device("cpu"):
        weight, latent, rotated = (
            torch.arange(float(rows * columns)).view(rows, columns)
            for rows, columns in ((width, rank), (tokens, rank), (tokens, sizes.qk_rope_head_dim))
        )
        sizes.kv_b_proj = lambda x: x @ weight.T
        made = _projections(sizes, weight)
        keys = torch.cat(
            (latent @ made.of_keys.transpose(1, 2), rotated.expand(heads, -1, -1)), dim=-1
        )
        values = latent @ made.of_values
        try:
            theirs = expand_kv(sizes, latent[None, None], rotated[None, None])
            return all(torch.equal(a[0], b) for a, b in zip(theirs, (keys, values), strict=True))
        except Exception:
            return False
