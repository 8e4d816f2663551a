"""Norms and gates by Triton's kernels: what torch's operators give, rounding for rounding."""

from __future__ import annotations

import os
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
from slipstream_core.runner.cuda.forward_ops import ForwardOps
from slipstream_core.runner.model.loader import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = (torch.bfloat16, torch.float16)

torch.set_num_threads(1)  # threads that wait for one another crawl on a busy machine


@pytest.fixture(scope="module")
def ops() -> ForwardOps:
    return ForwardOps()


def norm_of(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounds: bool, offset: bool
) -> torch.Tensor:
    """As transformers writes it: rounds as Llama, neither as GPT-OSS, offset as Gemma."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    factor = 1.0 + weight.float() if offset else weight
    return factor * wide.to(x.dtype) if rounds else (factor * wide).to(x.dtype)


def numbers(*shape: int, dtype: torch.dtype, seed: int, whole: bool) -> torch.Tensor:
    """Random numbers, or small whole ones, whose squares have the same sum in any order."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(shape, generator=generator) * 3
    return (found.round() if whole else found).to(dtype).to(DEVICE)


def ulps(given: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """How many numbers of a 16-bit type lie between."""
    bits = [each.contiguous().view(torch.int16).int() for each in (given, expected)]
    return (bits[0] - bits[1]).abs()


KINDS = st.sampled_from([(True, False), (False, False), (False, True)])


@given(
    tokens=st.integers(1, 4),
    heads=st.sampled_from([None, 1, 3]),
    dim=st.sampled_from([2, 8, 12, 64, 100]),
    dtype=st.sampled_from([*HALVES, torch.float32]),
    kind=KINDS,
    adds=st.booleans(),
    whole=st.booleans(),
    spare=st.sampled_from([0, 5]),
    seed=st.integers(0, 1000),
)
@settings(deadline=None, max_examples=30)
def test_norms_are_torchs(
    tokens: int,
    heads: int | None,
    dim: int,
    dtype: torch.dtype,
    kind: tuple[bool, bool],
    adds: bool,
    whole: bool,
    spare: int,
    seed: int,
) -> None:
    shape = (1, tokens, dim) if heads is None else (1, tokens, heads, dim)
    whole = whole and dim & (dim - 1) == 0  # else the mean is rounded
    # part of a wider tensor, as a joined product is handed over
    x, more = (
        numbers(*shape[:-1], dim + spare, dtype=dtype, seed=seed + at, whole=whole)[..., :dim]
        for at in (0, 1)
    )
    weight = numbers(dim, dtype=dtype, seed=seed + 2, whole=False)
    ops = ForwardOps()
    if adds:
        total, output = ops.add_rms_norm(x, more, weight, 1e-6, *kind)
        x = x + more
        assert torch.equal(total, x)
    else:
        output = ops.rms_norm(x, weight, 1e-6, *kind)
    expected = norm_of(x, weight, 1e-6, *kind)
    assert output.is_contiguous()
    assert output.dtype == dtype
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    else:  # a sum in another order may move a number across a boundary, once or twice
        assert ulps(output, expected).max() <= (1 if whole else 2)
        assert (output != expected).float().mean() <= (0.0 if whole else 0.05)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 48, 1024, 2500])
def test_gates_are_torchs(ops: ForwardOps, dtype: torch.dtype, dim: int) -> None:
    both = numbers(1, 3, 2 * dim, dtype=dtype, seed=dim, whole=False)
    gate, up = both.split(dim, -1)
    output, expected = ops.silu_mul(gate, up), torch.nn.functional.silu(gate) * up
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        return
    assert ulps(output, expected).max() <= 2  # exp differs in its last bit
    assert (output != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [2, 12, 64, 160])
def test_rotations_are_torchs(ops: ForwardOps, dtype: torch.dtype, dim: int) -> None:
    joint = numbers(1, 5, 3 * dim + 7, dtype=dtype, seed=dim, whole=False)
    x = joint[..., : 3 * dim].view(1, 5, 3, dim).transpose(1, 2)
    cosines, sines = (numbers(1, 5, dim, dtype=dtype, seed=dim + at, whole=False) for at in (1, 2))
    turned = torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1)
    expected = x * cosines[:, None] + turned * sines[:, None]
    output = ops.rotate(x, cosines, sines)
    assert output.shape == x.shape
    assert output[0].transpose(0, 1).is_contiguous()
    if dtype == torch.float32:  # a card may round once where torch rounds twice
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(output, expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Qwen3", "Gemma 2", "Qwen2", "OLMo 2"])
def test_fused_forwards_compute_what_the_model_does(
    ops: ForwardOps, name: str, dtype: Any, tmp_path: Path
) -> None:
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    module = load_model(str(tmp_path), device="cpu", dtype=dtype).module
    before = {name: each.clone() for name, each in module.state_dict().items()}
    ids = torch.arange(17)[None] * 7 % tiny_models.VOCAB_SIZE
    keep = torch.tensor([16, 3])
    with torch.inference_mode():
        expected = eager(module)(ids, ids, keep, OwnValue())
    weights: list[int] = []
    for _ in range(2):  # once more, as when the cache is sized first
        forward = trace_for_card(module, ops, tiny_models.VOCAB_SIZE, torch.device("cpu"))
        assert forward is not None
        with torch.inference_mode():
            output = forward(ids, ids, keep, OwnValue())
        limit = 1e-4 if dtype == "float32" else 0.05
        assert (output - expected).abs().max() <= limit * expected.abs().max()
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        weights.append(hash(frozenset(storages)))
    assert weights[0] == weights[1], "joined weights are moved once"
    for key, each in module.state_dict().items():
        assert torch.equal(each, before[key]), key
