"""A forward's Triton kernels: what torch's operators give, rounding for rounding."""

from __future__ import annotations

import json
import math
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

from slipstream_core.attention.interface import CacheSlots
from slipstream_core.forward import forward_ops
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.rope_patterns import NormForm, RopeForm
from slipstream_core.forward.trace import eager
from slipstream_core.forward.trace_card import OwnStored, trace_for_card
from slipstream_core.model.loader import load_model
from slipstream_lab.models import tiny_models

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALVES = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def ops() -> ForwardOps:
    return ForwardOps()


def norm_of(
    x: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    rounds: bool,
    offset: bool,
    center: bool = False,
) -> torch.Tensor:
    """As transformers writes it: rounds as Llama, neither as GPT-OSS, offset as Gemma, center as
    Cohere.
    """
    wide = x.float()
    if center:
        wide = wide - wide.mean(-1, keepdim=True)
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
    check_norm(output, norm_of(x, weight, 1e-6, *kind), exact=whole)


def check_norm(output: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """exact: whether its sum is the same in any order."""
    assert output.is_contiguous()
    assert output.dtype == expected.dtype
    if output.dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
    else:  # a sum in another order may move a number across a boundary, once or twice
        assert ulps(output, expected).max() <= (1 if exact else 2)
        assert (output != expected).float().mean() <= (0.0 if exact else 0.05)


@pytest.mark.parametrize("kind", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 64])
def test_sums_with_a_norm_or_a_factor_before_are_torchs(
    ops: ForwardOps, dim: int, dtype: torch.dtype, kind: tuple[bool, bool]
) -> None:
    x = numbers(1, 5, dim + 3, dtype=dtype, seed=1, whole=True)[..., :dim]
    more = numbers(1, 5, dim + 1, dtype=dtype, seed=2, whole=False)[..., :dim]
    weight, before = (numbers(dim, dtype=dtype, seed=at, whole=False) for at in (3, 4))

    def check_sum(total: torch.Tensor, expected: torch.Tensor) -> None:
        if dtype == torch.float32:
            torch.testing.assert_close(total, expected, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(total, expected)

    of_normed = norm_of(x, before, 1e-6, *kind) + more
    check_sum(ops.rms_norm_add(x, more, before, 1e-6, *kind), of_normed)
    total, output = ops.add_rms_norm(x, more, weight, 1e-6, *kind, 1.0, before)
    check_sum(total, of_normed)
    check_norm(output, norm_of(total, weight, 1e-6, *kind), exact=False)
    total, output = ops.add_rms_norm(x, more, weight, 1e-6, *kind, 0.22)
    check_sum(total, x * 0.22 + more)
    check_norm(output, norm_of(total, weight, 1e-6, *kind), exact=False)


@pytest.mark.parametrize("kind", [(True, False), (False, False), (False, True)])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
def test_norms_of_two_are_those_of_each(
    ops: ForwardOps, dtype: torch.dtype, kind: tuple[bool, bool]
) -> None:
    both = numbers(1, 5, 100 + 24 + 3, dtype=dtype, seed=1, whole=False)[..., :124].split(
        [100, 24], -1
    )
    weights = [numbers(each.shape[-1], dtype=dtype, seed=2, whole=False) for each in both]
    found = ops.two_rms_norms(*both, *weights, 1e-6, *kind)
    for x, weight, output in zip(both, weights, found, strict=True):
        assert output.is_contiguous()
        assert torch.equal(output, ops.rms_norm(x, weight, 1e-6, *kind))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_weight", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 100, 1024])
def test_norms_without_the_mean_are_torchs(
    ops: ForwardOps, dim: int, dtype: torch.dtype, has_weight: bool, has_bias: bool
) -> None:
    x, more = (numbers(4, dim + 3, dtype=dtype, seed=at, whole=False) for at in (0, 1))
    x, more = x[:, :dim], more[:, :dim]
    given = [numbers(dim, dtype=dtype, seed=at, whole=False) for at in (2, 3)]
    weight, bias = given[0] if has_weight else None, given[1] if has_bias else None
    total, output = ops.add_layer_norm(x, more, weight, bias, 1e-5)
    assert torch.equal(total, x + more)
    wide = [None if it is None else it.float() for it in (weight, bias)]
    expected = torch.nn.functional.layer_norm((x + more).float(), [dim], *wide, 1e-5).to(dtype)
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    else:  # sums in another order, and a product that is added to may be rounded with it
        assert (output != expected).float().mean() <= 0.02
        torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01)
    assert torch.equal(ops.layer_norm(total[None], weight, bias, 1e-5)[0], output)
    scaled, _ = ops.add_layer_norm(x, more, weight, bias, 1e-5, 0.22)
    torch.testing.assert_close(scaled, x * 0.22 + more)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [8, 100])
