"""A matrix times one row, by the Triton kernel: what torch's operators give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from slipstream_core.forward import forward_ops, row_products
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.projection import Dense
from slipstream_core.forward.row_products import (
    RowNorm,
    RowSum,
    expert_gates_arguments,
    expert_sums_arguments,
    has_expert_kernels,
    has_row_kernel,
    row_product,
)
from slipstream_core.forward.trace import eager
from slipstream_core.forward.trace_card import OwnStored, trace_for_card
from slipstream_core.model.loader import load_model
from slipstream_lab.models import tiny_models

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}


@pytest.fixture(scope="module")
def ops() -> ForwardOps:
    return ForwardOps()


@pytest.fixture(autouse=True, scope="module")
def small_matrices_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_products, "_LEAST_COLUMNS", 32)
        patch.setattr(row_products, "_LEAST_EXPERT_COLUMNS", 32)
        yield


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def matrices(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers whose products with a vector are of the vector's size, so no float16 overflows."""
    return (numbers(*shape, dtype=torch.float32, seed=seed) * shape[-1] ** -0.5).to(dtype)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the size of all numbers."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@given(
    n=st.sampled_from([7, 8, 24, 64]),
    k=st.sampled_from([32, 96, 4096 + 2048]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([(True, False), (False, False), (False, True)]),
    is_normed=st.booleans(),
    is_sum=st.booleans(),
    has_bias=st.booleans(),
    adds=st.booleans(),
    gate=st.sampled_from([None, "silu", "gelu", "tanh gelu"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=40)
def test_products_are_torchs(
    n: int,
    k: int,
    dtype: torch.dtype,
    kind: tuple[bool, bool],
    is_normed: bool,
    is_sum: bool,
    has_bias: bool,
    adds: bool,
    gate: str | None,
    seed: int,
) -> None:
    ops = ForwardOps()
    rows = n if gate is None else 2 * n
    x = numbers(1, 1, k, dtype=dtype, seed=seed)
    weight = matrices(rows, k, dtype=dtype, seed=seed + 1)
    bias = numbers(rows, dtype=dtype, seed=seed + 2) if has_bias else None
    more = numbers(1, 1, n, dtype=dtype, seed=seed + 3) if adds else None
    scale = numbers(k, dtype=dtype, seed=seed + 4)
    kept, total = torch.zeros(k, dtype=dtype), torch.zeros(k, dtype=dtype)
    norm = RowNorm(scale, 1e-5, *kind, kept) if is_normed else None
    before = RowSum(numbers(k, dtype=dtype, seed=seed + 5), total) if is_sum else None

    added = x + before.more if before is not None else x
    wide = ops.rms_norm(added, scale, 1e-5, *kind) if is_normed else added
    expected = torch.nn.functional.linear(wide.double(), weight.double())
    expected = (expected if bias is None else expected + bias.double()).to(dtype)
    if gate is not None:
        act = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "tanh gelu": ops.tanh_gelu_mul}[gate]
        expected = act(*expected.chunk(2, dim=-1))
    expected = expected if more is None else expected + more

    assert has_row_kernel(weight, gate)
    found = row_product(x, weight, bias, more=more, before=before, norm=norm, gate=gate)
    assert found.shape == (1, 1, n)
    assert found.dtype == dtype
    assert difference(found, expected) <= LIMITS[dtype]
    assert not is_normed or difference(kept, wide[0, 0]) <= LIMITS[dtype]
    assert not is_sum or torch.equal(total, added[0, 0])


@given(
    # the first product's columns are read in one piece or three, as the second's are
    sizes=st.sampled_from(
        [(32, 64, 24), (96, 32, 7), (256, 96, 24), (256, 512, 24), (2048, 32, 40)]
    ),
    tokens_of=st.sampled_from([(1, 4, 4), (1, 8, 2), (1, 8, 6), (2, 8, 1), (3, 128, 8)]),
    dtype=st.sampled_from(DTYPES),
    is_wide=st.booleans(),
    adds=st.booleans(),
    gate=st.sampled_from(["silu", "gelu", "tanh gelu"]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=30)
def test_experts_of_few_tokens_are_torchs(
    sizes: tuple[int, int, int],
    tokens_of: tuple[int, int, int],
    dtype: torch.dtype,
    is_wide: bool,
    adds: bool,
    gate: str,
    seed: int,
) -> None:
    ops, (k, inner, n), (num, num_experts, chosen) = ForwardOps(), sizes, tokens_of
    x = numbers(num, k, dtype=dtype, seed=seed)
    up = matrices(num_experts, 2 * inner, k, dtype=dtype, seed=seed + 1)
    down = matrices(num_experts, n, inner, dtype=dtype, seed=seed + 2)
    more = numbers(1, num, n, dtype=dtype, seed=seed + 3) if adds else None
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num, num_experts, generator=generator).argsort(1)[:, :chosen].to(DEVICE)
    weights = numbers(num, chosen, dtype=torch.float32 if is_wide else dtype, seed=seed + 4)
    act = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "tanh gelu": ops.tanh_gelu_mul}[gate]

    expected = torch.zeros(num, n, dtype=torch.float64, device=DEVICE)
    for token in range(num):
        for choice in range(chosen):
            expert = ids[token, choice]
            both = (up[expert].double() @ x[token].double()).to(dtype)
            hidden = act(both[None, :inner], both[None, inner:])
            made = (down[expert].double() @ hidden[0].double()).to(dtype)
            factor = weights[token, choice]
            expected[token] += made.double() * factor if is_wide else (made * factor).double()
    expected = expected.to(dtype) if more is None else expected.to(dtype) + more[0]

    assert has_expert_kernels(num, ids, up, down)
    found = ops.experts(x, weights, ids, up, down, gate, more)
    assert found.dtype == dtype
    assert difference(found, expected) <= LIMITS[dtype]


