"""Draws tokens from whole rows of logits on a card with one Triton kernel.

Without Triton, `sampler` draws with torch's operators instead and has to ask the device which rows
reach beyond the candidates.

- Nothing here depends on values on the device, so all of it can be recorded.
- A row's token depends only on its own logits, limits and key, not on the other rows of a launch.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from slipstream_core.runner.attention.triton_support import compiling, is_wanted, unready
from slipstream_core.runner.sampling.truncation_limits import TruncationLimits

_INTERPRETED_BLOCK = 256  # so that small vocabularies span several blocks


def whole_vocab_sampler(
    vocab_size: int, device: torch.device, *, model: str
) -> WholeVocabSampler | None:
    """A compiled sampler for rows of `vocab_size` logits; None if Triton is not available.

    Raises ModelLoadError if the kernel cannot be compiled.
    """
    if not is_wanted(device) or unready() is not None:
        return None
    with compiling(model, "sampling"):
        draws = WholeVocabSampler()
        draws.compile(vocab_size, device)
    return draws


class WholeVocabSampler:
    """Draws from whole rows of logits, for `sampler.sample` and recorded sampling."""

    def __init__(self) -> None:
        from slipstream_core.runner.sampling import whole_vocab_kernels

        self._kernel: Any = whole_vocab_kernels.redraw
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        self._block = _INTERPRETED_BLOCK if interpreted else whole_vocab_kernels.BLOCK
        self._num_warps = whole_vocab_kernels.NUM_WARPS

    def all(self, scaled: torch.Tensor, keys: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """One token per row from softmax(scaled), int64 [S]; keys int32 [2, S].

        wanted: int32 [S]; rows where it is 0 are skipped and get token 0.
        """
        token_ids = torch.zeros(len(scaled), dtype=torch.int64, device=scaled.device)
        self._kernel[(len(scaled),)](**self._arguments(scaled, token_ids, wanted, keys))
        return token_ids

    def further(
        self,
        limits: TruncationLimits,
        keys: torch.Tensor,
        wanted: torch.Tensor,
        token_ids: torch.Tensor,
        mass_limits: torch.Tensor,
    ) -> None:
        """Draw the wanted rows' tokens from their whole kept sets, into `token_ids` [S].

        wanted: bool [S]. mass_limits: float32 [S, 1]; a token is kept if likelier ones have less.
        """
        arguments = self._arguments(limits.scaled, token_ids, wanted.to(torch.int32), keys)
        arguments |= {
            "log_totals": limits.log_total.reshape(-1),
            "mass_limits": mass_limits.reshape(-1),
            "top_ks": limits.top_ks.to(torch.int32).reshape(-1),
            "leasts": limits.scaled.amax(-1) + limits.min_ps[:, 0].log(),
            "TRUNCATED": True,
        }
        self._kernel[(len(token_ids),)](**arguments)

    def compile(self, vocab_size: int, device: torch.device) -> list[Any]:
        """Compile both forms ahead of the first step; returns what Triton made of them."""
        scaled = torch.empty((1, vocab_size), device=device)
        ids, ints = (torch.empty(1, dtype=it, device=device) for it in (torch.int64, torch.int32))
        plain = self._arguments(scaled, ids, ints, ints[None])
        floats = scaled[:, 0]
        names = ("log_totals", "mass_limits", "leasts")
        truncated = plain | dict.fromkeys(names, floats) | {"top_ks": ints, "TRUNCATED": True}
        made = [self._kernel.warmup(grid=(1,), **each) for each in (plain, truncated)]
        if device.type == "cuda":  # `run` is a property that compiles the launcher on first access
            for each in made:
                each.run  # noqa: B018
        return made

    def _arguments(
        self,
        scaled: torch.Tensor,
        token_ids: torch.Tensor,
        wanted: torch.Tensor,
        keys: torch.Tensor,
    ) -> dict[str, Any]:
        return {
            "scaled": scaled,
            "token_ids": token_ids,
            "wanted": wanted,
            "keys": keys[0],
            "log_totals": None,
            "mass_limits": None,
            "top_ks": None,
            "leasts": None,
            "vocab_size": scaled.shape[1],
            "row_stride": scaled.stride(0),
            "TRUNCATED": False,
            "BLOCK": self._block,
            "num_warps": self._num_warps,
        }