def test_norms_with_a_weight_for_each_head_are_torchs(
    ops: ForwardOps, dim: int, dtype: torch.dtype
) -> None:
    x = numbers(1, 4, 3 * dim + 7, dtype=dtype, seed=1, whole=False)[..., : 3 * dim]
    x = x.view(1, 4, 3, dim)
    weight = numbers(3, dim, dtype=dtype, seed=2, whole=False)
    expected = norm_of(x, weight.float(), 1e-5, False, False, center=True)
    check_norm(ops.layer_norm(x, weight, None, 1e-5), expected, exact=False)


def gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(x, approximate="tanh")


@pytest.mark.parametrize("kind", [torch.nn.functional.silu, gelu, tanh_gelu])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 200, 1), (1, 3, 48), (1, 3, 2500), (5, 64)], ids=str)
def test_gates_are_torchs(
    ops: ForwardOps, shape: tuple[int, ...], dtype: torch.dtype, kind: Any
) -> None:
    dim = shape[-1]
    both = numbers(*shape[:-1], 2 * dim, dtype=dtype, seed=dim, whole=False)
    gate, up = both.split(dim, -1)
    names = {"silu": "silu_mul", "gelu": "gelu_mul", "tanh_gelu": "tanh_gelu_mul"}
    output, expected = getattr(ops, names[kind.__name__])(gate, up), kind(gate) * up
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # 1 + erf cancels
        return
    # exp and tanh differ in their last bits; torch's 1 + tanh keeps few of them below -2
    away = expected.abs() > 0.01
    assert ulps(output, expected)[away].max() <= 2
    assert (output - expected)[~away].abs().max() < 1e-3
    assert (output != expected)[away].float().mean() < 0.02


