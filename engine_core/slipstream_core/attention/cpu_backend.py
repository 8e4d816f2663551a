"""Attention of float32 models on a CPU, with a kernel that reads the cache in place.

Decode rows go to the kernel, which follows block tables and lengths: nothing is gathered, padded,
masked or sorted. Prefill rows go to TorchAttention, row by row, as torch is good at large products.

- Codes of 8 bits are decoded as they are read. Prefill rows read back what they have stored.
- The kernel reads only what a row has written, and TorchAttention cuts the blocks gathered for
  prefill rows at the row's length, so no block needs to be cleared when it is begun.
- Columns and tables passed in must not change until the forward is done.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from slipstream_core.attention.batch_order import BatchOrder, HostRows, plan_order
from slipstream_core.attention.block_tables import BlockTables
from slipstream_core.attention.cache_formats import NUMBERS, CacheFormat
from slipstream_core.attention.fixed_shape import FIXED_SHAPE
from slipstream_core.attention.interface import AttentionParams
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.attention.torch_backend import Scratch, TorchAttention
from slipstream_core.kernels.cpu.kernels import Decode, Kernels, dense_rows
from slipstream_core.kernels.cpu.step_adapters import StepAdapters
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.arrays import Int64s


class CpuContext:
    """An AttentionContext over the paged cache; decode rows come first."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[LayerCache],
        rows: HostRows,
        kv_slots: Int64s,  # [T]
        scratch: Scratch,
    ) -> None:
        self.adapters: StepAdapters | None = None  # of the step's tokens; None: none has one
        self._kernels = kernels
        self._layers = layers
        self._num_decodes = rows.num_decodes
        form: CacheFormat = layers[0].format if layers else "auto"
        assert rows.block_tables.flags.c_contiguous
        self._columns = (  # kept alive: the kernel has their addresses
            np.ascontiguousarray(kv_slots, np.int64),
            rows.block_tables,
            np.ascontiguousarray(rows.slots, np.int64),
            np.ascontiguousarray(rows.kv_lens, np.int32),
        )
        stored, tables, table_rows, lens = self._columns
        self._call = Decode(
            slots=stored.ctypes.data,
            tokens=len(stored),
            tables=tables.ctypes.data,
            widest=tables.shape[1],
            table_rows=table_rows.ctypes.data,
            lens=lens.ctypes.data,
            rows=rows.num_decodes,
            block_size=rows.block_size,
            cache=NUMBERS[form],
        )
        self._at = ctypes.addressof(self._call)
        self._chunks: TorchAttention | None = None
        if rows.num_decodes < len(rows.kv_lens):
            self._chunks = TorchAttention(
                rows.chunks(),
                blocks_per_bucket=1,
                scratch=scratch,
                always_gathers=form != "auto",
            )

    @property
    def layers(self) -> Sequence[LayerCache]:
        """The cache of each layer."""
        return self._layers

    @property
    def address(self) -> int:
        """The address of the kernel's Decode, with the fields common to all layers filled in."""
        return self._at

    @property
    def decodes_only(self) -> bool:
        """True if no row is a prefill chunk."""
        return self._chunks is None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        cache = self._layers[layer]
        query, key, value = dense_rows(query), dense_rows(key), dense_rows(value)
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = value.shape[1:]
        output = query.new_empty(num_tokens, num_heads, value_dim)
        call = self._call
        call.key, call.value = key.data_ptr(), value.data_ptr()
        call.key_token, call.key_head, _ = key.stride()
        call.value_token, call.value_head, _ = value.stride()
        call.query = query.data_ptr()
        call.query_row, call.query_head, _ = query.stride()
        call.keys, call.values = cache.keys.data_ptr(), cache.values.data_ptr()
        call.output = output.data_ptr()
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.heads, call.kv_heads = num_heads, num_kv_heads
        call.key_dim, call.value_dim = key_dim, value_dim
        call.window, call.chunk = params.window or 0, params.chunk or 0
        call.scale = params.scale
        call.softcap = params.softcap or 0.0
        self._kernels.attend(self._at)
        if self._chunks is not None:
            rest = slice(self._num_decodes, None)
            output[rest] = self._chunks.attend(query[rest], key[rest], value[rest], cache, params)
        return output


class CpuBackend:
    """Implements AttentionBackend."""

    def __init__(
        self, kernels: Kernels, layers: Sequence[LayerCache], block_size: int, scratch: Scratch
    ) -> None:
        self.tables_device = scratch.device
        self.fixed_shape = FIXED_SHAPE
        self._kernels = kernels
        self._layers = layers
        self._block_size = block_size
        self._scratch = scratch

    def order(self, plan: StepPlan) -> BatchOrder:
        """The plan's own."""
        return plan_order(plan)

    def of_plan(self, plan: StepPlan, order: BatchOrder, tables: BlockTables) -> CpuContext:
        """See AttentionBackend; reads the plan's columns in place."""
        rows = HostRows(
            plan.num_decodes,
            plan.query_lens,
            plan.kv_lens,
            plan.slots,
            tables.array,
            self._block_size,
        )
        return CpuContext(self._kernels, self._layers, rows, plan.kv_slots, self._scratch)
