"""Attention on a card: Triton kernels that follow block tables and lengths on the device.

This module decides which kernel runs on which rows, and with which tiles, one layer at a time.
Under Triton's interpreter (TRITON_INTERPRET=1) the same code runs on a CPU, slowly.

A step is one launch to store keys and values, one for its decode rows, one for its prefill rows,
and one more for each of the two whose keys are split over several programs. Rows are in the
plan's order, of any length and in any blocks; nothing is gathered, sorted, padded or cleared.

- Grids and splits come from shapes and from the plan on the host, so nothing waits for the device.
- For a CUDA graph, these must be the same at each replay: the tensors of StepRows (in place; their
  content may change), `num_decodes`, and the addresses of query, key and value. A graph of N decode
  rows serves fewer: a padding row has kv_len 0, gives zeros and stores into the null block. Rows
  may be as long as the block table is wide; a row's cost depends on its actual length.
- The number of splits depends on the number of rows and the width of the table, so a row's result
  may differ in its last bits between batches, as with any matrix product library.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream_core.runner.attention import triton_kernels as kernels
from slipstream_core.runner.attention.fixed_shape import DecodeColumns
from slipstream_core.runner.attention.geometry import LayerGeometry
from slipstream_core.runner.attention.interface import AttentionParams
from slipstream_core.runner.attention.kv_cache import LayerCache
from slipstream_core.runner.attention.tiles import (
    MAX_SPLITS,
    TILE_TABLE,
    Heads,
    Tile,
    TileRule,
    decode_tile,
    num_splits,
    padded,
    prefill_tile,
)
from slipstream_core.runner.attention.triton_support import shared_limit
from slipstream_core.runner.staging import to_device
from slipstream_core.step.plan import StepPlan

logger = logging.getLogger(__name__)

_LOG2E = math.log2(math.e)
_PROCESSORS = 132  # multiprocessors of an H100 or H200, used without a card
_INTERPRETED_PROCESSORS = 8  # enough to split keys sometimes, few enough to stay fast


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows and tokens as tensors on the device, decode rows first.

    Decode row r has one token, token r. R may exceed the plan's rows; padding has kv_lens 0.
    """

    num_decodes: int
    kv_slots: torch.Tensor  # [T] int64
    kv_lens: torch.Tensor  # [R] int32, with this step's tokens
    block_tables: torch.Tensor  # [R, widest] int32, with stride 1 within a row
    query_starts: torch.Tensor | None = None  # [R + 1] int32; None: decode rows only


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, ready to run."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, object]

    def run(self) -> None:
        """Enqueue it."""
        self.kernel[self.grid](**self.arguments)

    def compile(self) -> Any:
        """Compile without running; returns Triton's kernel, None under the interpreter."""
        return self.kernel.warmup(grid=self.grid, **self.arguments)

    def load(self) -> None:
        """Compile the kernel and its launcher and load them to the card, without running."""
        compiled = self.compile()
        if compiled is not None:
            compiled.run  # noqa: B018  (a property: made when it is first asked for)


