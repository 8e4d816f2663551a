"""Makes rotary embeddings keep their frequencies instead of recomputing them in every step.

Some of transformers' embeddings look at the largest position in each forward (longrope) or make
their frequencies anew on the host (Phi-3.5-MoE). On a card both make the host wait, and work that
waits cannot be recorded.

The numbers do not change: longrope is served up to the length where it uses only its short
frequencies (`unsupported.refuse_longrope`), which a module starts with, and types whose frequencies
change with the batch are refused.
"""

from __future__ import annotations

from typing import Any

import torch


def freeze_frequencies(module: torch.nn.Module) -> None:
    """Fix every rotary embedding of a model at its current frequencies."""
    for each in module.modules():
        rope: Any = each
        rope_type = getattr(rope, "rope_type", None)
        if rope_type is None or not hasattr(rope, "attention_scaling"):
            continue
        if rope_type == "longrope":
            rope.rope_type = "default"  # skips the check of positions in its forward
        frequencies = getattr(rope, "inv_freq", None)
        if callable(getattr(rope, "rope_init_fn", None)) and isinstance(frequencies, torch.Tensor):
            rope.rope_init_fn = _Known(rope)


class _Known:
    """Replaces rope_init_fn: returns the existing frequencies."""

    def __init__(self, rope: Any) -> None:
        # the dict, not the tensors: the module may move to another device
        self._buffers = rope._buffers
        self._scaling = float(rope.attention_scaling)

    def __call__(self, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:
        frequencies: torch.Tensor = self._buffers["inv_freq"]
        return frequencies, self._scaling
