"""Attention on a card: Triton kernels that follow block tables and lengths on the device.

This module decides which kernel runs on which rows, and with which tiles, one layer at a time.
Under Triton's interpreter (TRITON_INTERPRET=1) the same code runs on a CPU, slowly.

A layer is one launch to store keys and values, two for its decode rows, whose keys are dealt out to
programs by what there is of them, and one for its prefill rows, or two where their keys are split.
What is dealt out depends on the rows alone: a launch in the first of all layers that see as much.
Rows are in the plan's order, of any length and in any blocks; nothing is gathered, sorted, padded
or cleared.

- Grids and splits come from shapes and from the plan on the host, so nothing waits for the device.
- For a CUDA graph, these must be the same at each replay: the tensors of StepRows (in place; their
  content may change), `num_decodes`, `num_prefills`, and the addresses of query, key and value. A
  graph of N decode rows serves fewer: a padding row has kv_len 0, gives zeros and stores into the
  null block. Rows may be as long as the block table is wide; a row's cost depends on its actual
  length.
- In how many parts a row is read depends on the other rows, so its result may differ in its last
  bits between batches, as with any matrix product library.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from slipstream_core.runner.attention import triton_kernels as kernels
from slipstream_core.runner.attention.fixed_shape import DecodeColumns, MixedColumns
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
    item_budget,
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

_Parts = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def is_interpreted() -> bool:
    """Whether Triton's kernels run in its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@dataclass(frozen=True, slots=True)
