"""Makes rotary embeddings keep their frequencies instead of recomputing them in every step.

Some of transformers' embeddings look at the largest position in each forward (dynamic, longrope) or
make their frequencies anew on the host (Phi-3.5-MoE). On a card both make the host wait, and work
that waits cannot be recorded.

The numbers do not change: longrope is served up to the length where it uses only its short
frequencies (`unsupported.refuse_longrope`), which a module starts with. Dynamic ones change beyond
`max_position_embeddings` tokens, and no row is longer.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from slipstream_core.model.unsupported import ropes

BY_LENGTH = ("dynamic", "longrope")  # look at positions in their forward
_SCALED = ("linear", "llama3", "yarn")  # by a factor, whatever a request's length


def carried_len(text: PreTrainedConfig, own: int) -> int:
    """The tokens that rope scaling carries a model to, if it says of how many it is a multiple; 0
    without. own: the model's limit.
    """
    lens = []
    for rope in ropes(getattr(text, "rope_parameters", None)):
        factor = rope.get("factor")
        if rope.get("rope_type") in _SCALED and isinstance(factor, int | float) and factor >= 1:
            original = rope.get("original_max_position_embeddings")
            is_known = isinstance(original, int) or rope["rope_type"] == "linear"
            if is_known:
                lens.append(int((original if isinstance(original, int) else own) * factor))
        else:
            return 0  # some layers are carried no further
    return min(lens, default=0)


def freeze_frequencies(module: torch.nn.Module) -> None:
    """Fix every rotary embedding of a model at its current frequencies."""
    for each in module.modules():
        rope: Any = each
        rope_type = getattr(rope, "rope_type", None)
        if rope_type is None or not hasattr(rope, "attention_scaling"):
            continue
        if rope_type in BY_LENGTH:
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
