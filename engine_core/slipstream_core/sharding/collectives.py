"""Exchange between the ranks of a core: operators of a forward, and numbers beside it.

The operators have forms on the meta device, so a recorded forward keeps them. All ranks call the
same ones in the same order, on tensors of the same shape. They use torch's default process group,
or memory that the ranks of one machine share: on its CPUs, and, for small sums, on its cards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import pad

from slipstream_core.sharding.exchange import SharedExchange
from slipstream_core.sharding.symmetric_memory import SymmetricSums

_Any: Any = distributed  # in part without annotations
# beside the group, which torch keeps as the process's, too
_shared: SharedExchange | None = None
_symmetric: SymmetricSums | None = None

# missing from torch's annotations
_library: Any = torch.library
_LIBRARY = _library.Library("slipstream", "FRAGMENT")
_LIBRARY.define("sum_over_ranks(Tensor x) -> Tensor")
_LIBRARY.define("gather_over_ranks(Tensor x, int width) -> Tensor")


_ANY_ORDER = 2  # ranks, of which a sum is the same in either


class ExchangeFailed(RuntimeError):  # noqa: N818  (an outcome, as StepFailed)
    """Another rank took no part in an exchange, mostly because it has ended."""


def exchange_by(
    shared: SharedExchange | None = None, symmetric: SymmetricSums | None = None
) -> None:
    """Exchange through this memory, of CPUs or of cards, what it takes; all else, and all without
    it, by the process group.
    """
    global _shared, _symmetric
    _shared, _symmetric = shared, symmetric


def shared_exchange() -> SharedExchange | None:
    """The exchange that sums float32 on CPUs, where the ranks share memory; None elsewhere."""
    return _shared


def share_of(width: int, size: int) -> int:
    """The columns of a rank's slice; the last slices may be shorter, or empty."""
    return -(-width // size)


def slice_of(width: int, index: int, size: int) -> tuple[int, int]:
    """The begin and the end of the slice of rank `index`."""
    share = share_of(width, size)
    return min(index * share, width), min((index + 1) * share, width)


def sum_over_ranks(x: torch.Tensor) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    total: torch.Tensor = torch.ops.slipstream.sum_over_ranks(x)
    return total


def gather_over_ranks(x: torch.Tensor, width: int) -> torch.Tensor:
    """The ranks' slices of the last dimension, side by side; `width` columns in all."""
    whole: torch.Tensor = torch.ops.slipstream.gather_over_ranks(x, width)
    return whole


def ids_from_lead(ids: torch.Tensor) -> None:
    """Fill `ids`, dense int64, with those of the first rank."""
    if _shared is not None and _shared.may_take(ids):
        _shared.take(ids)
    else:
        _exchange(_Any.broadcast, ids, 0)


def least_over_ranks(number: int, device: torch.device) -> int:
    """The least of the ranks' numbers."""
    least = torch.tensor([number], dtype=torch.int64, device=device)
    _exchange(_Any.all_reduce, least, _Any.ReduceOp.MIN)
    return int(least)


def all_ranks_say(said: bool, device: torch.device) -> bool:
    """True if `said` is true on all ranks."""
    return bool(least_over_ranks(int(said), device))


def _exchange(collective: Callable[..., object], *arguments: object) -> None:
    try:
        collective(*arguments)
    except RuntimeError as error:
        raise ExchangeFailed(str(error)) from error


def _sum(x: torch.Tensor) -> torch.Tensor:
    if _shared is not None and x.dtype == torch.float32:
        return _shared.sum(x)
    if _symmetric is not None and _symmetric.may_sum(x):
        return _symmetric.sum(x)
    total = x.clone(memory_format=torch.contiguous_format)
    if not total.numel():  # steps without logits pass no rows
        return total
    if total.dtype == torch.float32 and total.device.type == "cpu":
        size = _Any.get_world_size()
        if size > _ANY_ORDER:
            return _sum_in_order(total, size)
    _exchange(_Any.all_reduce, total)
    return total


def _sum_in_order(x: torch.Tensor, size: int) -> torch.Tensor:
    """The sum in the order of the ranks.

    Gloo's own order depends on where in the flat tensor an element is, so that a row's bits would
    depend on its batch.
    """
    parts = x.new_empty(size, *x.shape)
    _exchange(_Any.all_gather, list(parts.unbind(0)), x)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def _gather(x: torch.Tensor, width: int) -> torch.Tensor:
    *rows, own = x.shape
    if not x.numel() and 0 in rows:
        return x.new_empty(*rows, width)
    size = _Any.get_world_size()
    share = share_of(width, size)
    if _shared is not None and x.dtype == torch.float32 and _shared.may_gather(share):
        return _shared.gather(x, share, width)
    padded = pad(x, (0, share - own)) if own < share else x
    slices = x.new_empty(size, *rows, share)
    _exchange(_Any.all_gather, list(slices.unbind(0)), padded.contiguous())
    return slices.movedim(0, -2).reshape(*rows, size * share)[..., :width].contiguous()


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("sum_over_ranks", _sum, _device)
    _LIBRARY.impl("gather_over_ranks", _gather, _device)
_LIBRARY.impl(
    "sum_over_ranks", lambda x: torch.empty_like(x, memory_format=torch.contiguous_format), "Meta"
)
_LIBRARY.impl("gather_over_ranks", lambda x, width: x.new_empty(*x.shape[:-1], width), "Meta")
