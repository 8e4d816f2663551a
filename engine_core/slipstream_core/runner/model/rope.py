"""Rotary embeddings that compute their frequencies once, not in every step.

Owns what is done to a loaded model's modules to that end. Some of transformers' look in each
forward at the largest position (longrope) or make their frequencies anew on the host
(Phi-3.5-MoE): on a card either makes the host wait, and nothing that waits can be recorded.

Rule: the numbers stay what they are. longrope is served up to the length where its frequencies are
the short ones alone (`refusals.refuse_longrope`), which are those that a module begins with; types
whose frequencies change with the batch are refused.
"""

from __future__ import annotations

from typing import Any

import torch


def freeze_frequencies(module: torch.nn.Module) -> None:
    """Keep every rotary embedding of a model at the frequencies that it has now."""
    for each in module.modules():
        rope: Any = each
        rope_type = getattr(rope, "rope_type", None)
        if rope_type is None or not hasattr(rope, "attention_scaling"):
            continue
        if rope_type == "longrope":
            rope.rope_type = "default"  # what its forward asks before it looks at positions
        frequencies = getattr(rope, "inv_freq", None)
        if callable(getattr(rope, "rope_init_fn", None)) and isinstance(frequencies, torch.Tensor):
            rope.rope_init_fn = _Known(rope)


class _Known:
    """In place of the function that makes frequencies: those that are there."""

    def __init__(self, rope: Any) -> None:
        # not the tensors: the module may move to another device
        self._buffers = rope._buffers
        self._scaling = float(rope.attention_scaling)

    def __call__(self, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
        frequencies: torch.Tensor = self._buffers["inv_freq"]
        return frequencies, self._scaling
