"""The adapters that a model has loaded, as a table that kernels read.

An entry is the change of one site by one adapter: addresses of its factors and their rank. Each has
its own rank, and what an adapter does not change has rank 0: nothing is padded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

import numpy as np
import torch

from slipstream_core.adapters.adapter_file import Factors
from slipstream_core.adapters.sites import Site
from slipstream_core.kernels.cpu.kernels import Adapted, Kernels
from slipstream_core.kernels.cpu.step_adapters import StepAdapters
from slipstream_ipc.arrays import Int32s

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # as coded.h numbers them


class AdapterTable:
    """[places, sites] entries. A place that is not in use changes nothing."""

    def __init__(self, kernels: Kernels, sites: Mapping[str, Site], num_places: int) -> None:
        self._kernels = kernels
        self.sites = sites
        self._num_sites = len(sites)
        self._entries = (Adapted * (num_places * self._num_sites))()
        self._held: dict[int, Mapping[str, Factors]] = {}  # kept alive: entries have addresses

    def put(self, place: int, factors: Mapping[str, Factors]) -> None:
        """Let a place have these factors, by names of sites; no step may use it meanwhile."""
        self.clear(place)
        first = place * self._num_sites
        for name, (a, b) in factors.items():
            site = self.sites[name]
            assert a.shape == (len(a), site.num_inputs)
            assert b.shape == (len(a), site.num_outputs)
            self._entries[first + site.number] = Adapted(
                a.data_ptr(), b.data_ptr(), len(a), _KINDS[a.dtype], _KINDS[b.dtype]
            )
        self._held[place] = factors

    def clear(self, place: int) -> None:
        """Let a place change nothing, and free its factors; no step may use it meanwhile."""
        first = place * self._num_sites
        ctypes.memset(
            ctypes.addressof(self._entries) + first * ctypes.sizeof(Adapted),
            0,
            self._num_sites * ctypes.sizeof(Adapted),
        )
        self._held.pop(place, None)

    def of_step(self, of_tokens: Int32s, of_kept: Int32s) -> StepAdapters | None:
        """The adapters of a step's tokens [T], and of those whose logits are wanted; None if no
        token has one.
        """
        if not (of_tokens >= 0).any():
            return None
        return StepAdapters(
            self._kernels,
            np.ascontiguousarray(of_tokens, np.int32),
            np.ascontiguousarray(of_kept, np.int32),
            ctypes.addressof(self._entries),
            self._num_sites,
        )
