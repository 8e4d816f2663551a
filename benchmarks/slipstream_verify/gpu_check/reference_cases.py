"""Test cases of paged attention with a float64 reference, and the error of a backend's output.

Used where kernels can run: by tests under Triton's interpreter, and to check a card.

- Everything that a kernel must not read (behind a row's end, in unused blocks) is NaN.
- Blocks lie in random order; rows with a common prefix share blocks.
- Inputs are rounded to the dtype first, so an error is the kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from slipstream_core.attention import kv_cache
from slipstream_core.attention.geometry import LayerGeometry
from slipstream_core.attention.interface import AttentionContext, AttentionParams
from slipstream_core.attention.kv_cache import LayerCache

# The largest acceptable relative error of a head's output.
LIMITS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """The rows of a step and the shape of the layer."""

    name: str
    decodes: tuple[int, ...] = ()  # kv lengths with this step's token; 0 is a padded row
    chunks: tuple[tuple[int, int], ...] = ()  # prefill rows: (tokens before, tokens now)
    shared: int = 0  # length of the prefix of rows with that many earlier tokens, whole blocks
    num_kv_heads: int = 2
    group: int = 2
    key_dim: int = 64
    value_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    is_latent: bool = False  # values are the beginnings of the keys
    spare_width: int = 0  # unused entries at the end of the block tables, as in graphs
    seed: int = 0

    def geometry(self) -> LayerGeometry:
        """The layer's geometry."""
        return LayerGeometry(
            num_heads=self.num_kv_heads * self.group,
            num_kv_heads=self.num_kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            window=self.window,
            softcap=self.softcap,
            has_sinks=self.sinks,
            is_latent=self.is_latent,
        )


@dataclass(frozen=True, slots=True)
class Scene:
    """A case on a device: a filled cache, a step's tensors, the expected output."""

    layer: LayerCache
    num_decodes: int
    query_starts: torch.Tensor  # [R + 1] int32
    kv_lens: torch.Tensor  # [R] int32
    slots: torch.Tensor  # [R] int64: whose tables in `block_tables` are the rows'
    block_tables: torch.Tensor  # [R, widest] int32
    kv_slots: torch.Tensor  # [T] int64; 0, in the null block, for padded rows
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    params: AttentionParams
    expected: torch.Tensor  # [T, heads, value_dim] float64, on the CPU


