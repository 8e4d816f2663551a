"""Packed matrices: what the recording computed before, and the weights held once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream_core.attention.interface import AttentionParams
from slipstream_core.forward import pack, trace
from slipstream_core.forward.fuse import projection_of
from slipstream_core.forward.projection import Dense, Packed, project
from slipstream_core.kernels.cpu.kernels import kernels
from slipstream_core.model.loader import LoadedModel, load_model

torch.set_num_threads(1)
KERNELS = kernels()
VOCAB = 203
pytestmark = [
    pytest.mark.skipif(KERNELS is None, reason="there is no C compiler"),
]


class _Values:
    """Each token gets its own value."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        params: AttentionParams,
    ) -> torch.Tensor:
        return value.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


def _load(folder: Path, **more: Any) -> LoadedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        **more,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return load_model(str(folder), device="cpu", dtype="float32")


def _logits(forward: trace.Forward, num_tokens: int) -> torch.Tensor:
    ids = torch.arange(num_tokens)[None] * 31 % VOCAB
    with torch.inference_mode():
        return forward(ids, torch.arange(num_tokens)[None], torch.arange(num_tokens), _Values())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("biases", [False, True])
def test_a_packed_forward_computes_what_the_model_computes(
    tmp_path: Path, tied: bool, biases: bool
) -> None:
    model = _load(tmp_path, tie_word_embeddings=tied, attention_bias=biases)
    sizes = (1, 2, 65, 130)
    expected = [_logits(trace.eager(model.module), size) for size in sizes]
    forward = trace.trace(model.module, KERNELS, VOCAB)  # type: ignore[arg-type]
    assert forward is not None
    for size, logits in zip(sizes, expected, strict=True):
        torch.testing.assert_close(_logits(forward, size), logits, atol=1e-4, rtol=1e-3)


def test_what_is_packed_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack, "MIN_GIVEN_UP", 1)
    model = _load(tmp_path)
    module: Any = model.module
    assert trace.trace(module, KERNELS, VOCAB) is not None  # type: ignore[arg-type]
    layer = module.model.layers[0]
    for weight in (
        layer.self_attn.q_proj.weight,
        layer.mlp.down_proj.weight,
        module.lm_head.weight,
    ):
        assert weight.numel() == 0
    assert module.model.embed_tokens.weight.shape == (VOCAB, 32)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_a_head_that_is_the_embedding_is_packed_as_a_copy_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(pack, "MAX_COPY_BYTES", limit)
    monkeypatch.setattr(trace, "decode_graph", lambda *_: None)  # the recording itself
    model = _load(tmp_path, tie_word_embeddings=True)
    module: Any = model.module
    expected = _logits(trace.eager(module), 9)
    forward: Any = trace.trace(module, KERNELS, VOCAB)  # type: ignore[arg-type]
    assert module.model.embed_tokens.weight.shape == (VOCAB, 32)
    torch.testing.assert_close(_logits(forward, 9), expected, atol=1e-4, rtol=1e-3)
    graph = forward.__self__
    products = graph.graph.find_nodes(op="call_function", target=project)
    *others, head = (type(projection_of(graph, each)) for each in products)
    assert set(others) == {Packed}
    assert head is (Packed if limit else Dense)


def test_a_matrix_whose_product_differs_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert KERNELS is not None
    tried: list[torch.Tensor] = []

    def wrong(weight: torch.Tensor) -> torch.Tensor:
        assert not any(weight is other for other in tried), "tried twice"
        tried.append(weight)
        return weight + 1

    monkeypatch.setattr(KERNELS, "pack", wrong)
    model = _load(tmp_path)
    expected = _logits(trace.eager(model.module), 9)
    forward = trace.trace(model.module, KERNELS, VOCAB)
    assert forward is not None
    assert tried
    torch.testing.assert_close(_logits(forward, 9), expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("can't allocate memory")])
@pytest.mark.parametrize("num_packed", [0, 3])
def test_a_matrix_that_cannot_be_packed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_packed: int, error: Exception
) -> None:
    """Those before it are packed already, and their originals are gone."""
    assert KERNELS is not None
    pack_one, packed = KERNELS.pack, list[int]()

    def fails_in_between(weight: torch.Tensor) -> torch.Tensor:
        packed.append(len(weight))
        if len(packed) == num_packed + 1:
            raise error
        return pack_one(weight)

    monkeypatch.setattr(KERNELS, "pack", fails_in_between)
    monkeypatch.setattr(pack, "MIN_GIVEN_UP", 1)
    model = _load(tmp_path)
    expected = _logits(trace.eager(model.module), 9)
    forward = trace.trace(model.module, KERNELS, VOCAB) or trace.eager(model.module)
    torch.testing.assert_close(_logits(forward, 9), expected, atol=1e-4, rtol=1e-3)
    assert len(packed) > num_packed + 1


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 20) | st.integers(90, 200),
    st.integers(1, 70) | st.integers(250, 600),
    st.integers(1, 140),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_sizes(
    rows: int, num_inputs: int, num_outputs: int, biased: bool, turned: bool, cut: bool
) -> None:
    assert KERNELS is not None
    torch.manual_seed(rows)
    x, weight = torch.randn(1, rows, num_inputs), torch.randn(num_outputs, num_inputs)
    if turned:
        weight = weight.t().contiguous().t()
    if cut:  # rows that are not dense
        x = torch.randn(1, rows, num_inputs + 5)[..., 2:-3]
    bias = torch.randn(num_outputs) if biased else None
    given_ = KERNELS.product(x, KERNELS.pack(weight), bias, num_outputs)
    wide_bias = None if bias is None else bias.double()
    expected = torch.nn.functional.linear(x.double(), weight.double(), wide_bias)
    torch.testing.assert_close(given_.double(), expected, atol=1e-4, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 110), st.integers(1, 300), st.integers(1, 140), st.integers(1, 2))
def test_a_row_does_not_depend_on_its_batch(
    rows: int, num_inputs: int, num_outputs: int, threads: int
) -> None:
    assert KERNELS is not None
    torch.manual_seed(rows)
    x, packed = torch.randn(1, rows, num_inputs), KERNELS.pack(torch.randn(num_outputs, num_inputs))
    KERNELS.set_threads(threads)
    try:
        together = KERNELS.product(x, packed, None, num_outputs)
    finally:
        KERNELS.set_threads(1)
    for row in {0, rows // 2, rows - 1}:
        alone = KERNELS.product(x[:, row : row + 1], packed, None, num_outputs)
        assert torch.equal(alone[0, 0], together[0, row])