def written_gelu(x: torch.Tensor) -> torch.Tensor:
    """As transformers' "gelu_new", with the power as a card computes it."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def written_xielu(x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    """As transformers writes it."""
    positive, negative, beta, limit = parameters
    above = torch.nn.functional.softplus(positive)
    below = beta + torch.nn.functional.softplus(negative)
    return torch.where(
        x > 0,
        above * x * x + beta * x,
        (torch.expm1(torch.min(x, limit)) - x) * below + beta * x,
    )


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 3, 2500), (5, 64)], ids=str)
def test_activations_that_are_written_out_are_torchs(
    ops: ForwardOps, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    dim = shape[-1]
    x = numbers(*shape[:-1], dim + 3, dtype=dtype, seed=dim, whole=False)[..., :dim]
    cases = [(ops.new_gelu(x), written_gelu(x))]
    for alphas in ((0.2, -1.05), (-7.0, 25.0)):
        each = torch.tensor([*alphas, 0.5, -1e-6], dtype=dtype, device=DEVICE)
        given = [each[:1], each[1:2], each[2], each[3]]
        cases.append((ops.xielu(x, *given), written_xielu(x, given)))
    for output, expected in cases:
        assert output.is_contiguous()
        if dtype == torch.float32:
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        else:  # exp and tanh differ in their last bits
            assert (output != expected).float().mean() < 0.005
            torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01)


def written_gate(rows: torch.Tensor, limit: float, alpha: float) -> torch.Tensor:
    """As transformers writes GPT-OSS's."""
    gate, up = rows[..., ::2], rows[..., 1::2]
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(3, 2500), (5, 64)], ids=str)
def test_a_clamped_gate_is_torchs(
    ops: ForwardOps, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    num, dim = shape
    rows = 3 * numbers(num, 2 * dim + 3, dtype=dtype, seed=dim, whole=False)[:, : 2 * dim]
    rows[0, 4], rows[1, 5] = torch.nan, torch.inf
    bias = numbers(7, 2 * dim, dtype=dtype, seed=1, whole=False)
    experts = torch.tensor([6, 0, 3, 3, 1], device=DEVICE)[:num]
    expected = written_gate(rows + bias[experts], 2.0, 1.702)
    output = ops.clamped_gate(rows, bias, experts, 2.0, 1.702)
    assert output.is_contiguous()
    if dtype == torch.float32:
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    else:  # exp differs in its last bits
        assert (output != expected).float().mean() < 0.005 + 1 / output.numel()
        torch.testing.assert_close(output, expected, rtol=0.01, atol=0.01, equal_nan=True)


def rope_of(
    x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, form: RopeForm
) -> torch.Tensor:
    """As transformers writes it: Llama's halves, GLM's neighbours, GPT-OSS's and OLMo 2's types."""
    turning, rest = x[..., : form.width], x[..., form.width :]
    cosines, sines = cosines[:, None], sines[:, None]
    half = form.width // 2
    if form.by_pair and (form.parts or not form.interleaved):
        halves = turning[..., ::2], turning[..., 1::2]
        first, second = halves if form.parts else turning.chunk(2, -1)
        pairs = first * cosines - second * sines, second * cosines + first * sines
        turned = torch.cat(pairs, -1)
    else:
        if form.by_pair:
            cosines, sines = (each.repeat_interleave(2, dim=-1) for each in (cosines, sines))
        if form.interleaved:
            swapped = torch.stack((-turning[..., 1::2], turning[..., ::2]), -1).flatten(-2)
        else:
            swapped = torch.cat((-turning[..., half:], turning[..., :half]), -1)
        turned = turning * cosines + swapped * sines
    return torch.cat([turned.to(x.dtype), rest], -1)


FORMS = {
    "Llama": RopeForm(12, False, False, False),
    "GLM": RopeForm(12, True, True, False),
    "GPT-OSS": RopeForm(12, False, True, False),
    "OLMo 2": RopeForm(12, False, False, True),
    "Cohere": RopeForm(12, True, False, True),
    "ERNIE 4.5": RopeForm(12, True, True, True),
    "DeepSeek V3": RopeForm(12, True, True, False, True),
}


@pytest.mark.parametrize(
    "norm",
    [
        None,
        NormForm(1e-6, True, False),
        NormForm(1e-6, False, True),
        NormForm(1e-6, True, False, behind=True),
    ],
)
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [12, 20, 13])
@pytest.mark.parametrize("name", FORMS)
def test_rotations_are_torchs(
    ops: ForwardOps, name: str, dim: int, dtype: torch.dtype, norm: NormForm | None
) -> None:
    form = FORMS[name]
    joint = numbers(1, 5, 4 * dim + 7, dtype=dtype, seed=dim, whole=False)
    query = joint[..., : 3 * dim].view(1, 5, 3, dim).transpose(1, 2)
    key = joint[..., 3 * dim : 4 * dim].view(1, 5, 1, dim).transpose(1, 2)
    width = form.width // 2 if form.by_pair else form.width
    kind = torch.float32 if form.wide else dtype
    cosines, sines = (numbers(1, 5, width + 1, dtype=kind, seed=at, whole=False) for at in (1, 2))
    cosines, sines = cosines[..., :width], sines[..., :width]
    weights = [numbers(dim, dtype=dtype, seed=at, whole=False) for at in (3, 4)]
    given = weights if norm is not None else [None, None]
    found = rotated(ops, (query, key), (cosines, sines), given, form, norm)
    for x, output, weight in zip((query, key), found, weights, strict=True):
        if norm is not None and norm.behind:
            expected = norm_of(rope_of(x, cosines, sines, form), weight, *norm[:3])
        else:
            normed = x if norm is None else norm_of(x, weight, *norm[:3])
            expected = rope_of(normed, cosines, sines, form)
        check_rotation(output, expected, exact=norm is None)
    if norm is None:
        alone = ops.rotate(query, cosines, sines, form)
        check_rotation(alone, rope_of(query, cosines, sines, form), exact=True)


def slots_of(
    tokens: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, *, is_latent: bool = False
) -> CacheSlots:
    """Slots of a cache of nothing but NaN, in an order that is not that of the tokens."""
    keys, values = (torch.full((3 * tokens, heads, dim), torch.nan, dtype=dtype) for dim in dims)
    if is_latent:
        values = keys[..., : dims[1]]
    slots = (torch.arange(tokens) * 2 + 1).flip(0)
    return CacheSlots(keys.to(DEVICE), values.to(DEVICE), slots.to(DEVICE))


