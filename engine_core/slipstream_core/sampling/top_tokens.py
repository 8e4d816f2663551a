"""The largest logits of each row, ties ordered by id, independent of the other rows of the batch.

torch.topk leaves the order of equal values open, and on a card also which of several equal values
at the boundary it takes: it picks an algorithm by the batch's shape. bfloat16 logits are often
equal. Nothing here makes the host wait for a card.
"""

from __future__ import annotations

import torch

_SORTED_FROM = 2  # if num is at least 1 / _SORTED_FROM of the vocabulary, sort the whole row
_NOT_EQUAL = torch.iinfo(torch.int32).min


def most_likely(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` largest of `logits` [N, vocab], by value, then by id.

    Returns values and int64 ids, both [N, num].
    """
    if num * _SORTED_FROM >= logits.shape[1]:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return values[:, :num], ids[:, :num]
    values, ids = logits.topk(num, dim=-1)
    if _may_look(logits):
        rows = ((logits >= values[:, -1:]).sum(-1) > num).nonzero()[:, 0]
        if len(rows):
            ids[rows] = _first_of_equals(logits[rows], values[rows], ids[rows])
    else:
        # always on a card, as asking would make the host wait (decision 022)
        ids = _first_of_equals(logits, values, ids)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _may_look(logits: torch.Tensor) -> bool:
    """True if reading values is free; on a card the host would wait for them."""
    return logits.device.type == "cpu"


def _first_of_equals(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`ids` with the ties at the last value replaced by the lowest ids of that value.

    `values` and `ids` are [N, num]; values descend, so ties with the last one stand at the end.
    """
    least = values[:, -1:]
    order = -torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    equal = order.expand_as(logits).masked_fill(logits != least, _NOT_EQUAL)
    first = -equal.topk(values.shape[1], dim=-1).values  # distinct, apart from _NOT_EQUAL
    is_least = values == least
    nth = (is_least.cumsum(-1) - 1).clamp_(min=0)
    return torch.where(is_least, first.gather(1, nth).long(), ids)


def logprob_columns(
    logits: torch.Tensor, token_ids: torch.Tensor, num: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, ids and ranks as in `sampler.RawLogprobs`, for each row's token and the `num` most
    likely.
    """
    sampled = logits.gather(1, token_ids[:, None])
    ranks = (logits > sampled).sum(-1) + 1
    values, ids = sampled, token_ids[:, None]
    if num > 0:
        top_values, top_ids = most_likely(logits, num)
        values, ids = torch.cat([sampled, top_values], 1), torch.cat([ids, top_ids], 1)
    return values - logits.logsumexp(-1, keepdim=True), ids, ranks
