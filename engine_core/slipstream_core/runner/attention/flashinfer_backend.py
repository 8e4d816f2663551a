"""Attention on a card by FlashInfer's wrappers, instead of Triton's kernels.

FlashInfer plans on the host, once a step for all layers that see as much. Decode rows go to its
decode wrapper, on tensor cores, prefill rows to its prefill wrapper; both read the cache's blocks
in place, as pages with their tokens first (NHD). Keys and values are stored by torch.

- Lengths and block numbers come from the host, so steps are not recorded as CUDA graphs.
- A wrapper copies its plan to the card from pinned memory of its own, which the next plan writes
  again. Wrappers are used in turns, so that a plan is not written over while its copy waits behind
  the steps in flight.
- The float workspace is shared: wrappers run one after another, on one stream. It is made in the
  first step, so that the largest step's memory includes it.
- A block need not be cleared when it is begun: the wrappers read as far as a row is long.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream_core.runner.attention.geometry import LayerGeometry
from slipstream_core.runner.attention.interface import AttentionParams
from slipstream_core.runner.attention.kv_cache import LayerCache
from slipstream_core.runner.staging import to_device
from slipstream_core.step.plan import Int32s, StepPlan

_WORKSPACE_BYTES = 128 << 20  # FlashInfer's recommendation
_IN_TURN = 3  # two steps in flight and one that is planned
_DIMS = (64, 128, 256)  # of heads, for which FlashInfer has kernels without compiling others
_TYPES = (torch.float16, torch.bfloat16)
_LAYOUT = "NHD"  # pages are [block_size, num_kv_heads, dim]


def why_no_flashinfer(
    geometry: Sequence[LayerGeometry], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why FlashInfer cannot serve this model here; None if it can."""
    if device.type != "cuda":
        return "FlashInfer needs an NVIDIA card, and the device is the CPU"
    if importlib.util.find_spec("flashinfer") is None:
        return "FlashInfer is not installed (pip install flashinfer-python)"
    if dtype not in _TYPES:
        return f"FlashInfer computes in float16 and bfloat16, and the model in {_name(dtype)}"
    for layer in geometry:
        if layer.has_sinks:
            return "the model has attention sinks, which this back end does not pass on"
        if layer.key_dim != layer.value_dim:
            return (
                f"heads have keys of {layer.key_dim} and values of {layer.value_dim} numbers, and "
                "this back end is for equal ones"
            )
        if layer.key_dim not in _DIMS:
            return f"heads have {layer.key_dim} numbers, and this back end is for 64, 128 and 256"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Form(NamedTuple):
    """What a plan depends on beside the rows; layers of one form share it."""

    num_heads: int
    num_kv_heads: int
    dim: int
    scale: float
    window: int | None
    softcap: float | None


class _Wrappers(NamedTuple):
    decode: Any
    prefill: Any


class _Rows(NamedTuple):
    """Rows that are planned together, on the host but for the pages."""

    starts: torch.Tensor  # [R + 1] int32: of each row's pages
    pages: torch.Tensor  # int32, on the device
    in_last: torch.Tensor  # [R] int32: tokens in the last page
    query_starts: torch.Tensor  # [R + 1] int32


class FlashInferAttention:
    """A model's attention on one card, which makes a context for each step."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.block_size = block_size
        self.dtype = dtype
        self.device = device
        self._library: Any = importlib.import_module("flashinfer")
        self._workspace: torch.Tensor | None = None
        self._sets: list[dict[_Form, _Wrappers]] = [{} for _ in range(_IN_TURN)]
        self._at = 0

    def of_plan(self, plan: StepPlan, block_tables: Int32s) -> FlashInferContext:
        """The context of a plan; block_tables [slots, width] are on the host."""
        self._at = (self._at + 1) % _IN_TURN
        return FlashInferContext(self, plan, block_tables)

    def wrappers(self, form: _Form) -> _Wrappers:
        """Those of this step, for layers of one form."""
        made = self._sets[self._at]
        if form not in made:
            if self._workspace is None:  # the decode wrapper wants zeros at first
                self._workspace = torch.zeros(
                    _WORKSPACE_BYTES, dtype=torch.uint8, device=self.device
                )
            made[form] = _Wrappers(
                self._library.BatchDecodeWithPagedKVCacheWrapper(
                    self._workspace, _LAYOUT, use_tensor_cores=True
                ),
                self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, _LAYOUT),
            )
        return made[form]


class FlashInferContext:
    """An AttentionContext over the paged cache, for one step."""

    def __init__(
        self, attention: FlashInferAttention, plan: StepPlan, block_tables: Int32s
    ) -> None:
        self._attention = attention
        self._num_decodes = num = plan.num_decodes
        self._kv_slots = to_device(plan.kv_slots, attention.device)
        size, device = attention.block_size, attention.device
        self._decodes = self._prefills = None
        if num:
            self._decodes = _rows(plan, slice(num), block_tables, size, device)
        if num < plan.num_requests:
            self._prefills = _rows(plan, slice(num, None), block_tables, size, device)
        self._planned: dict[_Form, _Wrappers] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        cache, size = self._attention.layers[layer], self._attention.block_size
        cache.store(self._kv_slots, key, value)
        num_heads, num_kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
        form = _Form(num_heads, num_kv_heads, dim, params.scale, params.window, params.softcap)
        if form not in self._planned:
            self._planned[form] = self._plan(form)
        wrappers = self._planned[form]
        pages = tuple(part.view(-1, size, num_kv_heads, dim) for part in (cache.keys, cache.values))
        query = query.contiguous()
        output = torch.empty_like(query)
        split = self._num_decodes
        if self._decodes is not None:
            wrappers.decode.run(query[:split], pages, out=output[:split])
        if self._prefills is not None:
            wrappers.prefill.run(query[split:], pages, out=output[split:])
        return output

    def _plan(self, form: _Form) -> _Wrappers:
        attention = self._attention
        wrappers = attention.wrappers(form)
        shared = {
            "window_left": -1 if form.window is None else form.window - 1,
            "logits_soft_cap": form.softcap,
            "sm_scale": form.scale,
            "q_data_type": attention.dtype,
            "kv_data_type": attention.dtype,
        }
        sizes = form.num_heads, form.num_kv_heads, form.dim, attention.block_size
        if (rows := self._decodes) is not None:
            wrappers.decode.plan(rows.starts, rows.pages, rows.in_last, *sizes, **shared)
        if (rows := self._prefills) is not None:
            wrappers.prefill.plan(
                rows.query_starts,
                rows.starts,
                rows.pages,
                rows.in_last,
                *sizes,
                causal=True,  # a row's queries are its last tokens
                **shared,
            )
        return wrappers


def _rows(
    plan: StepPlan, some: slice, block_tables: Int32s, block_size: int, device: torch.device
) -> _Rows:
    kv_lens = plan.kv_lens[some]
    num_pages = -(-kv_lens // block_size)
    starts = _starts(num_pages)
    numbers = np.arange(starts[-1]) - np.repeat(starts[:-1], num_pages)
    pages = block_tables[np.repeat(plan.slots[some], num_pages), numbers]
    return _Rows(
        torch.from_numpy(starts),
        to_device(pages, device),
        torch.from_numpy(kv_lens - (num_pages - 1) * np.int32(block_size)),
        torch.from_numpy(_starts(plan.query_lens[some])),
    )


def _starts(lens: Int32s) -> Int32s:
    """Where each of adjacent spans begins, and the end of the last, [len(lens) + 1]."""
    starts = np.zeros(len(lens) + 1, np.int32)
    np.cumsum(lens, out=starts[1:])
    return starts