def taken(cached: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What the cache has in these slots; it has nothing elsewhere."""
    others = torch.ones(len(cached), dtype=torch.bool, device=DEVICE)
    others[slots] = False
    assert cached[others].isnan().all()
    return cached[slots]


def rotated(
    ops: ForwardOps,
    both: tuple[torch.Tensor, torch.Tensor],
    angles: tuple[torch.Tensor, torch.Tensor],
    weights: list[torch.Tensor | None],
    form: RopeForm,
    norm: NormForm | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and keys, which are read in their slots, in the shapes that they are given in."""
    query, key = both
    _, heads, tokens, dim = key.shape
    slots = slots_of(tokens, heads, (dim, 4), key.dtype)
    value = numbers(tokens, heads, 4, dtype=key.dtype, seed=9, whole=False)
    turned = ops.rotate_and_store(query, key, value, *angles, *weights, form, norm, slots)
    assert torch.equal(taken(slots.values, slots.kv_slots), value)
    keys = taken(slots.keys, slots.kv_slots)
    return turned.transpose(0, 1)[None], keys.transpose(0, 1)[None]


def check_rotation(output: torch.Tensor, expected: torch.Tensor, *, exact: bool) -> None:
    """exact: whether there is no norm."""
    assert output.shape == expected.shape
    assert output[0].transpose(0, 1).is_contiguous()
    if expected.dtype == torch.float32:  # a card may round once where torch rounds twice
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    elif exact:
        assert torch.equal(output, expected)
    else:  # a norm's sum in another order may move a number across a boundary
        assert (output != expected).float().mean() <= 0.05
        torch.testing.assert_close(output, expected, rtol=0.02, atol=0.05)


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("has_own", [False, True])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [12, 13])
def test_heads_with_weights_of_their_own_and_without_their_mean_are_torchs(
    ops: ForwardOps, dim: int, dtype: torch.dtype, has_own: bool, center: bool
) -> None:
    """As Command R+'s, in more heads than one program has."""
    form, norm = FORMS["Cohere"], NormForm(1e-5, False, False, center=center)
    heads = [numbers(1, 5, num, dim, dtype=dtype, seed=num, whole=False) for num in (6, 2)]
    both = [each.transpose(1, 2) for each in heads]
    cosines, sines = (numbers(1, 5, 12, dtype=torch.float32, seed=at, whole=False) for at in (1, 2))
    weights = [
        numbers(*([each.shape[2]] if has_own else []), dim, dtype=dtype, seed=3, whole=False)
        for each in heads
    ]
    found = rotated(ops, (both[0], both[1]), (cosines, sines), weights, form, norm)
    for each, weight, output in zip(heads, weights, found, strict=True):
        normed = norm_of(each, weight, 1e-5, False, False, center).transpose(1, 2)
        check_rotation(output, rope_of(normed, cosines, sines, form), exact=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("value_dim", [8, 13, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 1), (20, 10)])
@pytest.mark.parametrize("norm", [None, NormForm(1e-6, True, False)])
def test_keys_and_values_are_stored_by_the_rotation(
    ops: ForwardOps,
    heads: int,
    kv_heads: int,
    value_dim: int,
    dtype: torch.dtype,
    norm: NormForm | None,
) -> None:
    form, dim, tokens = FORMS["GLM"], 13, 5
    sizes = [heads * dim, kv_heads * dim, kv_heads * value_dim]
    joint = numbers(1, tokens, sum(sizes), dtype=dtype, seed=1, whole=False).split(sizes, -1)
    query, key, value = (
        part.view(1, tokens, num, -1).transpose(1, 2)
        for part, num in zip(joint, (heads, kv_heads, kv_heads), strict=True)
    )
    angles = [numbers(1, tokens, 6, dtype=dtype, seed=at, whole=False) for at in (2, 3)]
    weights = [None if norm is None else numbers(dim, dtype=dtype, seed=4, whole=False)] * 2
    slots = slots_of(tokens, kv_heads, (dim, value_dim), dtype)
    values = value[0].transpose(0, 1)
    turned = ops.rotate_and_store(query, key, values, *angles, *weights, form, norm, slots)
    assert torch.equal(taken(slots.values, slots.kv_slots), values)
    keys = taken(slots.keys, slots.kv_slots).transpose(0, 1)[None]
    for x, output in ((query, turned.transpose(0, 1)[None]), (key, keys)):
        normed = x if norm is None else norm_of(x, weights[0], *norm[:3])
        check_rotation(output, rope_of(normed, *angles, form), exact=norm is None)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["Llama", "DeepSeek V3", "ERNIE 4.5"])
