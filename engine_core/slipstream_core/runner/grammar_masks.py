"""Grammars' bitmasks on the device: what they forbid gets a logit of -inf.

Owns: the layout of the bits, 32 token ids to a word, the lowest id in the lowest bit. Does not
know: grammars, sampling. Beside the copy that it makes of the logits it takes a bounded amount of
memory, however many rows have masks.
"""

from __future__ import annotations

import torch

from slipstream_core.runner.plan import Int32s, Int64s
from slipstream_core.runner.upload import to_device

_LOGITS_AT_ONCE = 2**25  # temporaries of 128 MiB each


def apply_masks(logits: torch.Tensor, rows: Int64s, masks: Int32s) -> torch.Tensor:
    """A copy of `logits` [S, vocab] in which `rows` [G] keep only what `masks` allow.

    `masks` [G, ceil(vocab / 32)] int32, on the host; each allows something.
    """
    device, vocab_size = logits.device, logits.shape[1]
    words, index = to_device(masks, device), to_device(rows, device)
    bits = torch.arange(32, dtype=torch.int32, device=device)
    result = logits.clone()
    step = max(1, _LOGITS_AT_ONCE // vocab_size)
    for begin in range(0, len(rows), step):
        some, end = index[begin : begin + step], begin + step
        allowed = (words[begin:end, :, None] >> bits & 1).flatten(1)[:, :vocab_size].bool()
        result.index_copy_(0, some, logits[some].masked_fill_(~allowed, -torch.inf))
    return result
