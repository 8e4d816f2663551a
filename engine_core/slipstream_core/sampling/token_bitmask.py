"""Bitmasks of token ids: 32 ids to a word, the lowest id in the lowest bit.

Forbidden ids get a logit of -inf. Apart from the copy of the logits, memory use is bounded however
many rows have masks.
"""

from __future__ import annotations

import numpy as np
import torch

from slipstream_core.step.plan import StepPlan
from slipstream_core.step.staging import to_device
from slipstream_ipc.arrays import Int32s, Int64s

_LOGITS_AT_ONCE = 2**25  # temporaries of 128 MiB each


def apply_masks(logits: torch.Tensor, rows: Int64s, masks: Int32s) -> torch.Tensor:
    """A copy of `logits` [S, vocab] in which `rows` [G] keep only what `masks` allow.

    `masks` is int32 [G, ceil(vocab / 32)] on the host; each allows at least one id.
    """
    words, index = to_device(masks, logits.device), to_device(rows, logits.device)
    result = logits.clone()
    keep_allowed(result, index, words)
    return result


def masked_rows(plan: StepPlan) -> Int64s:
    """The sampled rows that have a mask of their own: of a grammar, or of masked ids; ascending."""
    if not len(plan.grammar_rows) and not len(plan.masked_rows):  # at nearly every step
        return plan.masked_rows
    return np.union1d(plan.grammar_rows, plan.masked_rows)


def masks_of(plan: StepPlan, masks: Int32s | None, vocab_size: int) -> Int32s:
    """The bitmasks of ids that `masked_rows` may sample, int32 [M, ceil(vocab / 32)]: the grammars'
    masks, passed if the plan awaits some, without masked ids.
    """
    rows = masked_rows(plan)
    found = np.full((len(rows), -(-vocab_size // 32)), -1, np.int32)
    if masks is not None:
        found[np.searchsorted(rows, plan.grammar_rows), : masks.shape[1]] = masks
    if len(plan.masked_rows):
        at = np.searchsorted(rows, plan.masked_rows), plan.masked_ids >> 5
        bits = (np.uint32(1) << (plan.masked_ids & 31).astype(np.uint32)).view(np.int32)
        np.bitwise_and.at(found, at, ~bits)
    return found


def keep_allowed(
    logits: torch.Tensor,
    rows: torch.Tensor,
    masks: torch.Tensor,
    which: torch.Tensor | None = None,
) -> None:
    """Let `rows` [G] of `logits` [S, vocab] keep only what their masks allow, in place.

    `rows` int64 and `masks` int32 [*, ceil(vocab / 32)] are on the logits' device. `which` int64
    [G] is the index of each row's mask; None means one mask per row, in order.
    """
    vocab_size = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    step = max(1, _LOGITS_AT_ONCE // vocab_size)
    for begin in range(0, len(rows), step):
        some, end = rows[begin : begin + step], begin + step
        words = masks[begin:end] if which is None else masks[which[begin:end]]
        allowed = (words[:, :, None] >> bits & 1).flatten(1)[:, :vocab_size].bool()
        logits.index_copy_(0, some, logits[some].masked_fill_(~allowed, -torch.inf))