def attention_cases(*, long: bool = False) -> list[AttentionCase]:
    """Cases small enough for an interpreter; with `long`, also larger ones for a card."""
    mixed: dict[str, Any] = {"decodes": (1, 16, 17, 45), "chunks": ((0, 5), (30, 21), (16, 16))}
    cases = [
        AttentionCase(name="decode", decodes=(1, 15, 16, 17, 63, 64, 65, 130)),
        AttentionCase(name="prefill", chunks=((0, 1), (0, 16), (0, 70), (64, 3), (13, 66))),
        AttentionCase(name="mixed", **mixed),
        AttentionCase(name="padded rows", decodes=(3, 0, 40, 0, 0), spare_width=9),
        AttentionCase(name="padded rows and sinks", decodes=(0, 20, 0), sinks=True),
        AttentionCase(name="shared blocks", decodes=(40, 48, 33), chunks=((32, 9),), shared=32),
        AttentionCase(name="one head each", group=1, num_kv_heads=3, **mixed),
        AttentionCase(name="group of 7", group=7, num_kv_heads=1, **mixed),
        AttentionCase(name="group of 24", group=24, num_kv_heads=1, **mixed),
        AttentionCase(name="window 1", window=1, **mixed),
        AttentionCase(name="window 16", window=16, **mixed),
        AttentionCase(name="window 33", window=33, decodes=(20, 33, 34, 150), chunks=((70, 40),)),
        AttentionCase(name="window beyond all", window=4096, **mixed),
        AttentionCase(name="softcap", softcap=2.0, **mixed),
        AttentionCase(name="sinks", sinks=True, **mixed),
        AttentionCase(name="all at once", window=20, softcap=5.0, sinks=True, group=3, **mixed),
        AttentionCase(name="split", decodes=(700, 1, 0, 333), num_kv_heads=1, spare_width=20),
        AttentionCase(
            name="split, window and sinks",
            decodes=(700, 40, 0),
            num_kv_heads=1,
            window=200,
            sinks=True,
            spare_width=20,
        ),
        AttentionCase(name="split prefill", chunks=((500, 9),), num_kv_heads=1),
        AttentionCase(name="latents", num_kv_heads=1, group=4, key_dim=80, is_latent=True, **mixed),
        AttentionCase(
            name="latents of more heads than a program has",
            num_kv_heads=1,
            group=72,
            key_dim=56,
            value_dim=40,
            is_latent=True,
            decodes=(1, 17),
            chunks=((0, 5), (30, 3)),
        ),
        AttentionCase(
            name="latents, split and shared",
            decodes=(400, 1, 0, 133),
            chunks=((150, 9),),
            shared=32,
            num_kv_heads=1,
            group=16,
            key_dim=96,
            is_latent=True,
            spare_width=20,
        ),
        AttentionCase(name="blocks of 1", block_size=1, **mixed),
        AttentionCase(name="blocks of 8", block_size=8, **mixed),
        AttentionCase(name="blocks of 48", block_size=48, **mixed),
        AttentionCase(name="blocks of 256", block_size=256, **mixed),
    ]
    for key_dim, value_dim in (
        (8, 8),
        (80, 80),
        (96, 96),
        (112, 112),
        (128, 128),
        (192, 128),
        (128, 192),
        (256, 256),
    ):
        cases.append(
            AttentionCase(
                name=f"dims {key_dim} and {value_dim}",
                key_dim=key_dim,
                value_dim=value_dim,
                decodes=(1, 33),
                chunks=((0, 19), (20, 7)),
            )
        )
    if long:
        cases += [
            AttentionCase(
                name="long latents",
                decodes=(9000, 1, 4097),
                chunks=((0, 1000), (3000, 300)),
                num_kv_heads=1,
                group=128,
                key_dim=576,
                value_dim=512,
                is_latent=True,
            ),
            AttentionCase(
                name="long decode", decodes=(9000, 1, 4097), num_kv_heads=8, group=4, key_dim=128
            ),
            AttentionCase(
                name="long prefill",
                chunks=((0, 2048), (3000, 700)),
                num_kv_heads=4,
                group=8,
                key_dim=128,
                value_dim=128,
            ),
            AttentionCase(
                name="many rows",
                decodes=tuple(range(1, 300)),
                num_kv_heads=8,
                group=4,
                key_dim=128,
                value_dim=128,
            ),
            AttentionCase(
                name="long window, softcap and sinks",
                decodes=(6000, 5000),
                chunks=((4000, 500),),
                window=4096,
                softcap=30.0,
                sinks=True,
                key_dim=256,
                value_dim=256,
            ),
        ]
    return cases


