"""Routing and experts by the C kernels, against torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.experts import (
    ExpertsForm,
    Mixture,
    PackedMixture,
    UnknownExpertsError,
    form_of,
)
from slipstream_core.kernels.codes.coded_matrix import CodedMatrix
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, dequantised
from slipstream_core.kernels.codes.formats import MXFP4, Codes
from slipstream_core.kernels.codes.online import ONLINE, quantised
from slipstream_core.kernels.cpu.kernels import Kernels, kernels

torch.set_num_threads(1)
FOUND = kernels()
pytestmark = pytest.mark.skipif(FOUND is None, reason="there is no C compiler")


@pytest.fixture
def ours() -> Kernels:
    assert FOUND is not None
    return FOUND


def _routed(
    logits: torch.Tensor, bias: torch.Tensor | None, form: RouteForm
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and ids in float64, by torch; of equal scores the first expert's comes first."""
    wide = logits.double()
    scores = {
        "logits": wide,
        "softmax": wide.softmax(-1),
        "sigmoid": wide.sigmoid(),
    }[form.scores]
    by = scores if bias is None else scores + bias.double()
    if form.num_groups > 1:
        groups = by.view(len(by), form.num_groups, -1)
        of_groups = groups.topk(form.best_of_group, dim=-1)[0].sum(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(1, of_groups.topk(form.chosen_groups, dim=-1)[1], True)
        by = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = by.sort(dim=-1, descending=True, stable=True)[1][:, : form.num_chosen]
    weights = scores.gather(1, ids)
    if form.weighs == "sum":
        weights = weights / (weights.sum(-1, keepdim=True) + form.epsilon)
    elif form.weighs == "softmax":
        weights = weights.softmax(-1)
    return weights * form.scale, ids


FORMS = st.sampled_from(
    [
        RouteForm(8, "softmax", "sum", 1.0),
        RouteForm(3, "softmax", "scores", 16.0),
        RouteForm(4, "logits", "softmax", 1.0),
        RouteForm(6, "sigmoid", "sum", 2.5, 1e-20, 4, 2, 2),
        RouteForm(2, "softmax", "scores", 1.0, 0.0, 6, 3, 1),
        RouteForm(1, "sigmoid", "sum", 1.0, 0.5),
    ]
)


@example(  # equal logits
    form=RouteForm(8, "softmax", "sum", 1.0), tokens=22, seed=524, has_bias=False
)
@settings(deadline=None, max_examples=60)
@given(form=FORMS, tokens=st.integers(1, 70), seed=st.integers(0, 2**31), has_bias=st.booleans())
def test_routes_as_torch_does(form: RouteForm, tokens: int, seed: int, has_bias: bool) -> None:
    assert FOUND is not None
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 24, generator=generator) * 3
    bias = torch.randn(24, generator=generator) if has_bias and form.scores != "logits" else None
    weights, ids = FOUND.route(logits, bias, form)
    expected, which = _routed(logits, bias, form)
    assert torch.equal(ids.long(), which)
    torch.testing.assert_close(weights.double(), expected, rtol=2e-5, atol=1e-7)
    for row in (0, tokens - 1):
        alone = FOUND.route(logits[row : row + 1], bias, form)
        assert torch.equal(alone[0][0], weights[row])
        assert torch.equal(alone[1][0], ids[row])


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf"), 0.0])
def test_chooses_different_experts_whatever_the_numbers_are(ours: Kernels, number: float) -> None:
    for scores, groups in (("softmax", 1), ("sigmoid", 4), ("logits", 1)):
        form = RouteForm(5, scores, "scores", 1.0, 0.0, groups, groups, 1)
        _, ids = ours.route(torch.full((3, 24), number), None, form)
        for row in ids.tolist():
            assert len(set(row)) == 5
            assert all(0 <= each < 24 for each in row)


SHAPES = {"experts": 6, "k": 40, "inner": 24, "n": 36}


def _mixture(form: ExpertsForm, seed: int = 0, has_bias: bool = False, **shape: int) -> Mixture:
    torch.manual_seed(seed)
    sizes = SHAPES | shape
    experts, k, inner, n = (sizes[each] for each in ("experts", "k", "inner", "n"))
    width = 2 * inner if form.is_gated else inner
    up, down = torch.randn(experts, width, k), torch.randn(experts, n, inner)
    if form.is_turned:
        up, down = (each.transpose(1, 2).contiguous() for each in (up, down))
    biases = (torch.randn(experts, width), torch.randn(experts, n)) if has_bias else (None, None)
    return Mixture(
        torch.nn.Parameter(up, requires_grad=False),
        biases[0],
        torch.nn.Parameter(down, requires_grad=False),
        biases[1],
        form,
    )


def _inputs(mixture: Mixture, tokens: int, chosen: int, k: int) -> tuple[torch.Tensor, ...]:
    experts = len(mixture.up)
    ids = torch.stack([torch.randperm(experts)[:chosen] for _ in range(tokens)])
    return torch.randn(tokens, k), ids, torch.rand(tokens, chosen)


