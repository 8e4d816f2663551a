"""A head that several ranks share leaves its logits in slices: what needs whole rows gathers them.

What models do behind their heads (soft caps, scales) is by element, so it is the same in slices.
That is tried, and a model that does anything else goes on gathering in its forward.
"""

from __future__ import annotations

from typing import Any

import torch

from slipstream_core.forward.projection import SlicedOutputs
from slipstream_core.model.attention_check import SelfAttention
from slipstream_core.sharding.collectives import least_over_ranks, share_of, slice_of
from slipstream_core.sharding.rank import Rank

_NUM_TOKENS = 3
_TOLERANCE = 1e-4  # relative to the largest logit: soft caps may round otherwise at a slice's end


def slice_head(module: Any, vocab_size: int, rank: Rank) -> bool:
    """Have the model return this rank's columns of the logits; return True if it can.

    All ranks have to call this, and it is the same on all. It is not done where the plan leaves the
    head whole, or a rank would have no column.
    """
    head = module.get_output_embeddings()
    if not isinstance(head, SlicedOutputs) or head.num_outputs != vocab_size:
        return False
    if (rank.size - 1) * share_of(vocab_size, rank.size) >= vocab_size:
        return False
    begin, end = slice_of(vocab_size, rank.index, rank.size)
    with torch.inference_mode():
        expected = _few_logits(module, vocab_size)[:, begin:end]
        head.is_gathered = False
        try:
            same = _are_close(_few_logits(module, vocab_size), expected)
        except Exception:  # whatever does not take a slice
            same = False
    if least_over_ranks(int(same), module.device):
        return True
    head.is_gathered = True
    return False


def _few_logits(module: Any, vocab_size: int) -> torch.Tensor:
    ids = torch.arange(_NUM_TOKENS, device=module.device)
    logits: torch.Tensor = module(
        input_ids=ids[None] % vocab_size,
        position_ids=ids[None],
        use_cache=False,
        paged=SelfAttention(),
    ).logits[0]
    return logits


def _are_close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    if given.shape != expected.shape:
        return False
    return bool((given - expected).abs().max() <= _TOLERANCE * expected.abs().max())