def make_scene(case: AttentionCase, device: torch.device, dtype: torch.dtype) -> Scene:
    """Build the case with random content determined by its seed. Raises ValueError."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rows = [(max(0, n - 1), min(1, n)) for n in case.decodes] + list(case.chunks)
    size = case.block_size
    if case.shared % size:
        raise ValueError(f"shared is {case.shared}, which is no multiple of {size}")
    needed = [-(-(before + now) // size) for before, now in rows]
    width = max(needed, default=0) + case.spare_width
    num_blocks = sum(needed) + case.shared // size + 4
    free = 1 + torch.randperm(num_blocks - 1, generator=generator).numpy()
    tables = np.zeros((len(rows), max(1, width)), np.int32)
    layer = kv_cache.allocate(
        [case.geometry()], num_blocks=num_blocks, block_size=size, dtype=dtype, device=device
    )[0]
    for tensor in (layer.keys, layer.values):
        tensor.fill_(math.nan)
    num_heads = case.num_kv_heads * case.group
    params = AttentionParams(
        scale=1.5 * case.key_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
        sinks=normal(num_heads).to(device) if case.sinks else None,
    )
    taken = case.shared // size
    common_blocks = free[:taken]
    common = [normal(case.shared, case.num_kv_heads, d) for d in (case.key_dim, case.value_dim)]
    queries, keys, values, slots, expected = [], [], [], [], []
    for row, (before, now) in enumerate(rows):
        length = before + now
        tables[row, : needed[row]] = free[taken : taken + needed[row]]
        taken += needed[row]
        key = normal(length, case.num_kv_heads, case.key_dim)
        value = normal(length, case.num_kv_heads, case.value_dim)
        if case.is_latent:
            value = key[..., : case.value_dim]
        if 0 < case.shared <= before:
            tables[row, : len(common_blocks)] = common_blocks
            key[: case.shared] = common[0]
            if not case.is_latent:
                value[: case.shared] = common[1]
        key_positions = np.arange(length)
        at = torch.from_numpy(
            tables[row, key_positions // size].astype(np.int64) * size + key_positions % size
        )
        layer.keys[at[:before].to(device)] = key[:before].to(device)
        if not case.is_latent:
            layer.values[at[:before].to(device)] = value[:before].to(device)
        query = normal(max(now, 1), num_heads, case.key_dim)
        queries.append(query)
        if now == 0:  # padding: stores its token in the null block, sees no keys
            keys.append(normal(1, case.num_kv_heads, case.key_dim))
            values.append(normal(1, case.num_kv_heads, case.value_dim))
            slots.append(torch.zeros(1, dtype=torch.int64))
            expected.append(torch.zeros(1, num_heads, case.value_dim, dtype=torch.float64))
        else:
            keys.append(key[before:])
            values.append(value[before:])
            slots.append(at[before:])
            expected.append(_plain_attention(query, key, value, params))
    counts = [len(query) for query in queries]
    return Scene(
        layer=layer,
        num_decodes=len(case.decodes),
        query_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32).to(device),
        kv_lens=torch.tensor([a + b for a, b in rows], dtype=torch.int32).to(device),
        slots=torch.arange(len(tables)).flip(0).to(device),
        block_tables=torch.from_numpy(tables).flip(0).to(device),
        kv_slots=torch.cat(slots).to(device),
        query=torch.cat(queries).to(device),
        key=torch.cat(keys).to(device),
        value=torch.cat(values).to(device),
        params=params,
        expected=torch.cat(expected),
    )


def triton_context(scene: Scene, block_size: int) -> AttentionContext:
    """Triton's context for a scene. Needs Triton, and a card or TRITON_INTERPRET=1."""
    from slipstream_core.attention.triton_backend import StepRows, TritonAttention

    rows = StepRows(
        scene.num_decodes,
        scene.kv_slots,
        scene.kv_lens,
        scene.slots,
        scene.block_tables,
        scene.query_starts if scene.num_decodes < len(scene.kv_lens) else None,
    )
    attention = TritonAttention([scene.layer], block_size=block_size, device=scene.query.device)
    return attention.context(rows)


def check_case(
    case: AttentionCase,
    device: torch.device,
    dtype: torch.dtype,
    make_context: Callable[[Scene, int], AttentionContext] | None = None,
) -> float:
    """The largest relative error, |out - expected| / |expected|, of any token's head.

    `make_context(scene, block_size)` is the backend, by default Triton's. The error is infinite if
    the output contains NaN or a padding row is not zero. Compare it with LIMITS[dtype].
    """
    make_context = make_context or triton_context
    scene = make_scene(case, device, dtype)
    context = make_context(scene, case.block_size)
    output = context.attend(0, scene.query, scene.key, scene.value, scene.params)
    return relative_error(output, scene.expected)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """The error as defined by check_case."""
    difference = (output.cpu().double() - expected).norm(dim=-1)
    size = expected.norm(dim=-1)
    error = torch.where(size > 0, difference / size.clamp(min=1e-300), difference * math.inf)
    error = torch.where((size == 0) & (difference == 0), 0.0, error)
    return float(error.nan_to_num(nan=math.inf).max()) if error.numel() else 0.0


def _plain_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, params: AttentionParams
) -> torch.Tensor:
    """One row's output in float64; its queries are the last tokens of the row."""
    group = query.shape[1] // key.shape[1]
    heads = query.double().transpose(0, 1)
    keys = key.double().repeat_interleave(group, 1).transpose(0, 1)
    values = value.double().repeat_interleave(group, 1).transpose(0, 1)
    scores = heads @ keys.transpose(1, 2) * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    key_positions = torch.arange(len(key))
    own = key_positions[len(key) - len(query) :, None]
    hidden = key_positions > own
    if params.window is not None:
        hidden |= key_positions <= own - params.window
    scores = scores.masked_fill(hidden, -math.inf)
    if params.sinks is not None:
        sinks = params.sinks.cpu().double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat([scores, sinks], -1)
    probs = scores.softmax(-1)[..., : len(key)]
    return (probs @ values).transpose(0, 1)
