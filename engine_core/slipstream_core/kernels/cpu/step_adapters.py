"""The adapters of one step's tokens, as a forward applies them."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from slipstream_core.kernels.cpu.kernels import Adapt, Adapted, Kernels, dense_rows
from slipstream_ipc.arrays import Int32s

_ENTRY_BYTES = ctypes.sizeof(Adapted)


class AdapterArguments(NamedTuple):
    """Arguments of a list of operations: the address of the rows' adapters and of the table, and
    the number of sites.
    """

    adapters: int
    adapted: int
    sites: int


class StepAdapters:
    """The adapters of a step: -1 where there is none."""

    def __init__(
        self,
        kernels: Kernels,
        of_tokens: Int32s,  # [T], contiguous
        of_kept: Int32s,  # [S], of the tokens whose logits are wanted
        entries: int,
        num_sites: int,
    ) -> None:
        """entries: the address of a table [adapters, num_sites], which outlives the step."""
        self._kernels = kernels
        self._of_tokens = of_tokens
        self._of_kept = of_kept
        self._entries = entries
        self._num_sites = num_sites

    @property
    def arguments(self) -> AdapterArguments:
        """The arguments of a step in which each row has one token."""
        return AdapterArguments(self._of_tokens.ctypes.data, self._entries, self._num_sites)

    def adapt(
        self, y: torch.Tensor, x: torch.Tensor, site: int, *, is_of_kept: bool
    ) -> torch.Tensor:
        """y [1, rows, n] changed by the rows' adapters, whose input was x [1, rows, k]; in place
        where y lies by row. is_of_kept: rows are the tokens whose logits are wanted.
        """
        x, y = dense_rows(x), dense_rows(y)
        of_rows = self._of_kept if is_of_kept else self._of_tokens
        _, rows, num_outputs = y.shape
        assert len(of_rows) == rows
        call = Adapt(
            x=x.data_ptr(),
            x_row=x.stride(1),
            y=y.data_ptr(),
            y_row=y.stride(1),
            rows=rows,
            k=x.shape[2],
            n=num_outputs,
            adapters=of_rows.ctypes.data,
            adapted=self._entries + site * _ENTRY_BYTES,
            apart=self._num_sites,
        )
        self._kernels.adapt(ctypes.addressof(call))
        return y