def test_which_experts_have_kernels() -> None:
    ids = torch.zeros(1, 2, dtype=torch.int64)
    up, down = torch.empty(16, 128, 64), torch.empty(16, 64, 64)
    assert has_expert_kernels(1, ids, up, down)
    assert has_expert_kernels(2, ids, up, down)
    assert not has_expert_kernels(3, ids, up, down), "some weights would be read twice"
    assert has_expert_kernels(1, ids, up[:2], down[:2])
    assert not has_expert_kernels(0, ids[:0], up, down), "tokens"
    assert not has_row_kernel(torch.empty(0, 512)), "rows"
    assert not has_expert_kernels(1, ids, torch.empty(16, 128, 48), down), "columns"
    assert not has_expert_kernels(1, ids, up, down.transpose(1, 2)), "order"
    assert not has_expert_kernels(1, ids, up.double(), down.double()), "type"


@pytest.mark.parametrize("shape", [(8, 24), (8, 1000)])
def test_matrices_without_a_kernel_are_left_to_torch(
    ops: ForwardOps, shape: tuple[int, int]
) -> None:
    n, k = shape
    weight = numbers(n, k, dtype=torch.float32, seed=0)
    assert not has_row_kernel(weight)
    x, more = (numbers(1, 1, each, dtype=torch.float32, seed=1) for each in (k, n))
    scale = torch.ones(n, device=DEVICE)
    total, normed, _ = ops.linear_norm_linear(
        x, Dense(weight), more, scale, 1e-5, True, False, None, None, False
    )
    assert torch.allclose(total, torch.nn.functional.linear(x, weight) + more)
    assert torch.allclose(normed, ops.rms_norm(total, scale, 1e-5, True, False))


