"""Attention on a card: Triton kernels that follow block tables and lengths on the device.

This module decides which kernel runs on which rows, and with which tiles, one layer at a time.
Under Triton's interpreter (TRITON_INTERPRET=1) the same code runs on a CPU, slowly.

A layer is one launch to store keys and values, unless what made them has stored them
(`cache_slots`), two for its decode rows, whose keys are dealt out to programs by what there is of
them, and one for its prefill rows, or two where their keys are split. What is dealt out depends on
the rows alone: a launch in the first of all layers that see as much.
Rows are in the plan's order, of any length and in any blocks; nothing is gathered, sorted, padded
or cleared.

- Of a launch's arguments, those that no step changes are put together once for each layer
  (`LayerForm`), and those that all layers share once a step.
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
from typing import Any, NamedTuple

import numpy as np
import torch

from slipstream_core.attention.batch_order import BatchOrder, plan_order
from slipstream_core.attention.block_tables import BlockTables
from slipstream_core.attention.fixed_shape import DecodeColumns, FixedShapeBackend, MixedColumns
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionParams, CacheSlots
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.kernels.card import triton_kernels as kernels
from slipstream_core.kernels.card.dependent_launch import LATE, early
from slipstream_core.kernels.card.tiles import (
    MAX_SPLITS,
    TILE_TABLE,
    Heads,
    Tile,
    TileRule,
    decode_tile,
    item_budget,
    num_splits,
    prefill_tile,
)
from slipstream_core.kernels.card.triton_support import shared_limit
from slipstream_core.step.plan import StepPlan
from slipstream_core.step.staging import to_device

logger = logging.getLogger(__name__)

_LOG2E = math.log2(math.e)
_PROCESSORS = 132  # multiprocessors of an H100 or H200, used without a card
_INTERPRETED_PROCESSORS = 8  # enough to split keys sometimes, few enough to stay fast


def is_interpreted() -> bool:
    """True if Triton's kernels run in its interpreter in this process."""
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
    """Implements AttentionBackend."""

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
        self._device = self.tables_device = device
        self._processors = _INTERPRETED_PROCESSORS if is_interpreted() else _PROCESSORS
        self._forms: dict[_FormKey, LayerForm] = {}
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self._processors = properties.multi_processor_count

    def context(self, rows: StepRows) -> TritonContext:
        """An AttentionContext for a forward of these rows."""
        return TritonContext(self, rows, self._layers, self._block_size, self._processors)

    def form_of(self, layer: int, query: torch.Tensor, params: AttentionParams) -> LayerForm:
        """The arguments that a layer's launches share at every step; created at the first one.

        Raises ValueError for attention in chunks.
        """
        if params.chunk is not None:
            raise ValueError("Triton's kernels do not attend in chunks of positions")
        key = _FormKey(
            layer,
            query.shape[1:],
            query.dtype,
            params.scale,
            params.window,
            params.softcap,
            params.sinks is not None,
        )
        form = self._forms.get(key)
        if form is None:
            form = self._forms[key] = self._new_form(key)
        return form

    def _new_form(self, key: _FormKey) -> LayerForm:
        cache = self._layers[key.layer]
        (num_heads, key_dim), (num_kv_heads, value_dim) = key.query, cache.values.shape[1:]
        heads = Heads(
            group=num_heads // num_kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            itemsize=key.dtype.itemsize,
            is_latent=cache.is_latent,
        )
        decode = decode_tile(heads, self._shared_limit, self._tiles)
        prefill = prefill_tile(heads, self._shared_limit, self._tiles)
        scale, cap = key.scale * _LOG2E, 0.0
        if key.softcap is not None:  # in the form that the kernel expects
            scale, cap = 2 * scale / key.softcap, key.softcap * _LOG2E
        shared: dict[str, object] = {
            "VALUE_DIM": value_dim,
            "VALUE_PAD": heads.value_pad,
            "SINKS": key.has_sinks,
        }
        attend = shared | {
            "keys": cache.keys,
            "values": cache.values,
            "scale": scale,
            "cap": cap,
            "key_slot": cache.keys.stride(0),
            "key_head": 0 if heads.is_latent else cache.keys.stride(1),
            "value_slot": cache.values.stride(0),
            "value_head": 0 if heads.is_latent else cache.values.stride(1),
            "KEY_DIM": key_dim,
            "KEY_PAD": heads.key_pad,
            "BLOCK_SIZE": self._block_size,
            "WINDOW": key.window or 0,
            "SOFTCAP": key.softcap is not None,
            "LATENT": heads.is_latent,
            "UPCAST": is_interpreted() and key.dtype == torch.bfloat16,
        }
        # a latent's value is the beginning of its key, and is not stored again
        widths = num_kv_heads * key_dim, 0 if heads.is_latent else num_kv_heads * value_dim
        of_decode, of_prefill = heads.of_program(decode), heads.of_program(prefill)
        return LayerForm(
            is_latent=heads.is_latent,
            decode_groups=num_heads // of_decode,
            prefill_groups=num_heads // of_prefill,
            prefill_heads=of_prefill,
            prefill_tile=prefill,
            dealt=_Dealt(
                window=key.window or 0,
                block_n=decode.block_n,
                budget=item_budget(num_heads // of_decode, self._processors),
            ),
            store={
                "keys": cache.keys,
                "values": cache.values,
                "KEY_DIM": key_dim,
                "VALUE_DIM": value_dim,
                "KEY_WIDTH": widths[0],
                "VALUE_WIDTH": widths[1],
                "BLOCK": kernels.STORED_AT_ONCE,
            },
            stores=-(-max(widths) // kernels.STORED_AT_ONCE),
            decode=attend | _of_tile(decode) | {"GROUP": of_decode, "DECODE": True, "SPLIT": False},
            prefill=attend | _of_tile(prefill) | {"GROUP": of_prefill, "DECODE": False},
            combine=shared | {"AT_ONCE": MAX_SPLITS},
        )

    @property
    def fixed_shape(self) -> FixedShapeBackend:
        """The same kernels over columns that stay in place."""
        return FixedShapeBackend(self.of_decode, self.of_mixed)

    def order(self, plan: StepPlan) -> BatchOrder:
        """The plan's own."""
        return plan_order(plan)

    def of_plan(self, plan: StepPlan, order: BatchOrder, tables: BlockTables) -> TritonContext:
        """See AttentionBackend; copies the plan's columns to the device."""
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
                tables.tensor,
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
        of_few = [it for it in launches if it.arguments["EARLY"]]
        return launches + [replace(it, arguments=it.arguments | LATE) for it in of_few]

    def _to(self, column: np.ndarray[Any, Any]) -> torch.Tensor:
        return to_device(column, self._device)


class _FormKey(NamedTuple):
    layer: int
    query: tuple[int, ...]  # heads and their dimension
    dtype: torch.dtype
    scale: float
    window: int | None
    softcap: float | None
    has_sinks: bool


@dataclass(frozen=True, slots=True, eq=False)
class LayerForm:
    """The arguments that a layer's launches share at every step, by kernel.

    decode_groups, prefill_groups: the programs to an item or a tile of queries, each with some
    heads; `prefill_heads` of a prefill's.
    """

    is_latent: bool
    decode_groups: int
    prefill_groups: int
    prefill_heads: int
    prefill_tile: Tile
    dealt: _Dealt
    store: dict[str, object]
    stores: int  # programs for a token
    decode: dict[str, object]  # of `attend`
    prefill: dict[str, object]
    combine: dict[str, object]


def _of_tile(tile: Tile) -> dict[str, object]:
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


class TritonContext:
    """An AttentionContext over the paged cache, for one step's rows."""

    def __init__(
        self,
        attention: TritonAttention,
        rows: StepRows,
        layers: Sequence[LayerCache],
        block_size: int,
        processors: int,
    ) -> None:
        self._attention = attention
        self._layers = layers
        if rows.query_starts is not None and rows.decodes is None:
            decodes = rows.query_starts.new_full((1,), rows.num_decodes)
            rows = replace(rows, decodes=decodes)
        self._rows = rows
        self._processors = processors
        self._longest = rows.longest or rows.block_tables.shape[1] * block_size
        # what `attend` is given of the rows, by all layers
        tables: dict[str, object] = {
            "block_tables": rows.block_tables,
            "table_rows": rows.slots,
            "kv_lens": rows.kv_lens,
            "table_stride": rows.block_tables.stride(0),
        }
        self._of_decodes = tables | {"query_starts": None, "num_rows": rows.num_decodes}
        self._of_prefills = tables | {
            "query_starts": rows.query_starts,
            "num_rows": len(rows.kv_lens),
        }
        self._dealt: dict[_Dealt, torch.Tensor] = {}
        self._early = early(rows.kv_slots.device, len(rows.kv_slots))

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        return _run(*self.launches(layer, query, key, value, params))

    def cache_slots(self, layer: int) -> CacheSlots:
        """The cache slots of the step's keys and values."""
        cache = self._layers[layer]
        return CacheSlots(cache.keys, cache.values, self._rows.kv_slots)

    def attend_stored(
        self, layer: int, query: torch.Tensor, params: AttentionParams
    ) -> torch.Tensor:
        """Attend with keys and values that are stored already; shapes as in `attend`."""
        return _run(*self.launches(layer, query, None, None, params))

    def launches(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        params: AttentionParams,
    ) -> tuple[torch.Tensor, list[Launch]]:
        """The uninitialised output, and the launches that fill it.

        key, value: what to store before; None where it is stored already.
        """
        rows, cache = self._rows, self._layers[layer]
        query = _dense(query)
        num_tokens, num_heads, _ = query.shape
        output = query.new_empty(num_tokens, num_heads, cache.values.shape[2])
        if num_tokens == 0:
            return output, []
        form = self._attention.form_of(layer, query, params)
        launches = []
        if key is not None and value is not None:
            launches.append(_store(form, _dense(key), _dense(value), rows))
        if rows.num_decodes > 0:
            dealt = form.dealt
            if dealt not in self._dealt:
                work = self._dealt[dealt] = dealt.room(rows)
                launches.append(dealt.launch(work, rows))
            launches += self._decoding(form, query, output, params, self._dealt[dealt])
        has_prefills = rows.num_prefills is not None or rows.num_decodes < num_tokens
        if rows.query_starts is not None and has_prefills:
            launches += self._prefilling(form, query, output, params)
        for launch in launches:
            launch.arguments.update(self._early)
        return output, launches

    def _decoding(
        self,
        form: LayerForm,
        query: torch.Tensor,
        output: torch.Tensor,
        params: AttentionParams,
        work: torch.Tensor,
    ) -> list[Launch]:
        """The launches for decode rows, whose keys `work` deals out."""
        num_rows = self._rows.num_decodes
        num_items = len(work) - 2 - num_rows
        both: dict[str, object] = {
            **_parts(output, num_items, output.shape[1]),
            "output": output,
            "work": work,
            "num_decodes": None,
            "sinks": params.sinks,
            "num_splits": 1,
        }
        grid = num_items, form.decode_groups, 1
        attend = form.decode | self._of_decodes | both | _of_query(query)
        return [Launch(kernels.attend, grid, attend), _combine(form, both, num_rows, decode=True)]

    def _prefilling(
        self, form: LayerForm, query: torch.Tensor, output: torch.Tensor, params: AttentionParams
    ) -> list[Launch]:
        """The launches for prefill rows, whose keys are split where there are few tiles."""
        rows, tile = self._rows, form.prefill_tile
        num_heads, num_groups = output.shape[1], form.prefill_groups
        num_tokens, most = len(output), rows.num_prefills
        if most is None:
            num_tokens -= rows.num_decodes
            most = len(rows.kv_lens) - rows.num_decodes
        num_tiles = num_tokens // tile.queries(form.prefill_heads) + most
        num_key_tiles = -(-self._longest // tile.block_n)
        splits = num_splits(num_tiles * num_groups, num_key_tiles, self._processors)
        both: dict[str, object] = {
            **(_parts(output, num_tokens, num_heads, splits) if splits > 1 else _NO_PARTS),
            "output": output,
            "work": None,
            "num_decodes": rows.decodes,
            "sinks": params.sinks,
            "num_splits": splits,
        }
        attend = form.prefill | self._of_prefills | both | _of_query(query)
        attend["SPLIT"] = splits > 1
        launches = [Launch(kernels.attend, (num_tiles, num_groups, splits), attend)]
        if splits > 1:
            launches.append(_combine(form, both, num_tokens, decode=False))
        return launches


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


def _run(output: torch.Tensor, launches: Sequence[Launch]) -> torch.Tensor:
    for launch in launches:
        launch.run()
    return output


_NO_PARTS: dict[str, object] = {"part_acc": None, "part_top": None, "part_total": None}


def _parts(output: torch.Tensor, *shape: int) -> dict[str, object]:
    """Room for partial results: sums of values, highest scores, sums of weights."""
    return {
        "part_acc": output.new_empty((*shape, output.shape[2]), dtype=torch.float32),
        "part_top": output.new_empty(shape, dtype=torch.float32),
        "part_total": output.new_empty(shape, dtype=torch.float32),
    }


def _of_query(query: torch.Tensor) -> dict[str, object]:
    return {"query": query, "query_token": query.stride(0), "query_head": query.stride(1)}


def _combine(form: LayerForm, both: dict[str, object], num_tokens: int, *, decode: bool) -> Launch:
    """Joins parts; `both` is what `attend` is given, too."""
    output = both["output"]
    assert isinstance(output, torch.Tensor)
    return Launch(
        kernels.combine,
        (num_tokens, output.shape[1]),
        form.combine | both | {"num_tokens": len(output), "DECODE": decode},
    )


def _store(form: LayerForm, key: torch.Tensor, value: torch.Tensor, rows: StepRows) -> Launch:
    return Launch(
        kernels.store,
        (len(key), form.stores),
        form.store
        | {
            "key": key,
            "value": None if form.is_latent else value,
            "kv_slots": rows.kv_slots,
            "key_token": key.stride(0),
            "key_head": key.stride(1),
            "value_token": 0 if form.is_latent else value.stride(0),
            "value_head": 0 if form.is_latent else value.stride(1),
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
