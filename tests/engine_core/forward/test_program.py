"""A decode step as one list of operations: to the bit what the recording computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream_core.attention.batch_order import HostRows
from slipstream_core.attention.cpu_backend import CpuContext
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.forward import trace
from slipstream_core.forward.operations import (
    ADD,
    NORM,
    PRODUCT,
    SCALE,
    SIGMOID,
    SILU_MUL,
    SOFTPLUS,
    Operation,
    OperationList,
    Part,
)
from slipstream_core.forward.program import DecodeGraph
from slipstream_core.kernels.cpu.kernels import Kernels, kernels
from slipstream_core.model.loader import load_model

torch.set_num_threads(1)
FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")
VOCAB, LAYERS, KV_HEADS, DIM = 203, 3, 2, 8
CONTEXT = 70


@pytest.fixture
def ours() -> Kernels:
    assert FOUND is not None
    return FOUND


def _trace(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, **more: Any
) -> tuple[trace.Forward, DecodeGraph | None]:
    """The recording, and the list where there is one."""
    torch.manual_seed(0)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": KV_HEADS,
        "initializer_range": 0.15,
        "head_dim": DIM,
        **more,
    }
    model: Any = LlamaForCausalLM(LlamaConfig(**fields)) if kind == "llama" else None
    if model is None:
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.save_pretrained(folder)
    taken: list[DecodeGraph] = []
    joined = trace._with_decodes

    def take(recorded: trace.Forward, decode: DecodeGraph, *rest: Any) -> trace.Forward:
        taken.append(decode)
        joined(recorded, decode, *rest)
        return recorded

    monkeypatch.setattr(trace, "_with_decodes", take)
    loaded = load_model(str(folder), device="cpu", dtype="float32")
    recorded = trace.trace(loaded.module, FOUND, VOCAB)  # type: ignore[arg-type]
    assert recorded is not None
    return recorded, taken[0] if taken else None


def _context(rows: int) -> CpuContext:
    """Rows of several lengths, in a cache with something in it; the same for the same `rows`."""
    random = np.random.default_rng(rows)
    torch.manual_seed(rows)
    block, blocks = 4, -(-CONTEXT // 4)
    layers = [
        LayerCache(
            *(torch.randn((1 + rows * blocks) * block, KV_HEADS, DIM) for _ in "kv"),
            *[torch.empty(0)] * 2,
        )
        for _ in range(LAYERS)
    ]
    lens = random.integers(1, CONTEXT, rows).astype(np.int32)
    tables = 1 + random.permutation(rows * blocks).reshape(rows, blocks).astype(np.int32)
    slots = tables[np.arange(rows), (lens - 1) // block] * block + (lens - 1) % block
    of_rows = HostRows(rows, np.ones(rows, np.int32), lens, np.arange(rows), tables, block)
    return CpuContext(
        FOUND,  # type: ignore[arg-type]
        layers,
        of_rows,
        slots,
    )


def _logits(forward: trace.Forward, rows: int) -> tuple[torch.Tensor, CpuContext]:
    context = _context(rows)
    ids = torch.arange(rows)[None] * 31 % VOCAB
    positions = torch.arange(rows)[None] * 7 % CONTEXT
    with torch.inference_mode():
        return forward(ids, positions, torch.arange(0, rows, 2), context), context


@pytest.mark.parametrize("kind", ["llama", "qwen3", "llama tied", "llama with biases"])
def test_a_decode_step_is_what_the_recording_computes(
    ours: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    more = {
        "tie_word_embeddings": kind == "llama tied",
        "attention_bias": kind == "llama with biases",
    }
    recorded, decode = _trace(tmp_path, monkeypatch, kind.split()[0], **more)
    assert decode is not None
    kinds = [each.kind for each in decode.operations]
    assert ADD not in kinds, "products add the residual themselves"
    of_decodes: Any = decode.module.forward
    for threads in (1, 2, 5):
        ours.set_threads(threads)
        try:
            for rows in (1, 2, 3, 9, 70, 5):
                (expected, one), (given_, other) = (
                    _logits(recorded, rows),
                    _logits(of_decodes, rows),
                )
                assert torch.equal(given_, expected), rows
                for a, b in zip(one.layers, other.layers, strict=True):
                    assert torch.equal(a.keys, b.keys)
                    assert torch.equal(a.values, b.values)
        finally:
            ours.set_threads(1)


@pytest.mark.parametrize("name", ["decode_graph", "_with_decodes"])
def test_what_cannot_be_one_call_runs_as_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Its matrices are packed by then: the module itself could not run any more."""
    expected = _logits(_trace(tmp_path, monkeypatch, "llama")[0], 5)[0]

    def fails(*_: Any) -> None:
        raise RuntimeError("no such operation")

    loaded = load_model(str(tmp_path), device="cpu", dtype="float32")
    monkeypatch.setattr(trace, name, fails)
    recorded = trace.trace(loaded.module, FOUND, VOCAB)  # type: ignore[arg-type]
    assert recorded is not None
    assert torch.equal(_logits(recorded, 5)[0], expected)


