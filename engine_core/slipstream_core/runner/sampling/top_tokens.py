"""The largest logits of each row, equal ones by id: the same for a row whoever shares its batch.

torch.topk leaves the order of equal values open, and on a card which of several equal ones at the
boundary it takes: it has several algorithms, and chooses one by the batch's shape. bfloat16 logits
are often equal. Nothing here makes a card wait.
"""

from __future__ import annotations

import torch

_SORTED_FROM = 2  # from a share of 1 in so many on, a whole sort is no dearer
_NOT_EQUAL = torch.iinfo(torch.int32).min


def most_likely(logits: torch.Tensor, num: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids, int64, both [N, num], of the `num` largest of `logits` [N, vocab]: by value,
    then by id.
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
        ids = _first_of_equals(logits, values, ids)
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _may_look(logits: torch.Tensor) -> bool:
    """Whether values may be asked for: a card would make the host wait."""
    return logits.device.type == "cpu"


def _first_of_equals(logits: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """`ids` with the lowest ones of those that equal the last value, in the place of any.

    values, ids: [N, num], of the largest; values descend, so those that equal the last come last.
    """
    least = values[:, -1:]
    order = -torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    equal = order.expand_as(logits).masked_fill(logits != least, _NOT_EQUAL)
    first = -equal.topk(values.shape[1], dim=-1).values  # no two are equal, but for the rest
    is_least = values == least
    nth = (is_least.cumsum(-1) - 1).clamp_(min=0)
    return torch.where(is_least, first.gather(1, nth).long(), ids)