@pytest.mark.parametrize("gate", [None, "silu", "tanh gelu"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_row_alone_is_as_among_others(ops: ForwardOps, gate: str | None, is_last: bool) -> None:
    k, n, m = 64, 96, 128
    x, more = (numbers(1, 3, each, dtype=torch.float32, seed=2) for each in (k, n))
    weight, bias = numbers(n, k, dtype=torch.float32, seed=3), numbers(n, dtype=x.dtype, seed=4)
    projection = Dense(weight, bias)
    behind = None if is_last else Dense(numbers(m, n, dtype=torch.float32, seed=5))
    settings_of = (torch.ones(n, device=DEVICE), 1e-5, True, False, behind)
    gate = None if is_last else gate
    keeps = not is_last
    both = ops.linear_norm_linear(x, projection, more, *settings_of, gate, keeps)
    assert (both[2] is not None) == keeps
    for at in range(3):
        row = x[:, at : at + 1], more[:, at : at + 1]
        alone = ops.linear_norm_linear(row[0], projection, row[1], *settings_of, gate, keeps)
        for whole, one in zip(both[: 2 + keeps], alone[: 2 + keeps], strict=True):
            assert whole is not None
            assert one is not None
            assert torch.allclose(whole[:, at : at + 1], one, atol=1e-4), at


@pytest.mark.parametrize("gate", [None, "silu"])
def test_a_row_that_is_added_to_alone_is_as_among_others(ops: ForwardOps, gate: str | None) -> None:
    n, m = 96, 128
    x, more = (numbers(1, 3, n, dtype=torch.float32, seed=at) for at in (2, 3))
    weight, bias = numbers(m, n, dtype=x.dtype, seed=4), numbers(m, dtype=x.dtype, seed=5)
    settings_of = (torch.ones(n, device=DEVICE), 1e-5, True, False, Dense(weight, bias), gate)
    both = ops.add_norm_linear(x, more, *settings_of)
    for at in range(3):
        alone = ops.add_norm_linear(x[:, at : at + 1], more[:, at : at + 1], *settings_of)
        for whole, one in zip(both, alone, strict=True):
            assert torch.allclose(whole[:, at : at + 1], one, atol=1e-4), at


@pytest.mark.parametrize("name", ["Qwen3-MoE", "GLM-4-MoE", "Mixtral", "GPT-OSS"])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_forward_with_experts_is_the_models(
    ops: ForwardOps,
    name: str,
    num_tokens: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16, as torch records no grouped product of another type."""
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    module = load_model(str(tmp_path), device=DEVICE.type, dtype="bfloat16").module
    forward = trace_for_card(module, ops, tiny_models.VOCAB_SIZE, DEVICE)
    assert forward is not None
    calls: list[int] = []
    rows = forward_ops.expert_rows
    monkeypatch.setattr(forward_ops, "expert_rows", lambda *it: calls.append(1) or rows(*it))
    # of no token two experts are level, of which torch might take the other
    ids = torch.arange(20, 20 + num_tokens, device=DEVICE)[None]
    keep = torch.arange(num_tokens, device=DEVICE)
    with torch.inference_mode():
        context = OwnStored()
        expected = eager(module)(ids, keep[None], keep, context)
        output = forward(ids, keep[None], keep, context)
    assert difference(output, expected) <= 0.05
    assert bool(calls) == (num_tokens == 1 and name != "GPT-OSS")  # whose matrices are transposed


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Phi-3"])
def test_a_forward_of_one_token_takes_it(
    ops: ForwardOps, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    module = load_model(str(tmp_path), device=DEVICE.type, dtype="float32").module
    forward = trace_for_card(module, ops, tiny_models.VOCAB_SIZE, DEVICE)
    assert forward is not None
    ids, keep = torch.tensor([[5]], device=DEVICE), torch.tensor([0], device=DEVICE)
    calls: list[int] = []
    arguments = row_products.row_product_arguments
    monkeypatch.setattr(
        row_products,
        "row_product_arguments",
        lambda *given: calls.append(1) or arguments(*given),
    )
    with torch.inference_mode():
        context = OwnStored()
        expected = eager(module)(ids, ids, keep, context)
        output = forward(ids, ids, keep, context)
    assert (output - expected).abs().max() <= 1e-4 * expected.abs().max()
    layers = module.config.num_hidden_layers
    assert len(calls) == 4 * layers + 1


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [
        ((6144, 4096), (2, 2048)),
        ((4096, 14336), (1, 2048)),
        ((1024, 3072), (1, 1024)),
        ((151936, 1024), (4, 1024)),
        ((3584, 18944), (4, 512)),
        ((18432, 2304), (16, 256)),
    ],
)
def test_programs_are_many_and_read_much(shape: tuple[int, int], blocks: tuple[int, int]) -> None:
    weight = torch.empty(1, dtype=torch.bfloat16).expand(shape)
    x, output = weight[:1], torch.empty(1, 1, shape[0], dtype=torch.bfloat16)
    found = row_products.row_product_arguments(output, x, weight, None, None, None, None, None)
    assert (found["BLOCK_N"], found["BLOCK_K"]) == blocks


@pytest.mark.parametrize(
    ("name", "sizes", "gates", "columns"),
    [
        ("Qwen3-30B-A3B", (128, 8, 2048, 768), (2, 2048), 256),
        ("DeepSeek V3", (256, 8, 7168, 2048), (4, 1024), 512),
        ("DeepSeek V2 Lite", (64, 6, 2048, 1408), (2, 2048), 128),
        ("Mixtral 8x7B", (8, 2, 4096, 14336), (2, 2048), 2048),
    ],
)
def test_programs_of_experts_are_many_and_read_much(
    name: str, sizes: tuple[int, int, int, int], gates: tuple[int, int], columns: int
) -> None:
    num_experts, chosen, hidden, inner = sizes
    one = torch.empty(1, dtype=torch.bfloat16)
    ids = torch.zeros(1, chosen, dtype=torch.int64)
    up, down = one.expand(num_experts, 2 * inner, hidden), one.expand(num_experts, hidden, inner)
    middle, x = one.expand(chosen, inner), one.expand(1, hidden)
    found = expert_gates_arguments(middle, x, ids, up, "silu")
    assert (found["BLOCK_N"], found["BLOCK_K"]) == gates
    sums = expert_sums_arguments(x, middle, one.expand(1, chosen), ids, down, None)
    assert sums["BLOCK_K"] == columns
