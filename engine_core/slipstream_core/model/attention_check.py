"""Checks that a loaded model's tokens interact in attention and nowhere else.

Serving puts the tokens of many requests side by side in one sequence and separates them in our
attention function. A model that mixes neighbours elsewhere (convolutions, recurrent states, token
shift), or that counts tokens instead of reading the positions it is given, would run and compute
something else.

The check runs a forward in which each token attends only to itself, with one token's embedding set
to NaN. Whatever that token influences becomes NaN too, so no tolerance is needed.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from slipstream_core.attention.interface import AttentionParams, TrialContext

_NUM_TOKENS = 4


class SelfAttention(TrialContext):
    """An attention context in which each token attends only to itself."""

    def __init__(self, *, stop: bool = False) -> None:
        self.first_keys = torch.empty(0)
        self._stop = stop

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Return each token's own value, per query head; shapes as in AttentionContext.attend."""
        if layer == 0:
            self.first_keys = key.clone()
            if self._stop:
                raise _EnoughError
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


class _EnoughError(Exception):
    """Ends a forward early, once the first layer's keys are known."""


def check_independence(module: Any, *, vocab_size: int, max_model_len: int) -> None:
    """Raise ValueError if tokens interact outside attention, or the positions are ignored."""
    num_tokens = min(_NUM_TOKENS, max_model_len)
    device = module.device
    ids = torch.arange(num_tokens, device=device) % vocab_size
    positions = torch.arange(num_tokens, device=device)
    poisoned = num_tokens // 2
    others = [token for token in range(num_tokens) if token != poisoned]

    def run(order: torch.Tensor, context: SelfAttention) -> torch.Tensor:
        logits: torch.Tensor = module(
            input_ids=ids[order][None],
            position_ids=positions[order][None],
            use_cache=False,
            paged=context,
        ).logits[0]
        return logits

    def poison(_module: object, _inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
        embeddings = embeddings.clone()
        embeddings[:, poisoned] = torch.nan
        return embeddings

    with torch.inference_mode():
        in_order, reverse = SelfAttention(), SelfAttention(stop=True)
        hook = module.get_input_embeddings().register_forward_hook(poison)
        try:
            logits = run(positions, in_order)
        finally:
            hook.remove()
        if logits[others].isnan().any() and not run(positions, SelfAttention()).isnan().any():
            raise ValueError("its tokens influence each other outside of attention")
        if not in_order.first_keys.numel():
            return  # no layer attends
        with contextlib.suppress(_EnoughError):
            run(positions.flip(0), reverse)
        ours = in_order.first_keys[others].float()
        theirs = reverse.first_keys.flip(0)[others].float()
        # a different order of sums rounds differently; a wrong position is off by far more
        if (ours - theirs).abs().max() > 0.05 * ours.abs().max():
            raise ValueError("it counts its tokens instead of using the given positions")