def test_rows_of_latents_are_torchs(ops: ForwardOps, name: str, dtype: torch.dtype) -> None:
    form, norm, heads, rank, tokens = FORMS[name], NormForm(1e-6, True, False), 3, 20, 5
    joint = numbers(1, tokens, heads * (7 + 12), dtype=dtype, seed=1, whole=False)
    plain, query = joint.view(1, tokens, heads, 19).transpose(1, 2).split([7, 12], -1)
    latent, key = numbers(1, tokens, rank + 12, dtype=dtype, seed=2, whole=False).split(
        [20, 12], -1
    )
    key = key.view(1, 1, tokens, 12)
    width, kind = (6 if form.by_pair else 12), torch.float32 if form.wide else dtype
    angles = [numbers(1, tokens, width, dtype=kind, seed=at, whole=False) for at in (3, 4)]
    weight = numbers(rank, dtype=dtype, seed=5, whole=False)
    slots = slots_of(tokens, 1, (rank + 12, rank), dtype, is_latent=True)
    queries = ops.latent_rows(query, key, latent, *angles, weight, form, norm, slots)
    rows = taken(slots.keys, slots.kv_slots)
    ends = [rope_of(each, *angles, form)[0].transpose(0, 1) for each in (query, key)]
    for found, expected in zip((queries, rows), ends, strict=True):
        assert found.is_contiguous()
        torch.testing.assert_close(found[..., rank:], expected, rtol=1e-5, atol=1e-5)
    begins = norm_of(latent[0], weight, *norm[:3])
    assert (rows[:, 0, :rank] != begins).float().mean() <= (1 if dtype == torch.float32 else 0.05)
    torch.testing.assert_close(rows[:, 0, :rank], begins, rtol=0.02, atol=0.05)
    absorbs = numbers(heads, 7, rank, dtype=dtype, seed=6, whole=True)
    whole = ops.absorb_query(queries, plain[0], absorbs)
    assert whole is queries
    torch.testing.assert_close(whole[..., :rank].transpose(0, 1), torch.bmm(plain[0], absorbs))
    torch.testing.assert_close(whole[..., rank:], ends[0], rtol=1e-5, atol=1e-5)


def test_outputs_are_expanded_for_each_head(ops: ForwardOps) -> None:
    gathered = numbers(4, 3, 20, dtype=torch.float32, seed=1, whole=True)
    weight = numbers(3, 20, 6, dtype=torch.float32, seed=2, whole=True)
    found = ops.expand_output(gathered, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, torch.einsum("thr,hrd->thd", gathered, weight))


