"""Small sums over the cards of one machine, through memory that each of them reads in all others.

NCCL is made for large tensors. A decode step's sums are a few hundred KiB at most, two in each
layer, so what counts is their latency: here a card writes its part where the others can reach it,
waits for them and adds up what they wrote, in one or two launches that a CUDA graph may hold. The
kernels are those of torch's symmetric memory (torch/csrc/distributed/c10d/symm_mem).

Every rank gets the same bits, as ranks that differ may route a token to different experts. The
one-shot kernel starts with the own part, so only two ranks use it; of 4 and 8 each adds up a share
and the others read it. These kernels exist for no other number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

BUFFER_BYTES = 512 << 10
SIZES = (2, 4, 8)
_ALIGNMENT = 16  # bytes that the kernels move at once
_DTYPES = (torch.bfloat16, torch.float32)

_operators: Any = torch.ops.symm_mem


class SymmetricSums:
    """One rank's buffer. Calls are made in the same order on all ranks, on one stream."""

    def __init__(self, buffer: torch.Tensor, group: str, size: int) -> None:
        """buffer: bytes that the group's `size` ranks have had a rendezvous about."""
        self._buffer = buffer
        self._group = group
        self._size = size

    def may_sum(self, x: torch.Tensor) -> bool:
        """True if sums of such tensors are computed here; alike on all ranks, as are their
        shapes.
        """
        fits = 0 < x.nbytes <= self._buffer.nbytes and x.nbytes % _ALIGNMENT == 0
        return fits and x.dtype in _DTYPES

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, with the same bits on each."""
        shared = self._buffer[: x.nbytes].view(x.dtype).view(x.shape)
        total: torch.Tensor
        if self._size > 2:
            shared.copy_(x)
            total = torch.empty_like(shared)
            _operators.two_shot_all_reduce_out(shared, "sum", self._group, total)
            return total
        if not x.is_contiguous() or x.storage_offset() * x.itemsize % _ALIGNMENT:
            x = x.clone(memory_format=torch.contiguous_format)
        total = _operators.one_shot_all_reduce_copy(shared, x, "sum", self._group)
        return total


def join_symmetric(
    device: torch.device, group: Any, all_say: Callable[[bool], bool]
) -> SymmetricSums:
    """The sums of a process group's ranks on one machine, which all call this.

    all_say: whether all ranks say so; each asks as often as the others. Raises RuntimeError on all
    of them where one cannot.
    """
    from torch.distributed import _symmetric_memory

    symmetric: Any = _symmetric_memory  # in part without annotations
    size = group.size()
    if size not in SIZES:
        numbers = ", ".join(map(str, SIZES))
        raise RuntimeError(f"there are {size} ranks, and kernels for {numbers}")

    def try_all(work: Callable[[], Any]) -> Any:
        done = error = None
        try:
            done = work()
        except RuntimeError as caught:
            error = caught
        if not all_say(error is None):
            raise error or RuntimeError("another rank has none")
        return done

    # agreed on in turn: none comes to a rendezvous that another one stays away from
    buffer = try_all(lambda: symmetric.empty(BUFFER_BYTES, dtype=torch.uint8, device=device))
    try_all(lambda: symmetric.rendezvous(buffer, group))
    return SymmetricSums(buffer, group.group_name, size)
