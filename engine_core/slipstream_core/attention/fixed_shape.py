"""Attention of a step whose shapes never change, in torch's operators only.

Defines what a recorded step needs of an attention backend (`DecodeColumns`, `MixedColumns`,
`FixedShapeBackend`) and the simplest implementation. Everything depends on values of tensors that
stay in place; the host knows no lengths. Each row's whole block table is gathered, however little
of it the row uses: on a card this is the reference for kernels that follow the tables, not an
alternative.

- A row of length 0 is padding: its output is not used and contains no NaN.
- Table entries behind a row's end may name other rows' blocks; their content has no effect.
- A block is cleared when its first token is written, as `kv_cache` promises to other backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from slipstream_core.attention.interface import AttentionContext, AttentionParams
from slipstream_core.attention.kv_cache import LayerCache


@dataclass(frozen=True, slots=True)
class DecodeColumns:
    """Cache positions of B rows of one token each; padding rows write to the null block."""

    kv_slots: torch.Tensor  # [B] int64
    kv_lens: torch.Tensor  # [B] int32, this step's token included; 0 is padding
    slots: torch.Tensor  # [B] int64: whose tables in `block_tables` are the rows'
    block_tables: torch.Tensor  # [slots, W] int32
    block_size: int


@dataclass(frozen=True, slots=True)
class MixedColumns:
    """Cache positions of T tokens of R rows, decode rows first, each with one token.

    The tokens that no request has are the last ones. They belong to one row of length 0 behind the
    requests' and write to the null block; rows behind that have no tokens.
    """

    kv_slots: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64, of each token in its row
    kv_lens: torch.Tensor  # [R] int32, this step's tokens included; 0 is padding
    query_starts: torch.Tensor  # [R + 1] int32
    num_decodes: torch.Tensor  # [1] int32
    slots: torch.Tensor  # [R] int64: whose tables in `block_tables` are the rows'
    block_tables: torch.Tensor  # [slots, W] int32
    block_size: int
    num_prefills: int  # the most rows that do not decode, with the one of padding


@dataclass(frozen=True, slots=True)
class FixedShapeBackend:
    """Makes contexts over columns that stay in place, one for each time that a step is recorded."""

    decode: Callable[[Sequence[LayerCache], DecodeColumns], AttentionContext]
    mixed: Callable[[Sequence[LayerCache], MixedColumns], AttentionContext]


class FixedShapeDecode:
    """An AttentionContext over the paged cache."""

    def __init__(self, layers: Sequence[LayerCache], columns: DecodeColumns) -> None:
        self._layers = layers
        self._columns = columns

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        """Store, then attend; shapes as in AttentionContext.attend."""
        cache, at = self._layers[layer], self._columns
        begins = at.kv_slots % at.block_size == 0
        cache.clear(torch.where(begins, at.kv_slots // at.block_size, 0))
        cache.store(at.kv_slots, key, value)
        tables = at.block_tables[at.slots]
        rows, width = tables.shape
        keys_per_row = width * at.block_size
        blocks = tables.reshape(-1)
        kv_heads = key.shape[1]
        keys = cache.key_blocks[blocks].view(rows, keys_per_row, kv_heads, -1).transpose(1, 2)
        values = keys[..., : cache.values.shape[2]]
        if cache.value_blocks is not None:
            values = cache.value_blocks[blocks].view(rows, keys_per_row, kv_heads, -1)
            values = values.transpose(1, 2)
        position = torch.arange(keys_per_row, dtype=torch.int32, device=query.device)
        ends = at.kv_lens[:, None]
        hidden = position >= ends
        if params.window is not None:
            hidden |= position < ends - params.window
        hidden = hidden[:, None, :]  # [rows, 1, keys]
        values = values.masked_fill(hidden[..., None], 0)  # 0 * nan would be nan
        hidden = (hidden & (ends > 0)[:, None])[:, :, None]
        group = query.view(rows, kv_heads, -1, query.shape[2])
        scores = torch.matmul(group, keys.transpose(-1, -2)).float() * params.scale
        if params.softcap is not None:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        scores = scores.masked_fill(hidden, -torch.inf)
        if params.sinks is None:
            probs = scores.softmax(-1)
        else:
            sinks = params.sinks.float().view(1, kv_heads, -1, 1)
            with_sinks = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
            probs = with_sinks.softmax(-1)[..., :-1]
        output = torch.matmul(probs.to(values.dtype), values)
        return output.reshape(rows, query.shape[1], -1)


def fixed_shape_mixed(layers: Sequence[LayerCache], columns: MixedColumns) -> FixedShapeDecode:
    """The context of a step with prefill rows: each token is a row that ends with it."""
    tokens = torch.arange(len(columns.kv_slots), dtype=torch.int32, device=columns.kv_slots.device)
    rows = torch.searchsorted(columns.query_starts, tokens, right=True) - 1
    rows = rows.clamp(max=len(columns.kv_lens) - 1)  # while recorded, no row has a token
    lens = torch.where(columns.kv_lens[rows] > 0, columns.positions + 1, 0).to(torch.int32)
    slots = columns.slots[rows]
    return FixedShapeDecode(
        layers,
        DecodeColumns(columns.kv_slots, lens, slots, columns.block_tables, columns.block_size),
    )


FIXED_SHAPE = FixedShapeBackend(FixedShapeDecode, fixed_shape_mixed)