class StepRows:
    """A step's rows and tokens as tensors on the device, decode rows first.

    Decode row r has one token, token r. R may exceed the plan's rows; padding has kv_lens 0. With
    `num_prefills` the host does not know how many rows decode: `num_decodes` and it are the most
    that there can be, and a last prefill row has the padding tokens.
    """

    num_decodes: int
    kv_slots: torch.Tensor  # [T] int64
    kv_lens: torch.Tensor  # [R] int32, with this step's tokens
    slots: torch.Tensor  # [R] int64: whose tables in `block_tables` are the rows'
    block_tables: torch.Tensor  # [slots, width] int32, with stride 1 within a row
    query_starts: torch.Tensor | None = None  # [R + 1] int32; None: decode rows only
    decodes: torch.Tensor | None = None  # [1] int32: the rows that decode; None: num_decodes do
    num_prefills: int | None = None  # None: all rows behind num_decodes
    longest: int | None = None  # tokens of the longest row; None: as many as a table may name


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

    def of_plan(self, plan: StepPlan, block_tables: torch.Tensor) -> TritonContext:
        """The context of a plan; copies its columns to the device.

        block_tables: of all slots, [slots, width] int32, on the device.
        """
        starts = decodes = None
        if plan.num_decodes < plan.num_requests:
            both = np.zeros(plan.num_requests + 2, np.int32)
            np.cumsum(plan.query_lens, out=both[1:-1])
            both[-1] = plan.num_decodes
            sent = self._to(both)
            starts, decodes = sent[:-1], sent[-1:]
        return self.context(
            StepRows(
                plan.num_decodes,
                self._to(plan.kv_slots),
                self._to(plan.kv_lens),
                self._to(plan.slots),
                block_tables,
                starts,
                decodes,
                longest=int(plan.kv_lens.max()),
            )
        )

    def of_decode(self, layers: Sequence[LayerCache], columns: DecodeColumns) -> TritonContext:
        """The context of a decode step whose columns stay in place; see FixedShapeBackend."""
        assert layers is self._layers
        num_rows = len(columns.kv_lens)
        return self.context(
            StepRows(
                num_rows, columns.kv_slots, columns.kv_lens, columns.slots, columns.block_tables
            )
        )

    def of_mixed(self, layers: Sequence[LayerCache], columns: MixedColumns) -> TritonContext:
        """The context of a step with prefill rows whose columns stay in place."""
        assert layers is self._layers
        return self.context(
            StepRows(
                len(columns.kv_lens) - 1,  # the last one is padding
                columns.kv_slots,
                columns.kv_lens,
                columns.slots,
                columns.block_tables,
                columns.query_starts,
                columns.num_decodes,
                columns.num_prefills,
            )
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
            for most in (None, 1):
                rows = StepRows(
                    1,
                    empty(num_tokens, dtype=torch.int64),
                    empty(2, dtype=torch.int32),
                    empty(2, dtype=torch.int64),
                    empty(1, 1, dtype=torch.int32).expand(2, width),
                    empty(3, dtype=torch.int32),
                    empty(1, dtype=torch.int32),
                    most,
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
        if rows.query_starts is not None and rows.decodes is None:
            decodes = rows.query_starts.new_full((1,), rows.num_decodes)
            rows = replace(rows, decodes=decodes)
        self._rows = rows
        self._block_size = block_size
        self._processors = processors
        self._shared_limit = shared_limit
        self._dealt: dict[_Dealt, torch.Tensor] = {}

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
            dealt = _Dealt(
                window=params.window or 0,
                block_n=tile.block_n,
                budget=item_budget(num_kv_heads, self._processors),
            )
            if dealt not in self._dealt:
                work = self._dealt[dealt] = dealt.room(rows)
                launches.append(dealt.launch(work, rows))
            launches += call.decoding(tile, self._dealt[dealt])
        has_prefills = rows.num_prefills is not None or rows.num_decodes < num_tokens
        if rows.query_starts is not None and has_prefills:
            tile = prefill_tile(heads, self._shared_limit, self._tiles)
            launches += call.prefilling(tile)
        return output, launches


@dataclass(frozen=True, slots=True)
class _Dealt:
    """On what it depends, beside the rows, how decode rows' keys are dealt out to programs."""

    window: int  # 0: all
    block_n: int
    budget: int

    def num_items(self, rows: StepRows) -> int:
        """The most parts that there can be."""
        return rows.num_decodes + self.budget

    def room(self, rows: StepRows) -> torch.Tensor:
        """Room for what `deal` writes."""
        size = 2 + rows.num_decodes + self.num_items(rows)
        return torch.empty(size, dtype=torch.int32, device=rows.kv_lens.device)

    def launch(self, work: torch.Tensor, rows: StepRows) -> Launch:
        """Deals out the keys of all decode rows."""
        return Launch(
            kernels.deal,
            (rows.num_decodes,),
            {
                "work": work,
                "kv_lens": rows.kv_lens,
                "num_decodes": None if rows.num_prefills is None else rows.decodes,
                "num_rows": rows.num_decodes,
                "num_items": self.num_items(rows),
                "budget": self.budget,
                "WINDOW": self.window,
                "BLOCK_N": self.block_n,
                "COUNTED": rows.num_prefills is not None,
            },
        )


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

    def decoding(self, tile: Tile, work: torch.Tensor) -> list[Launch]:
        """The launches for decode rows, whose keys `work` deals out."""
        num_rows = self.rows.num_decodes
        num_items = len(work) - 2 - num_rows
        num_heads = self.output.shape[1]
        shared = self._shared(work, 1, self._parts(num_items, num_heads), decode=True)
        attend = self._attend(shared, tile, (num_items, 1), num_rows)
        return [attend, self._combine(shared, num_rows)]

    def prefilling(self, tile: Tile) -> list[Launch]:
        """The launches for prefill rows, whose keys are split where there are few tiles."""
        num_heads, rows = self.output.shape[1], self.rows
        num_kv_heads = self.cache.keys.shape[1]
        num_tokens, most = len(self.output), rows.num_prefills
        if most is None:
            num_tokens -= rows.num_decodes
            most = len(rows.kv_lens) - rows.num_decodes
        num_tiles = num_tokens // tile.queries(num_heads // num_kv_heads) + most
        longest = rows.longest or rows.block_tables.shape[1] * self.block_size
        splits = num_splits(num_tiles * num_kv_heads, -(-longest // tile.block_n), self.processors)
        parts: _Parts = (None, None, None)
        if splits > 1:
            parts = self._parts(num_tokens, num_heads, splits)
        shared = self._shared(None, splits, parts, decode=False)
        attend = self._attend(shared, tile, (num_tiles, splits), len(rows.kv_lens))
        return [attend] if splits == 1 else [attend, self._combine(shared, num_tokens)]

    def _parts(self, *shape: int) -> _Parts:
        """Room for partial results: sums of values, highest scores, sums of weights."""
        value_dim = self.output.shape[2]
        sums = self.output.new_empty((*shape, value_dim), dtype=torch.float32)
        tops, totals = (self.output.new_empty(shape, dtype=torch.float32) for _ in range(2))
        return sums, tops, totals

    def _shared(
        self, work: torch.Tensor | None, splits: int, parts: _Parts, *, decode: bool
    ) -> dict[str, object]:
        """What `attend` and `combine` are both given."""
        value_dim = self.output.shape[2]
        return {
            "output": self.output,
            "part_acc": parts[0],
            "part_top": parts[1],
            "part_total": parts[2],
            "work": work,
            "num_decodes": None if decode else self.rows.decodes,
            "sinks": self.params.sinks,
            "num_splits": splits,
            "VALUE_DIM": value_dim,
            "VALUE_PAD": padded(value_dim),
            "SINKS": self.params.sinks is not None,
            "DECODE": decode,
        }

    def _attend(
        self,
        shared: dict[str, object],
        tile: Tile,
        grid: tuple[int, int],
        num_rows: int,
    ) -> Launch:
        num_heads = self.output.shape[1]
        num_kv_heads, key_dim = self.cache.keys.shape[1:]
        rows, params = self.rows, self.params
        scale, cap = params.scale * _LOG2E, 0.0
        if params.softcap is not None:  # in the form that the kernel expects
            scale, cap = 2 * scale / params.softcap, params.softcap * _LOG2E
        return Launch(
            kernels.attend,
            (grid[0], num_kv_heads, grid[1]),
            shared
            | {
                "query": self.query,
                "keys": self.cache.keys,
                "values": self.cache.values,
                "block_tables": rows.block_tables,
                "table_rows": rows.slots,
                "query_starts": None if shared["DECODE"] else rows.query_starts,
                "kv_lens": rows.kv_lens,
                "scale": scale,
                "cap": cap,
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
                "SPLIT": grid[1] > 1,
                "UPCAST": is_interpreted() and self.query.dtype == torch.bfloat16,
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
            },
        )

    def _combine(self, shared: dict[str, object], num_tokens: int) -> Launch:
        return Launch(
            kernels.combine,
            (num_tokens, self.output.shape[1]),
            shared | {"num_tokens": len(self.output), "AT_ONCE": MAX_SPLITS},
        )


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