OF_EXPERTS = [
    (ExpertsForm("silu"), False),
    (ExpertsForm("gelu"), True),
    (ExpertsForm("tanh gelu", is_turned=True), False),
    (ExpertsForm("clamped swiglu", is_interleaved=True, is_turned=True, alpha=1.7, limit=7), True),
    (ExpertsForm("squared relu"), False),
]


@pytest.mark.parametrize(("form", "has_bias"), OF_EXPERTS, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_computes_what_torch_does(
    ours: Kernels, form: ExpertsForm, has_bias: bool, threads: int
) -> None:
    mixture = _mixture(form, has_bias=has_bias)
    packed = mixture.packed(ours)
    assert isinstance(packed, PackedMixture)
    ours.set_threads(threads)
    try:
        for tokens in (1, 2, 7, 100, 600):
            x, ids, weights = _inputs(mixture, tokens, 3, 40)
            given = packed(x, ids, weights)
            torch.testing.assert_close(given, mixture(x, ids, weights), rtol=1e-4, atol=2e-3)
            for row in {0, tokens // 2, tokens - 1}:  # its bits do not depend on the others
                one = slice(row, row + 1)
                assert torch.equal(packed(x[one], ids[one], weights[one])[0], given[row])
    finally:
        ours.set_threads(1)


def test_a_step_with_no_row_for_most_experts_reads_none_of_theirs(ours: Kernels) -> None:
    mixture = _mixture(ExpertsForm("silu"), experts=50)
    packed = mixture.packed(ours)
    assert packed is not None
    for each in range(50):  # whatever reads them is noticed
        if each != 17:
            packed._held[0][each].fill_(torch.nan)  # type: ignore[index]
    x, _, weights = _inputs(mixture, 4, 1, 40)
    ids = torch.full((4, 1), 17)
    assert not packed(x, ids, weights).isnan().any()


def _coded(parameter: torch.Tensor, name: str, is_turned: bool) -> CodedParameter:
    rows = parameter.transpose(1, 2) if is_turned else parameter
    flat = rows.reshape(-1, rows.shape[2])
    if name == "mxfp4":
        generator = torch.Generator().manual_seed(len(flat))
        codes = torch.randint(0, 16, flat.shape, generator=generator).byte().numpy()
        scales = torch.randint(120, 130, (len(flat), flat.shape[1] // 32), generator=generator)
        own = scales.byte().numpy()
        matrix = CodedMatrix(
            MXFP4, len(flat), flat.shape[1], lambda rows: Codes(codes[rows], scales=own[rows])
        )
    else:
        matrix = quantised(flat, ONLINE[name])
    return CodedParameter(matrix, len(parameter), is_turned=is_turned)


@pytest.mark.parametrize("name", [*ONLINE, "mxfp4"])
@pytest.mark.parametrize(("form", "has_bias"), OF_EXPERTS, ids=str)
def test_codes_compute_what_the_dequantised_experts_do(
    ours: Kernels, form: ExpertsForm, has_bias: bool, name: str
) -> None:
    mixture = _mixture(form, has_bias=has_bias, k=64, inner=32, n=48)
    coded = [_coded(each, name, form.is_turned) for each in (mixture.up, mixture.down)]
    biases: Any = (mixture.up_bias, mixture.down_bias)
    one = Mixture(coded[0], biases[0], coded[1], biases[1], form).packed(ours)
    plain = [torch.nn.Parameter(dequantised(each), requires_grad=False) for each in coded]
    other = Mixture(plain[0], biases[0], plain[1], biases[1], form).packed(ours)
    assert one is not None
    assert other is not None
    assert sum(each.nbytes for each in one.tensors()) < sum(each.nbytes for each in other.tensors())
    for tokens in (1, 3, 40):
        inputs = _inputs(mixture, tokens, 3, 64)
        assert torch.equal(one(*inputs), other(*inputs))


class _Experts:
    """The attributes that transformers gives to experts."""

    has_gate, has_post_expert_norm, is_transposed = True, False, False

    def __init__(self, apply_gate: Any, **more: Any) -> None:
        self._apply_gate = apply_gate
        self.__dict__.update(more)


def _clamped(both: torch.Tensor) -> torch.Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


def _halves(both: torch.Tensor) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def test_the_form_of_experts_is_found_by_a_trial() -> None:
    assert form_of(_Experts(_halves)) == ExpertsForm("silu")
    interleaved = _Experts(lambda both: _halves(torch.cat([both[:, ::2], both[:, 1::2]], -1)))
    assert form_of(interleaved) == ExpertsForm("silu", is_interleaved=True)
    clamped = ExpertsForm("clamped swiglu", is_interleaved=True, alpha=1.702, limit=7.0)
    assert form_of(_Experts(_clamped, some=3, limit=7.0, factor=1.702)) == clamped
    with pytest.raises(UnknownExpertsError, match="activation"):
        form_of(_Experts(_clamped, limit=7.0))
    with pytest.raises(UnknownExpertsError, match="activation"):
        form_of(_Experts(lambda both: both.chunk(2, dim=-1)[0].sin()))
    with pytest.raises(UnknownExpertsError, match="norm behind them"):
        form_of(_Experts(_halves, has_post_expert_norm=True))
