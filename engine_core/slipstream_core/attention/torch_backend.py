"""Paged attention with torch: blocks are gathered into a small scratch buffer, then SDPA runs.

Made for CPUs; on other devices it is the reference and the fallback. Decode rows come sorted by
length, and neighbouring rows share a bucket: their blocks are gathered into one padded batch [rows,
longest, heads, dim]. A bucket is as large as fits the scratch, which stays in the processor's cache
and is reused: a fresh gather of the whole batch would be bound by page faults. The query heads that
share a key head are folded into the query length, so keys are never repeated. Prefill rows attend
one by one.

- Buckets, block indices and masks are made once per step and shared by all layers.
- Masks are made only where needed: not for buckets whose rows have equal length, such as a single
  row, nor for whole prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from slipstream_core.attention.batch_order import (
    BatchOrder,
    HostRows,
    Selector,
    begun_blocks,
    by_length,
)
from slipstream_core.attention.block_tables import BlockTables, padded_rows
from slipstream_core.attention.fixed_shape import FIXED_SHAPE, FixedShapeBackend
from slipstream_core.attention.interface import AttentionParams
from slipstream_core.attention.kv_cache import LayerCache, widest_block
from slipstream_core.step.plan import StepPlan
from slipstream_core.step.staging import to_device
from slipstream_ipc.arrays import Bools, Int32s

_Sight = tuple[int | None, int | None]  # a window and a chunk

# Per gathered tensor (one for keys, one for values). On a CPU two of them fit a core's share of
# L2/L3; on a card larger buckets mean fewer launches.
SCRATCH_BYTES = 2 << 20
CUDA_SCRATCH_BYTES = 256 << 20


def scratch_bytes(device: torch.device) -> int:
    """The size of a scratch buffer on this device, in bytes."""
    return CUDA_SCRATCH_BYTES if device.type == "cuda" else SCRATCH_BYTES


class Scratch:
    """Two buffers, for gathered keys and values; made on first use, they only grow."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.device = device
        self._keys = torch.empty(0, dtype=dtype, device=device)
        self._values = torch.empty_like(self._keys)

    def gather(
        self, cache: LayerCache, blocks: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather blocks [num_rows * m] as keys and values [num_rows, heads, m * block_size, dim].

        The result is valid until the next call.
        """
        self._keys, gathered = _gather(self._keys, cache.key_blocks, blocks)
        keys = gathered.view(num_rows, -1, *cache.keys.shape[1:]).transpose(1, 2)
        if cache.value_blocks is None:
            return keys, keys[..., : cache.values.shape[2]]
        self._values, gathered = _gather(self._values, cache.value_blocks, blocks)
        return keys, gathered.view(num_rows, -1, *cache.values.shape[1:]).transpose(1, 2)

    def indices(self, blocks: Int32s) -> torch.Tensor:
        """Block numbers for gather(), flat and on the device."""
        flat = np.ascontiguousarray(blocks).reshape(-1)
        return to_device(flat, self.device)


def _gather(
    buffer: torch.Tensor, source: torch.Tensor, blocks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    size = len(blocks) * source.shape[1]
    if size > len(buffer):  # the first use, or a single row longer than the scratch
        buffer = buffer.new_empty(max(size, scratch_bytes(buffer.device) // buffer.itemsize))
    target = buffer[:size].view(len(blocks), source.shape[1])
    return buffer, torch.index_select(source, 0, blocks, out=target)


@dataclass(slots=True)
class _Bucket:
    """Decode rows [start, stop), all padded to `width` tokens."""

    start: int
    stop: int
    kv_lens: Int32s  # [stop - start], ascending
    blocks: torch.Tensor  # [(stop - start) * width / block_size] int32
    width: int
    masks: dict[_Sight, torch.Tensor] = field(default_factory=dict)

    def visible(self, params: AttentionParams) -> slice | None:
        """The keys that every row sees, as one slice; None if the rows need a mask."""
        length = int(self.kv_lens[-1])
        if self.kv_lens[0] != length:
            return None
        return slice(max(0, int(_first_seen(params, np.array(length - 1)))), length)

    def mask(self, params: AttentionParams, like: torch.Tensor) -> torch.Tensor:
        """0 where a row sees a key, else -inf; [rows, 1, 1, width]."""
        sight = params.window, params.chunk
        if (mask := self.masks.get(sight)) is None:
            positions = np.arange(self.width)
            ends = self.kv_lens[:, None]
            hidden = (positions >= ends) | (positions < _first_seen(params, ends - 1))
            mask = self.masks[sight] = _as_mask(hidden, like)[:, None, None]
        return mask


@dataclass(slots=True)
class _Chunk:
    """One prefill row; its tokens [start, stop) are the last of its kv_len."""

    start: int
    stop: int
    kv_len: int
    blocks: torch.Tensor | None  # int32; None: the row starts at 0, so no keys are gathered
    masks: dict[_Sight, torch.Tensor] = field(default_factory=dict)

    def is_sdpa_causal(self, params: AttentionParams) -> bool:
        """True if SDPA's own causal mask, aligned at the first key, is enough."""
        shortest = min(each or self.kv_len for each in (params.window, params.chunk))
        return self.blocks is None and shortest >= self.kv_len

    def mask(self, params: AttentionParams, like: torch.Tensor) -> torch.Tensor:
        """0 where a query sees a key, else -inf; [queries, kv_len]."""
        sight = params.window, params.chunk
        if (mask := self.masks.get(sight)) is None:
            keys = np.arange(self.kv_len)
            queries = np.arange(self.kv_len - (self.stop - self.start), self.kv_len)[:, None]
            hidden = (keys > queries) | (keys < _first_seen(params, queries))
            mask = self.masks[sight] = _as_mask(hidden, like)
        return mask


def _first_seen(
    params: AttentionParams, queries: npt.NDArray[np.integer]
) -> npt.NDArray[np.integer]:
    """The first position that queries at these positions see; perhaps below 0."""
    first = np.zeros_like(queries)
    if params.window is not None:
        first = queries + 1 - params.window
    if params.chunk is not None:
        first = np.maximum(first, queries // params.chunk * params.chunk)
    return first


def _as_mask(hidden: Bools, like: torch.Tensor) -> torch.Tensor:
    on_device = to_device(hidden, like.device)
    return like.new_zeros(hidden.shape).masked_fill_(on_device, -torch.inf)


class TorchAttention:
    """One step's attention. Decode rows, one token each, come first and in ascending length."""

    def __init__(
        self,
        rows: HostRows,
        *,
        blocks_per_bucket: int,
        scratch: Scratch,
    ) -> None:
        self._scratch = scratch
        self._buckets = _buckets(rows, blocks_per_bucket, scratch)
        self._chunks = []
        start = rows.num_decodes
        for row in range(rows.num_decodes, len(rows.kv_lens)):
            kv_len, stop = int(rows.kv_lens[row]), start + int(rows.query_lens[row])
            blocks = None
            if stop - start < kv_len:
                table = rows.block_tables[rows.slots[row]]
                blocks = scratch.indices(table[: -(-kv_len // rows.block_size)])
            self._chunks.append(_Chunk(start, stop, kv_len, blocks))
            start = stop

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Attention output [T, num_heads, value_dim]; keys and values are already in the cache."""
        if len(self._buckets) == 1 and not self._chunks:
            return self._attend_bucket(self._buckets[0], query, cache, params)
        output = query.new_empty(*query.shape[:2], value.shape[2])
        for bucket in self._buckets:
            rows = slice(bucket.start, bucket.stop)
            output[rows] = self._attend_bucket(bucket, query[rows], cache, params)
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.stop)
            output[rows] = self._attend_chunk(
                chunk, query[rows], key[rows], value[rows], cache, params
            )
        return output

    def _attend_bucket(
        self, bucket: _Bucket, query: torch.Tensor, cache: LayerCache, params: AttentionParams
    ) -> torch.Tensor:
        num_rows, num_heads, key_dim = query.shape
        keys, values = self._scratch.gather(cache, bucket.blocks, num_rows)
        mask = None
        if (visible := bucket.visible(params)) is not None:
            keys, values = keys[:, :, visible], values[:, :, visible]
        else:
            mask = bucket.mask(params, query)
        # [rows, kv heads, query heads per kv head, dim]: the group takes the query axis
        folded = query.reshape(num_rows, keys.shape[1], -1, key_dim)
        if _suits_sdpa(params):
            output = scaled_dot_product_attention(
                folded, keys, values, attn_mask=mask, scale=params.scale
            )
        else:
            mask = None if mask is None else mask[:, :, :, None]
            output = _attend_explicitly(folded[:, :, :, None], keys, values, mask, params)
        return output.reshape(num_rows, num_heads, -1)

    def _attend_chunk(
        self,
        chunk: _Chunk,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cache: LayerCache,
        params: AttentionParams,
    ) -> torch.Tensor:
        num_heads = query.shape[1]
        if chunk.blocks is None:
            keys, values = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
        else:
            keys, values = self._scratch.gather(cache, chunk.blocks, 1)
            keys, values = keys[:, :, : chunk.kv_len], values[:, :, : chunk.kv_len]
        queries = query.transpose(0, 1)[None]  # [1, heads, queries, dim]
        if _suits_sdpa(params):
            causal = chunk.is_sdpa_causal(params)
            output = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=None if causal else chunk.mask(params, query),
                is_causal=causal,
                scale=params.scale,
                enable_gqa=num_heads != keys.shape[1],
            )
        else:
            output = _attend_explicitly(
                queries.reshape(1, keys.shape[1], -1, *queries.shape[2:]),
                keys,
                values,
                chunk.mask(params, query),
                params,
            ).flatten(1, 2)
        return output[0].transpose(0, 1)


@dataclass(frozen=True, slots=True)
class TorchContext:
    """An AttentionContext over the paged cache."""

    layers: Sequence[LayerCache]
    kv_slots: torch.Tensor  # [T] int64: the slot of each token's key and value
    attention: TorchAttention  # shared by all layers of the step
    begun_blocks: torch.Tensor | None = None  # [n] int64: cleared before storing

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        cache = self.layers[layer]
        if self.begun_blocks is not None:
            cache.clear(self.begun_blocks)
        cache.store(self.kv_slots, key, value)
        return self.attention.attend(query, key, value, cache, params)


class TorchBackend:
    """Implements AttentionBackend. Recorded steps have fixed shapes on a CPU alone: on a card they
    would not pay.
    """

    def __init__(self, layers: Sequence[LayerCache], block_size: int, scratch: Scratch) -> None:
        self._layers = layers
        self._block_size = block_size
        self._scratch = scratch
        self._blocks_per_bucket = scratch_bytes(scratch.device) // widest_block(layers)
        is_card = scratch.device.type == "cuda"
        # the host says which blocks to read
        self.tables_device = torch.device("cpu") if is_card else scratch.device
        self.fixed_shape: FixedShapeBackend | None = (
            FIXED_SHAPE if scratch.device.type == "cpu" else None
        )

    def order(self, plan: StepPlan) -> BatchOrder:
        """Decode rows by ascending length."""
        return by_length(plan)

    def of_plan(self, plan: StepPlan, order: BatchOrder, tables: BlockTables) -> TorchContext:
        """See AttentionBackend."""
        rows: Selector = order.rows
        attention = TorchAttention(
            HostRows(
                plan.num_decodes,
                plan.query_lens[rows],
                plan.kv_lens[rows],
                plan.slots[rows],
                tables.array,
                self._block_size,
            ),
            blocks_per_bucket=self._blocks_per_bucket,
            scratch=self._scratch,
        )
        device = self._scratch.device
        begun = begun_blocks(plan, self._block_size)
        return TorchContext(
            self._layers,
            to_device(plan.kv_slots[order.tokens], device),
            attention,
            to_device(begun, device) if len(begun) else None,
        )


def _buckets(rows: HostRows, blocks_per_bucket: int, scratch: Scratch) -> list[_Bucket]:
    """Group neighbouring decode rows into buckets, as many as fit; a single row may exceed the
    size.
    """
    kv_lens, slots = rows.kv_lens[: rows.num_decodes], rows.slots[: rows.num_decodes]
    lens = -(-kv_lens // rows.block_size)
    # what a bucket gathers behind a row is masked, which hides no NaN: it is the null block
    tables, num_blocks = padded_rows(rows.block_tables, slots, lens), lens.tolist()
    buckets = []
    start = 0
    while start < len(num_blocks):
        stop = start + 1
        while stop < len(num_blocks) and (stop + 1 - start) * num_blocks[stop] <= blocks_per_bucket:
            stop += 1
        widest = num_blocks[stop - 1]
        buckets.append(
            _Bucket(
                start,
                stop,
                kv_lens[start:stop],
                scratch.indices(tables[start:stop, :widest]),
                widest * rows.block_size,
            )
        )
        start = stop
    return buckets


def _suits_sdpa(params: AttentionParams) -> bool:
    """True if SDPA is sufficient: it supports neither softcap nor sinks."""
    return params.softcap is None and params.sinks is None


def _attend_explicitly(
    queries: torch.Tensor,  # [rows, kv heads, group, queries, dim]
    keys: torch.Tensor,  # [rows, kv heads, keys, dim]
    values: torch.Tensor,  # [rows, kv heads, keys, value dim]
    mask: torch.Tensor | None,  # broadcastable to [rows, kv heads, group, queries, keys]
    params: AttentionParams,
) -> torch.Tensor:
    """Attention with softcap and sinks; returns [rows, kv heads, group, queries, value dim]."""
    scores = torch.matmul(queries, keys[:, :, None].transpose(-1, -2)).float() * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores + mask
    if params.sinks is None:
        probs = scores.softmax(-1)
    else:
        sinks = params.sinks.float().view(1, keys.shape[1], -1, 1, 1)
        with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
        probs = with_sinks.softmax(-1)[..., :-1]
    return torch.matmul(probs.to(values.dtype), values[:, :, None])
