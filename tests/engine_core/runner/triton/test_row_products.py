"""A matrix times one row, by the Triton kernel: what torch's operators give."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed; scripts/triton-tests brings it")
if os.environ.get("TRITON_INTERPRET") != "1" and not torch.cuda.is_available():
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

from slipstream_bench.models import tiny_models
from slipstream_core.runner.compilation.trace import OwnValue, eager
from slipstream_core.runner.compilation.trace_card import trace_for_card
from slipstream_core.runner.cuda import row_products
from slipstream_core.runner.cuda.forward_ops import ForwardOps
from slipstream_core.runner.cuda.row_products import RowNorm, has_row_kernel, row_product
from slipstream_core.runner.model.loader import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


@pytest.fixture(scope="module")
def ops() -> ForwardOps:
    return ForwardOps()


@pytest.fixture(autouse=True, scope="module")
def small_matrices_too() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_products, "_LEAST_COLUMNS", 32)
        yield


def numbers(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the size of all numbers."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@given(
    n=st.sampled_from([7, 8, 24, 64]),
    k=st.sampled_from([32, 96, 4096 + 2048]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from([(True, False), (False, False), (False, True)]),
    is_normed=st.booleans(),
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
    has_bias: bool,
    adds: bool,
    gate: str | None,
    seed: int,
) -> None:
    ops = ForwardOps()
    rows = n if gate is None else 2 * n
    x = numbers(1, 1, k, dtype=dtype, seed=seed)
    weight = numbers(rows, k, dtype=dtype, seed=seed + 1)
    bias = numbers(rows, dtype=dtype, seed=seed + 2) if has_bias else None
    more = numbers(1, 1, n, dtype=dtype, seed=seed + 3) if adds else None
    scale = numbers(k, dtype=dtype, seed=seed + 4)
    norm = RowNorm(scale, 1e-5, *kind) if is_normed else None

    wide = ops.rms_norm(x, scale, 1e-5, *kind) if is_normed else x
    expected = torch.nn.functional.linear(wide.double(), weight.double())
    expected = (expected if bias is None else expected + bias.double()).to(dtype)
    if gate is not None:
        act = {"silu": ops.silu_mul, "gelu": ops.gelu_mul, "tanh gelu": ops.tanh_gelu_mul}[gate]
        expected = act(*expected.chunk(2, dim=-1))
    expected = expected if more is None else expected + more

    assert has_row_kernel(weight, gate)
    found = row_product(x, weight, bias, more=more, norm=norm, gate=gate)
    assert found.shape == (1, 1, n)
    assert found.dtype == dtype
    assert difference(found, expected) <= LIMITS[dtype]


@pytest.mark.parametrize("shape", [(8, 24), (8, 1000)])
def test_matrices_without_a_kernel_are_left_to_torch(
    ops: ForwardOps, shape: tuple[int, int]
) -> None:
    n, k = shape
    weight = numbers(n, k, dtype=torch.float32, seed=0)
    assert not has_row_kernel(weight)
    x, more = (numbers(1, 1, each, dtype=torch.float32, seed=1) for each in (k, n))
    scale = torch.ones(n, device=DEVICE)
    total, normed = ops.linear_norm_linear(
        x, weight, None, more, scale, 1e-5, True, False, None, None, None
    )
    assert torch.allclose(total, torch.nn.functional.linear(x, weight) + more)
    assert torch.allclose(normed, ops.rms_norm(total, scale, 1e-5, True, False))


@pytest.mark.parametrize("gate", [None, "silu", "tanh gelu"])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_row_alone_is_as_among_others(ops: ForwardOps, gate: str | None, is_last: bool) -> None:
    k, n, m = 64, 96, 128
    x, more = (numbers(1, 3, each, dtype=torch.float32, seed=2) for each in (k, n))
    weight, bias = numbers(n, k, dtype=torch.float32, seed=3), numbers(n, dtype=x.dtype, seed=4)
    behind: Any = None if is_last else numbers(m, n, dtype=torch.float32, seed=5)
    settings_of = (torch.ones(n, device=DEVICE), 1e-5, True, False, behind, None)
    gate = None if is_last else gate
    both = ops.linear_norm_linear(x, weight, bias, more, *settings_of, gate)
    for at in range(3):
        row = x[:, at : at + 1], more[:, at : at + 1]
        alone = ops.linear_norm_linear(row[0], weight, bias, row[1], *settings_of, gate)
        for whole, one in zip(both, alone, strict=True):
            assert torch.allclose(whole[:, at : at + 1], one, atol=1e-4), at


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
        expected = eager(module)(ids, ids, keep, OwnValue())
        output = forward(ids, ids, keep, OwnValue())
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
    found = row_products.row_product_arguments(output, x, weight, None, None, None, None)
    assert (found["BLOCK_N"], found["BLOCK_K"]) == blocks