def routed(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouteForm, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers writes it."""
    scores = logits if form.scores == "logits" else logits.float()
    scores = {
        "logits": lambda: scores,
        "softmax": lambda: scores.softmax(-1),
        "sigmoid": lambda: scores.sigmoid(),
    }[form.scores]()
    chosen_by = scores if bias is None else scores + bias
    if form.num_groups > 1:
        by_group = chosen_by.view(len(logits), form.num_groups, -1)
        sums = by_group.topk(form.best_of_group).values.sum(-1)
        others = torch.ones_like(sums, dtype=torch.bool)
        others.scatter_(1, sums.topk(form.chosen_groups).indices, False)
        chosen_by = by_group.masked_fill(others[..., None], -torch.inf).view_as(chosen_by)
    ids = chosen_by.topk(form.num_chosen).indices
    weights = scores.gather(1, ids)
    if form.weighs == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + form.epsilon)
    elif form.weighs == "softmax":
        weights = weights.softmax(-1)
    return (weights if form.scale == 1 else weights * form.scale).to(dtype), ids


ROUTES = {
    "Qwen3-MoE": (RouteForm(3, "softmax", "scores", 1.0), False),
    "Mixtral": (RouteForm(2, "softmax", "sum", 1.0), False),
    "GPT-OSS": (RouteForm(4, "logits", "softmax", 1.0), False),
    "MiniMax-M2": (RouteForm(5, "sigmoid", "sum", 1.0), True),
    "scaled": (RouteForm(1, "sigmoid", "sum", 2.5), False),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_experts", [5, 64, 129])
@pytest.mark.parametrize("name", ROUTES)
def test_routes_are_torchs(
    ops: ForwardOps, name: str, num_experts: int, dtype: torch.dtype
) -> None:
    check_route(ops, *ROUTES[name], num_experts, dtype)


GROUPED = {
    "DeepSeek V2": (RouteForm(3, "softmax", "scores", 16.0, 0.0, 3, 2, 1), False, 12),
    "DeepSeek V3": (RouteForm(8, "sigmoid", "sum", 2.5, 1e-20, 8, 4, 2), True, 256),
    "one of three": (RouteForm(2, "sigmoid", "sum", 1.0, 0.5, 3, 1, 2), True, 129),
    "all": (RouteForm(3, "sigmoid", "sum", 1.0, 1e-20, 2, 2, 2), True, 8),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", GROUPED)
def test_routes_by_groups_are_torchs(ops: ForwardOps, name: str, dtype: torch.dtype) -> None:
    form, has_bias, num_experts = GROUPED[name]
    check_route(ops, form, has_bias, num_experts, dtype)


def check_route(
    ops: ForwardOps, form: RouteForm, has_bias: bool, num_experts: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_experts)
    # numbers that differ in bfloat16 too: between equal ones torch's choice is its own
    order = torch.rand(7, num_experts, generator=generator).argsort(-1)
    logits = ((order - num_experts // 2) / 16).to(dtype).to(DEVICE)
    bias = None
    if has_bias:
        bias = (torch.rand(num_experts, generator=generator) * 3).to(DEVICE)
    weights, ids = ops.route(logits, bias, form, dtype)
    expected, expected_ids = routed(logits, bias, form, dtype)
    assert torch.equal(ids, expected_ids)
    if dtype == torch.float32:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    else:
        assert ulps(weights, expected).max() <= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("num_experts", [3, 16])
def test_routes_by_margin_are_torchs(ops: ForwardOps, num_experts: int, dtype: torch.dtype) -> None:
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    generator = torch.Generator().manual_seed(num_experts)
    order = torch.rand(40, num_experts, generator=generator).argsort(-1)
    logits = (100 + order / 2 - num_experts).to(dtype).to(DEVICE)  # some are close to the best
    logits[::2] = (order[::2] - num_experts // 2).to(dtype).to(DEVICE)
    weights, ids = ops.route_by_margin(logits, 0.0251)
    expected, expected_ids = sparsemixer(logits, jitter_eps=0.01255, training=False)
    assert torch.equal(ids, expected_ids)
    assert ((weights > 0.3) & (weights < 1)).any()
    if dtype == torch.float32:
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)
    else:
        assert ulps(weights, expected).max() <= 1


@given(
    ids=st.integers(1, 3).flatmap(
        lambda chosen: st.lists(
            st.lists(st.integers(0, 6), min_size=chosen, max_size=chosen), min_size=1, max_size=9
        )
    )
)
@settings(deadline=None, max_examples=25)
def test_choices_are_ordered_by_expert(ids: list[list[int]]) -> None:
    chosen = torch.tensor(ids, device=DEVICE)
    flat = chosen.view(-1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward_ops, "_CHOICES_AT_ONCE", 8)  # several times
        ordered, places, tokens, inverse, ends = ForwardOps().order_experts(chosen, 7)
    expected = flat.sort(stable=True)
    assert torch.equal(ordered, expected.values)
    assert torch.equal(places, expected.indices)
    assert torch.equal(tokens, expected.indices // chosen.shape[1])
    assert torch.equal(inverse[places], torch.arange(len(flat), device=DEVICE))
    assert ends.tolist() == [int((flat <= expert).sum()) for expert in range(7)]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("weight_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 1500])
def test_experts_are_combined_as_torch_does(
    ops: ForwardOps, dim: int, weight_type: torch.dtype, has_bias: bool
) -> None:
    tokens, chosen, experts = 4, 3, 5
    generator = torch.Generator().manual_seed(dim)
    ids = torch.rand(tokens, experts, generator=generator).argsort(-1)[:, :chosen].to(DEVICE)
    ordered, places, _, inverse, _ = ops.order_experts(ids, experts)
    rows = numbers(tokens * chosen, dim, dtype=torch.bfloat16, seed=1, whole=False)
    weights = numbers(tokens, chosen, dtype=weight_type, seed=2, whole=False)
    bias = numbers(experts, dim, dtype=torch.bfloat16, seed=3, whole=False) if has_bias else None
    output = ops.combine_experts(rows, weights, inverse, ids, bias, None)
    added = rows if bias is None else rows + bias[ordered]
    weighted = added * weights.view(-1)[places][:, None]
    expected = weighted[inverse].view(tokens, chosen, dim).sum(1).to(torch.bfloat16)
    assert (output != expected).float().mean() < 0.01  # by the order of the sum
    torch.testing.assert_close(output, expected, rtol=0.01, atol=0.1)
    more = numbers(1, tokens, dim + 5, dtype=torch.bfloat16, seed=4, whole=False)[..., :dim]
    both = ops.combine_experts(rows, weights, inverse, ids, bias, more)
    assert torch.equal(both, output + more[0])


DENSE = ["Qwen3", "Gemma 2", "Qwen2", "OLMo 2", "GLM", "Cohere", "ERNIE 4.5", "Phi-3", "OPT"]
# activations that are written out, norms behind the rope; norms of copies in float32, of heads by a
# weight for each
OTHERS = [
    ("GPT-2", "float32"),
    ("Apertus", "float32"),
    ("Hunyuan", "float32"),
    ("OLMo", "bfloat16"),
    ("Cohere, normed heads", "float32"),
    ("Cohere, normed heads", "bfloat16"),
]
# torch records the products of experts in bfloat16 alone
MIXTURES = ["DeepSeek V2 (MLA)", "DeepSeek V3 (MLA)", "Phi-3.5-MoE"]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, dtype) for name in DENSE for dtype in ("float32", "bfloat16")),
        *OTHERS,
        ("MiniCPM3 (MLA)", "float32"),
        *((name, "bfloat16") for name in MIXTURES),
    ],
)
def test_fused_forwards_compute_what_the_model_does(
    ops: ForwardOps, name: str, dtype: Any, tmp_path: Path
) -> None:
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == name)
    tiny_models.save(architecture, tmp_path)
    module = load_model(str(tmp_path), device=DEVICE.type, dtype=dtype).module
    before = {name: each.clone() for name, each in module.state_dict().items()}
    ids = torch.arange(6, device=DEVICE)[None] * 7 % tiny_models.VOCAB_SIZE
    keep = torch.tensor([5, 3], device=DEVICE)
    context = OwnStored()
    with torch.inference_mode():
        expected = eager(module)(ids, ids, keep, context)
    weights: list[int] = []
    for _ in range(2):  # once more, as when the cache is sized first
        forward = trace_for_card(module, ops, tiny_models.VOCAB_SIZE, DEVICE)
        assert forward is not None
        with torch.inference_mode():
            output = forward(ids, ids, keep, context)
        limit = 1e-4 if dtype == "float32" else 0.05
        assert (output - expected).abs().max() <= limit * expected.abs().max()
        storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
        weights.append(hash(frozenset(storages)))
    assert weights[0] == weights[1], "joined weights are moved once"
    for key, each in module.state_dict().items():
        assert torch.equal(each, before[key]), key


def test_bounds_of_queries_keys_and_values_bite(ops: ForwardOps, tmp_path: Path) -> None:
    (architecture,) = (each for each in tiny_models.ARCHITECTURES if each.name == "OLMo")
    tiny_models.save(architecture, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = torch.arange(6, device=DEVICE)[None] * 7 % tiny_models.VOCAB_SIZE
    keep = torch.tensor([5, 3], device=DEVICE)
    outputs = {}
    for bound in (None, 0.01):
        (tmp_path / "config.json").write_text(json.dumps(config | {"clip_qkv": bound}))
        module = load_model(str(tmp_path), device=DEVICE.type, dtype="float32").module
        forward = trace_for_card(module, ops, tiny_models.VOCAB_SIZE, DEVICE)
        assert forward is not None
        with torch.inference_mode():
            context = OwnStored()
            expected = eager(module)(ids, ids, keep, context)
            outputs[bound] = forward(ids, ids, keep, context)
        assert (outputs[bound] - expected).abs().max() <= 1e-4 * expected.abs().max()
    assert (outputs[None] - outputs[0.01]).abs().max() > 1e-2 * outputs[None].abs().max()
