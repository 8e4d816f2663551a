"""Attention of float32 models on a CPU, with a kernel that reads the cache in place.

The kernel follows block tables and lengths: nothing is gathered, padded, masked or sorted.

- A token's bits depend on what it attends to alone: neither on its batch, nor on whether it is part
  of a prompt or of an answer, nor on how that was divided into steps.
- Keys and values are read back from the cache, also those of the step; codes of 8 bits are decoded
  as they are read.
- Only what a row has written is read, so no block needs to be cleared when it is begun.
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
from slipstream_core.kernels.cpu.kernels import Decode, Kernels, dense_rows
from slipstream_core.kernels.cpu.step_adapters import StepAdapters
from slipstream_core.step.plan import StepPlan
from slipstream_ipc.arrays import Int32s, Int64s

_TILE = 32  # tokens of a chunk whose keys are read together


class CpuContext:
    """An AttentionContext over the paged cache; decode rows come first."""

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[LayerCache],
        rows: HostRows,
        kv_slots: Int64s,  # [T]
    ) -> None:
        self.adapters: StepAdapters | None = None  # of the step's tokens; None: none has one
        self._kernels = kernels
        self._layers = layers
        form: CacheFormat = layers[0].format if layers else "auto"
        assert rows.block_tables.flags.c_contiguous
        self._decodes_only = rows.num_decodes == len(rows.kv_lens)
        slots, lens, tiles = rows.slots, rows.kv_lens, None
        if not self._decodes_only:
            slots, lens, tiles = _by_token(rows)
        self._columns = (  # kept alive: the kernel has their addresses
            np.ascontiguousarray(kv_slots, np.int64),
            rows.block_tables,
            np.ascontiguousarray(slots, np.int64),
            np.ascontiguousarray(lens, np.int32),
            tiles,
        )
        stored, tables, table_rows, lens, _ = self._columns
        self._call = Decode(
            slots=stored.ctypes.data,
            tokens=len(stored),
            tables=tables.ctypes.data,
            widest=tables.shape[1],
            table_rows=table_rows.ctypes.data,
            lens=lens.ctypes.data,
            tiles=None if tiles is None else tiles.ctypes.data,
            num_tiles=0 if tiles is None else len(tiles) - 1,
            rows=len(lens),
            block_size=rows.block_size,
            cache=NUMBERS[form],
        )
        self._at = ctypes.addressof(self._call)

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
        return self._decodes_only

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
        return output


def _by_token(rows: HostRows) -> tuple[Int64s, Int32s, Int64s]:
    """Each token's row of the tables [T], the tokens up to it [T], and where tiles begin and end
    [tiles + 1].
    """
    ends = np.cumsum(rows.query_lens, dtype=np.int64)
    of_tokens = np.repeat(np.arange(len(ends)), rows.query_lens)
    behind = ends[of_tokens] - 1 - np.arange(len(of_tokens))
    lens = rows.kv_lens[of_tokens] - behind.astype(np.int32)
    starts = [np.arange(rows.num_decodes)]
    for end, count in zip(
        ends[rows.num_decodes :].tolist(),
        rows.query_lens[rows.num_decodes :].tolist(),
        strict=True,
    ):
        starts.append(np.arange(end - count, end, _TILE))
    tiles = np.concatenate([*starts, ends[-1:]]).astype(np.int64)
    return rows.slots[of_tokens], lens, tiles


class CpuBackend:
    """Implements AttentionBackend."""

    def __init__(self, kernels: Kernels, layers: Sequence[LayerCache], block_size: int) -> None:
        self.tables_device = torch.device("cpu")
        self.fixed_shape = FIXED_SHAPE
        self._kernels = kernels
        self._layers = layers
        self._block_size = block_size

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
        return CpuContext(self._kernels, self._layers, rows, plan.kv_slots)
