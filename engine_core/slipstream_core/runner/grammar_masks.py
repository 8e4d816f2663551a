"""Grammars' bitmasks on the device: what they forbid gets a logit of -inf.

Owns: the layout of the bits, 32 token ids to a word, the lowest id in the lowest bit. Does not
know: grammars, sampling.
"""

from __future__ import annotations

import torch

from slipstream_core.runner.plan import Int32s, Int64s


def apply_masks(logits: torch.Tensor, rows: Int64s, masks: Int32s) -> torch.Tensor:
    """A copy of `logits` [S, vocab] in which `rows` [G] keep only what `masks` allow.

    `masks` [G, ceil(vocab / 32)] int32, on the host; each allows something.
    """
    device = logits.device
    words = torch.from_numpy(masks).to(device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    allowed = (words[:, :, None] >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    index = torch.from_numpy(rows).to(device, non_blocking=True)
    return logits.index_copy(0, index, logits[index].masked_fill_(~allowed, -torch.inf))