class TritonAttention:
    """A model's attention on one device, which makes a context for each step."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        *,
        block_size: int,
        device: torch.device,
        shared_bytes: int | None = None,
        tiles: Sequence[TileRule] = TILE_TABLE,
    ) -> None:
        """`shared_bytes` limits a program's shared memory; None is the device's own limit."""
        self._tiles = tiles
        self._layers = layers
        self._block_size = block_size
        self._shared_limit = shared_limit(device) if shared_bytes is None else shared_bytes
        self._device = device
        self._processors = _INTERPRETED_PROCESSORS if is_interpreted() else _PROCESSORS
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._processors = properties.multi_processor_count

    def context(self, rows: StepRows) -> TritonContext:
        """An AttentionContext for a forward of these rows."""
        return TritonContext(
            self._layers,
            rows,
            self._block_size,
            self._processors,
            self._shared_limit,
            self._tiles,
        )

    def of_plan(self, plan: StepPlan) -> TritonContext:
        """The context of a plan; copies its columns to the device."""
        starts = None
        if plan.num_decodes < plan.num_requests:
            starts = np.zeros(plan.num_requests + 1, np.int32)
            np.cumsum(plan.query_lens, out=starts[1:])
        return self.context(
            StepRows(
                plan.num_decodes,
                self._to(plan.kv_slots),
                self._to(plan.kv_lens),
                self._to(np.ascontiguousarray(plan.block_tables)),
                None if starts is None else self._to(starts),
            )
        )

    def of_decode(self, layers: Sequence[LayerCache], columns: DecodeColumns) -> TritonContext:
        """The context of decode steps whose columns stay in place; a DecodeBackend."""
        assert layers is self._layers
        num_rows = len(columns.kv_lens)
        return self.context(
            StepRows(num_rows, columns.kv_slots, columns.kv_lens, columns.block_tables)
        )

    def compile(self, geometry: Sequence[LayerGeometry], dtype: torch.dtype) -> None:
        """Compile every kernel that steps of this model may need, so that no step waits for it.

        Triton keeps them in its cache folder, which makes later starts fast.
        """
        started = time.monotonic()
        first_of = {layer: index for index, layer in reversed(list(enumerate(geometry)))}
        for layer, index in first_of.items():
            for launch in self.every_launch(index, layer, dtype):
                launch.load() if self._device.type == "cuda" else launch.compile()
        logger.info("compiled the attention kernels in %.1f s", time.monotonic() - started)

    def every_launch(self, index: int, layer: LayerGeometry, dtype: torch.dtype) -> list[Launch]:
        """The kernels of one layer in every form: decode and prefill, split and unsplit."""

        def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        num_tokens = 2
        params = AttentionParams(
            scale=1.0,
            window=layer.window,
            softcap=layer.softcap,
            sinks=empty(layer.num_heads) if layer.has_sinks else None,
        )
        tensors = (
            empty(num_tokens, layer.num_heads, layer.key_dim),
            empty(num_tokens, layer.num_kv_heads, layer.key_dim),
            empty(num_tokens, layer.num_kv_heads, layer.value_dim),
        )
        launches = []
        for width in (1, 1 << 16):  # one tile of keys, and a great many
            rows = StepRows(
                1,
                empty(num_tokens, dtype=torch.int64),
                empty(2, dtype=torch.int32),
                empty(1, 1, dtype=torch.int32).expand(2, width),
                empty(3, dtype=torch.int32),
            )
            _, made = self.context(rows).launches(index, *tensors, params)
            launches.extend(made)
        return launches

    def _to(self, column: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(column, self._device)


class TritonContext:
    """An AttentionContext over the paged cache, for one step's rows."""

    def __init__(
        self,
        layers: Sequence[LayerCache],
        rows: StepRows,
        block_size: int,
        processors: int,
        shared_limit: int,
        tiles: Sequence[TileRule] = TILE_TABLE,
    ) -> None:
        self._tiles = tiles
        self._layers = layers
        self._rows = rows
        self._block_size = block_size
        self._processors = processors
        self._shared_limit = shared_limit

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        output, launches = self.launches(layer, query, key, value, params)
        for launch in launches:
            launch.run()
        return output

    def launches(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> tuple[torch.Tensor, list[Launch]]:
        """The uninitialised output, and the launches that fill it."""
        rows, cache = self._rows, self._layers[layer]
        query, key, value = _dense(query), _dense(key), _dense(value)
        num_tokens, num_heads, key_dim = query.shape
        num_kv_heads, value_dim = value.shape[1:]
        heads = Heads(
            group=num_heads // num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            itemsize=query.itemsize,
        )
        output = query.new_empty(num_tokens, num_heads, value_dim)
        if num_tokens == 0:
            return output, []
        call = _Call(output, query, cache, params, rows, self._block_size, self._processors)
        launches = [_store(key, value, cache, rows)]
        if rows.num_decodes > 0:
            tile = decode_tile(heads, self._shared_limit, self._tiles)
            launches += call.over(tile, 0, rows.num_decodes, 0, rows.num_decodes, True)
        if rows.query_starts is not None and rows.num_decodes < num_tokens:
            tile = prefill_tile(heads, self._shared_limit, self._tiles)
            first, num_rows = rows.num_decodes, len(rows.kv_lens) - rows.num_decodes
            tokens = num_tokens - first
            num_tiles = tokens // tile.queries(heads.group) + num_rows
            launches += call.over(tile, first, num_rows, first, num_tiles, False)
        return output, launches


@dataclass(frozen=True, slots=True)
class _Call:
    """The arguments common to a layer's launches."""

    output: torch.Tensor
    query: torch.Tensor
    cache: LayerCache
    params: AttentionParams
    rows: StepRows
    block_size: int
    processors: int

    def over(
        self, tile: Tile, first_row: int, num_rows: int, first_token: int, width: int, decode: bool
    ) -> list[Launch]:
        """The launches for these rows, which have at most `width` tiles of queries."""
        num_heads, value_dim = self.output.shape[1:]
        num_kv_heads, key_dim = self.cache.keys.shape[1:]
        rows, params = self.rows, self.params
        longest = rows.block_tables.shape[1] * self.block_size
        splits = num_splits(width * num_kv_heads, -(-longest // tile.block_n), self.processors)
        num_tokens = num_rows if decode else len(self.output) - first_token
        parts: list[torch.Tensor | None] = [None, None, None]
        if splits > 1:
            partial = (num_tokens, num_heads, splits)
            parts = [
                self.output.new_empty(size, dtype=torch.float32)
                for size in ((*partial, value_dim), partial, partial)
            ]
        scale, cap = params.scale * _LOG2E, 0.0
        if params.softcap is not None:  # in the form that the kernel expects
            scale, cap = 2 * scale / params.softcap, params.softcap * _LOG2E
        shared: dict[str, object] = {
            "output": self.output,
            "part_acc": parts[0],
            "part_top": parts[1],
            "part_total": parts[2],
            "sinks": params.sinks,
            "first_token": first_token,
            "num_splits": splits,
            "VALUE_DIM": value_dim,
            "VALUE_PAD": padded(value_dim),
            "SINKS": params.sinks is not None,
        }
        attend = Launch(
            kernels.attend,
            (width, num_kv_heads, splits),
            shared
            | {
                "query": self.query,
                "keys": self.cache.keys,
                "values": self.cache.values,
                "block_tables": rows.block_tables,
                "query_starts": None if decode else rows.query_starts,
                "kv_lens": rows.kv_lens,
                "scale": scale,
                "cap": cap,
                "first_row": first_row,
                "num_rows": num_rows,
                "table_stride": rows.block_tables.stride(0),
                "query_token": self.query.stride(0),
                "query_head": self.query.stride(1),
                "key_slot": self.cache.keys.stride(0),
                "key_head": self.cache.keys.stride(1),
                "value_slot": self.cache.values.stride(0),
                "value_head": self.cache.values.stride(1),
                "GROUP": num_heads // num_kv_heads,
                "KEY_DIM": key_dim,
                "KEY_PAD": padded(key_dim),
                "BLOCK_SIZE": self.block_size,
                "WINDOW": params.window or 0,
                "SOFTCAP": params.softcap is not None,
                "DECODE": decode,
                "SPLIT": splits > 1,
                "UPCAST": is_interpreted() and self.query.dtype == torch.bfloat16,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            },
        )
        if splits == 1:
            return [attend]
        combine = Launch(
            kernels.combine, (num_tokens, num_heads), shared | {"MAX_SPLITS": MAX_SPLITS}
        )
        return [attend, combine]


def _store(key: torch.Tensor, value: torch.Tensor, cache: LayerCache, rows: StepRows) -> Launch:
    widths = [t.shape[1] * t.shape[2] for t in (key, value)]
    return Launch(
        kernels.store,
        (len(key), -(-max(widths) // kernels.STORED_AT_ONCE)),
        {
            "key": key,
            "value": value,
            "keys": cache.keys,
            "values": cache.values,
            "kv_slots": rows.kv_slots,
            "key_token": key.stride(0),
            "key_head": key.stride(1),
            "value_token": value.stride(0),
            "value_head": value.stride(1),
            "KEY_DIM": key.shape[2],
            "VALUE_DIM": value.shape[2],
            "KEY_WIDTH": widths[0],
            "VALUE_WIDTH": widths[1],
            "BLOCK": kernels.STORED_AT_ONCE,
        },
    )


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [T, heads, dim] with stride 1 in the last dimension and canonical strides.

    A dimension of size 1 may have any stride, and Triton recompiles when a stride becomes 1 or is
    no longer a multiple of 16.
    """
    if tensor.stride(2) != 1 and tensor.shape[2] > 1:
        tensor = tensor.contiguous()
    num_tokens, num_heads, dim = tensor.shape
    token, head = tensor.stride()[:2]
    head = dim if num_heads == 1 else head
    token = num_heads * dim if num_tokens == 1 else token
    return tensor.as_strided(tensor.shape, (token, head, 1))