def test_an_unknown_operator_between_leaves_the_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, decode = _trace(tmp_path, monkeypatch, "llama", hidden_act="gelu")
    assert decode is None
    assert _logits(recorded, 5)[0].isfinite().all()


def test_a_list_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attend = CpuContext.address

    def another(context: CpuContext) -> int:
        context._call.rows = 0  # nobody attends
        return attend.fget(context)  # type: ignore[misc,no-any-return]

    monkeypatch.setattr(CpuContext, "address", property(another))
    caplog.set_level("INFO")
    recorded, _ = _trace(tmp_path, monkeypatch, "llama")
    assert "differ" in caplog.text
    monkeypatch.undo()
    expected, _ = _trace(tmp_path, monkeypatch, "llama")
    assert torch.equal(_logits(recorded, 5)[0], _logits(expected, 5)[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 90), st.integers(1, 40), st.integers(1, 2), st.data())
def test_any_chain_of_operations(rows: int, width: int, threads: int, data: st.DataObject) -> None:
    """Each reads what any before it have made; buffers are as many as values."""
    ours = FOUND
    assert ours is not None
    torch.manual_seed(rows * width)
    values = [torch.randn(1, rows, width)]
    weight, matrix = torch.randn(width), torch.randn(width, width) / width
    packed = ours.pack(matrix)
    operations = []
    for place in range(1, data.draw(st.integers(1, 12)) + 1):
        kinds = [NORM, PRODUCT, ADD, SCALE, SILU_MUL, SIGMOID, SOFTPLUS]
        kind = data.draw(st.sampled_from(kinds))
        a, b = (data.draw(st.integers(0, place - 1)) for _ in "ab")
        parts = (Part(place), Part(a), Part(b))
        if kind == NORM:
            values.append(ours.rms_norm(values[a], weight, 1e-6))
            made = Operation(NORM, *parts[:2], weight=weight, n=width, heads=1, number=1e-6)
        elif kind == PRODUCT:
            values.append(torch.add(values[b], ours.product(values[a], packed, weight, width)))
            made = Operation(PRODUCT, *parts[:2], c=parts[2], weight=packed, n=width, k=width)
            made.bias = weight
        elif kind in (SIGMOID, SOFTPLUS):
            of_each = ours.sigmoid if kind == SIGMOID else ours.softplus
            values.append(of_each(values[a]))
            made = Operation(kind, *parts[:2], n=width)
        elif kind == ADD:
            values.append(values[a] + values[b])
            made = Operation(ADD, *parts, n=width)
        elif kind == SCALE:
            heads = data.draw(st.sampled_from([n for n in range(1, width + 1) if width % n == 0]))
            by_head = values[a].view(1, rows, heads, -1) * values[b][..., :heads, None]
            values.append(by_head.flatten(2))
            made = Operation(SCALE, *parts, n=width // heads, heads=heads)
        else:
            values.append(ours.silu_mul(values[a], values[b]))
            made = Operation(SILU_MUL, *parts, n=width)
        operations.append(made)
    program = OperationList(ours, operations, [width] * len(values), 1, len(operations))
    ours.set_threads(threads)
    try:
        result = program(values[:1], [], 0)
    finally:
        ours.set_threads(1)
    assert torch.equal(result, values[-1]) or not values[-1].isfinite().all()


def test_a_list_that_is_watched_notes_when_operations_begin(ours: Kernels) -> None:
    width = 8
    packed = ours.pack(torch.randn(width, width))
    operations = [
        Operation(ADD, Part(1), Part(0), Part(0), n=width),
        Operation(ADD, Part(2), Part(1), Part(0), n=width),  # fused with the one before
        Operation(PRODUCT, Part(3), Part(2), weight=packed, n=width, k=width),
    ]
    program = OperationList(ours, operations, [width] * 4, 1, 3)
    x = torch.randn(1, 2, width)
    before = program([x], [], 0)
    begun = program.watch()
    assert not begun.any()
    assert torch.equal(program([x], [], 0), before)
    first, fused, product, end = begun.tolist()
    assert fused == 0
    assert 0 < first <= product <= end
    assert program.watch() is begun
