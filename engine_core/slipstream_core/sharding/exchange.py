"""Exchanges of float32 over ranks on one machine's CPUs, through memory that they share.

gloo's take some hundred microseconds over loopback, most of which is its own; these take as long as
the copies and the wait for the slowest rank. All ranks make the same ones in the same order.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
from pathlib import Path
from typing import Any

import torch

from slipstream_core.sharding.rank import Rank
from slipstream_ipc.native.compiler import CLibrary, compiled

SLOT_BYTES = 1 << 20
_LINE = 64
_SOURCE = Path(__file__).with_name("exchange.c")
_Pointer, _Int = ctypes.c_void_p, ctypes.c_int64


class _SharedState(ctypes.Structure):
    """Exchange of exchange.c, which documents the fields."""

    _fields_ = (
        ("memory", _Pointer),
        ("rank", _Int),
        ("size", _Int),
        ("slot_bytes", _Int),
        ("count", _Int),
        ("timeout_s", _Int),
    )


class ExchangeTimeoutError(RuntimeError):
    """A rank has not come to an exchange in time."""


@functools.cache
def _library() -> ctypes.CDLL | None:
    path = compiled(CLibrary("ranks", (_SOURCE,), (), ("-pthread",), instead="gloo"))
    if path is None:
        return None
    library = ctypes.CDLL(str(path))
    library.slipstream_ranks_sum.argtypes = (_Pointer, _Pointer, _Pointer, _Int)
    library.slipstream_ranks_gather.argtypes = (_Pointer, _Pointer, _Pointer, _Int, _Int, _Int)
    library.slipstream_ranks_take.argtypes = (_Pointer, _Pointer, _Int)
    return library


class SharedExchange:
    """One rank's end. Calls are made one after another, and release the GIL."""

    def __init__(self, fd: int, rank: Rank, timeout_s: float, slot_bytes: int = SLOT_BYTES) -> None:
        """fd: of memory that all ranks have, zeros at first. Raises OSError without a compiler."""
        library = _library()
        if library is None:
            raise OSError("exchanges through shared memory need a C compiler")
        size = rank.size * (_LINE + 2 * slot_bytes)
        if os.fstat(fd).st_size < size:
            os.ftruncate(fd, size)
        self._memory = mmap.mmap(fd, size)
        self._anchor = ctypes.c_char.from_buffer(self._memory)
        self._library: Any = library
        self._slot_bytes = slot_bytes
        self._state = _SharedState(
            ctypes.addressof(self._anchor), rank.index, rank.size, slot_bytes, 0, int(timeout_s)
        )
        self._at = ctypes.addressof(self._state)

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, float32 on the CPU, with the same bits on each."""
        x = x.contiguous()
        total = torch.empty_like(x)
        check_exchange(
            self._library.slipstream_ranks_sum(self._at, x.data_ptr(), total.data_ptr(), x.numel())
        )
        return total

    @property
    def sum_call(self) -> tuple[int, int]:
        """For C: the address of the function that makes a sum, and that of its first argument, this
        rank's end. What it returns is for `check_exchange`.
        """
        function = ctypes.cast(self._library.slipstream_ranks_sum, _Pointer).value
        assert function is not None
        return function, self._at

    def may_gather(self, share: int) -> bool:
        """True if rows with this many columns per rank fit into a slot."""
        return 4 * share <= self._slot_bytes

    def gather(self, x: torch.Tensor, share: int, width: int) -> torch.Tensor:
        """The ranks' slices [*, own] of `share` columns, or what is left, as [*, width]."""
        x = x.contiguous()
        whole = x.new_empty(*x.shape[:-1], width)
        rows = whole.numel() // width
        check_exchange(
            self._library.slipstream_ranks_gather(
                self._at, x.data_ptr(), whole.data_ptr(), rows, share, width
            )
        )
        return whole

    def may_take(self, ids: torch.Tensor) -> bool:
        """True if these ids fit into a slot."""
        return ids.nbytes <= self._slot_bytes

    def take(self, ids: torch.Tensor) -> None:
        """Fill `ids`, dense int64, with those of the first rank."""
        assert ids.is_contiguous()
        check_exchange(self._library.slipstream_ranks_take(self._at, ids.data_ptr(), ids.numel()))


def check_exchange(code: int) -> None:
    """Raise ExchangeTimeoutError unless an exchange in C has returned 0."""
    if code:
        raise ExchangeTimeoutError("another rank has not come to an exchange in time")
