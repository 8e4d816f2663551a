"""Each kernel of a fused forward by itself, against torch's operators in float64.

Used where kernels can run: to check a card, by compute-sanitizer, and by tests under Triton's
interpreter. Inputs are rounded to the dtype first, so an error is the kernel's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from slipstream_core.attention.interface import CacheSlots
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.forward_ops import ForwardOps
from slipstream_core.forward.projection import Dense
from slipstream_core.forward.rope_patterns import NormForm, RopeForm
from slipstream_verify.gpu_check.reference_cases import relative_error

# sizes as in Qwen3, but for the numbers of tokens and heads
_TOKENS, _HIDDEN, _HEADS, _HEAD_DIM = 3, 1024, 3, 128
_EXPERTS, _CHOSEN = 128, 8
_EPSILON = 1e-6
_SCALE = 0.22  # Granite's
_MARGIN = 0.0151  # lies between two distances, also where they are rounded


def operator_cases(device: torch.device, dtype: torch.dtype) -> dict[str, Callable[[], float]]:
    """By name: what runs a kernel and returns its output's largest relative error
    (`reference_cases.relative_error`), which is infinite if it chose other ids.
    """
    cases = _OperatorCases(device, dtype)
    return {
        "rms_norm": cases.rms_norm,
        "add_rms_norm": cases.add_rms_norm,
        "add_rms_norm, scaled": cases.add_scaled_rms_norm,
        "add_rms_norm, normed": cases.add_normed_rms_norm,
        "rms_norm_add": cases.rms_norm_add,
        "two_rms_norms": cases.two_rms_norms,
        "layer_norm": cases.layer_norm,
        "add_layer_norm": cases.add_layer_norm,
        "linear of a row": cases.linear,
        "linear_norm_linear of a row": cases.linear_norm_linear,
        "add_norm_linear of a row": cases.add_norm_linear,
        "silu_mul": cases.silu_mul,
        "new_gelu": cases.new_gelu,
        "xielu": cases.xielu,
        "clamped_gate": cases.clamped_gate,
        "rotate": cases.rotate,
        "rotate, normed behind": cases.rotate_before_norm,
        "rotate, of own weights": cases.rotate_by_own_weights,
        "latent_rows": cases.latent_rows,
        "route": cases.route,
        "route_by_margin": cases.route_by_margin,
        "order_experts": cases.order_experts,
        "combine_experts": cases.combine_experts,
        "experts of a row": partial(cases.experts, 1),
        "experts of few rows": partial(cases.experts, _TOKENS),
    }


class _OperatorCases:
    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._ops = ForwardOps()

    def rms_norm(self) -> float:
        x, weight = self._normal(1, _TOKENS, _HIDDEN), self._normal(_HIDDEN, seed=1)
        output = self._ops.rms_norm(x, weight, _EPSILON, True, False)
        return relative_error(output, _normed(x.cpu().double(), weight))

    def add_rms_norm(self) -> float:
        x, more = (self._normal(1, _TOKENS, _HIDDEN, seed=at) for at in range(2))
        weight = self._normal(_HIDDEN, seed=2)
        total, output = self._ops.add_rms_norm(x, more, weight, _EPSILON, True, False)
        added = (x + more).cpu().double()
        return max(relative_error(total, added), relative_error(output, _normed(added, weight)))

    def add_scaled_rms_norm(self) -> float:
        x, more = (self._normal(1, _TOKENS, _HIDDEN, seed=at) for at in range(2))
        weight = self._normal(_HIDDEN, seed=2)
        total, output = self._ops.add_rms_norm(x, more, weight, _EPSILON, True, False, _SCALE)
        added = x.cpu().double() * _SCALE + more.cpu().double()
        normed = _normed(total.cpu().double(), weight)  # the sum is rounded
        return max(relative_error(total, added), relative_error(output, normed))

    def add_normed_rms_norm(self) -> float:
        x, more = (self._normal(1, _TOKENS, _HIDDEN, seed=at) for at in range(2))
        weight, before = (self._normal(_HIDDEN, seed=at) for at in (2, 3))
        total, output = self._ops.add_rms_norm(x, more, weight, _EPSILON, True, False, 1.0, before)
        added = _normed(x.cpu().double(), before) + more.cpu().double()
        normed = _normed(total.cpu().double(), weight)
        return max(relative_error(total, added), relative_error(output, normed))

    def rms_norm_add(self) -> float:
        x, more = (self._normal(1, _TOKENS, _HIDDEN, seed=at) for at in range(2))
        weight = self._normal(_HIDDEN, seed=2)
        output = self._ops.rms_norm_add(x, more, weight, _EPSILON, True, False)
        expected = _normed(x.cpu().double(), weight) + more.cpu().double()
        return relative_error(output, expected)

    def two_rms_norms(self) -> float:
        # parts of a joined product, as queries and keys are
        joined, num = self._normal(1, _TOKENS, 2 * _HIDDEN), _HIDDEN + _HIDDEN // 2
        x, other = joined[..., :num], joined[..., num:]
        weights = [self._normal(each.shape[-1], seed=1) for each in (x, other)]
        found = self._ops.two_rms_norms(x, other, weights[0], weights[1], _EPSILON, True, False)
        return max(
            relative_error(output, _normed(each.cpu().double(), weight))
            for output, each, weight in zip(found, (x, other), weights, strict=True)
        )

    def linear(self) -> float:
        x, weight = self._normal(1, 1, _HIDDEN), self._normal(_HEADS * _HEAD_DIM, _HIDDEN, seed=1)
        bias = self._normal(len(weight), seed=2)
        output = self._ops.linear(x, Dense(weight, bias))
        return relative_error(output, _product(x, weight) + bias.cpu().double())

    def linear_norm_linear(self) -> float:
        x, more = self._normal(1, 1, 2 * _HIDDEN), self._normal(1, 1, _HIDDEN, seed=1)
        weight, scale = self._normal(_HIDDEN, 2 * _HIDDEN, seed=2), self._normal(_HIDDEN, seed=3)
        behind = self._normal(2 * _HEAD_DIM, _HIDDEN, seed=4)
        settings = scale, _EPSILON, True, False
        total, output, kept = self._ops.linear_norm_linear(
            x, Dense(weight), more, *settings, Dense(behind), "silu", True
        )
        assert kept is not None
        added = _product(x, weight) + more.cpu().double()
        errors = [relative_error(kept, _normed(total.cpu().double(), scale))]
        errors.append(relative_error(output, self._gated(total, scale, behind)))
        return max(relative_error(total, added), *errors)

    def add_norm_linear(self) -> float:
        x, more = (self._normal(1, 1, _HIDDEN, seed=at) for at in range(2))
        scale, behind = self._normal(_HIDDEN, seed=3), self._normal(2 * _HEAD_DIM, _HIDDEN, seed=4)
        settings = scale, _EPSILON, True, False
        total, output = self._ops.add_norm_linear(x, more, *settings, Dense(behind), "silu")
        added = (x + more).cpu().double()
        expected = self._gated(total, scale, behind)
        return max(relative_error(total, added), relative_error(output, expected))

    def _gated(self, x: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Of x's norm, rounded where torch's operators would."""
        plain = _normed(x.cpu().double(), torch.ones_like(scale)).to(self._dtype)
        gate, up = _product(plain * scale.cpu(), weight).to(self._dtype).double().chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    def layer_norm(self) -> float:
        x, weight = self._normal(1, _TOKENS, _HIDDEN), self._normal(_HIDDEN, seed=1)
        errors = []
        for given in (weight, None):
            expected = torch.nn.functional.layer_norm(
                x.cpu().double(),
                [_HIDDEN],
                None if given is None else given.cpu().double(),
                None,
                _EPSILON,
            )
            output = self._ops.layer_norm(x, given, None, _EPSILON)
            errors.append(relative_error(output, expected))
        return max(errors)

    def add_layer_norm(self) -> float:
        x, more = (self._normal(1, _TOKENS, _HIDDEN, seed=at) for at in range(2))
        weight, bias = (self._normal(_HIDDEN, seed=at) for at in (2, 3))
        total, output = self._ops.add_layer_norm(x, more, weight, bias, _EPSILON)
        added = (x + more).cpu().double()
        expected = torch.nn.functional.layer_norm(
            added, [_HIDDEN], weight.cpu().double(), bias.cpu().double(), _EPSILON
        )
        return max(relative_error(total, added), relative_error(output, expected))

    def silu_mul(self) -> float:
        # halves of a joined product
        gate, up = self._normal(1, _TOKENS, 6 * _HIDDEN).chunk(2, -1)
        expected = torch.nn.functional.silu(gate.cpu().double()) * up.cpu().double()
        return relative_error(self._ops.silu_mul(gate, up), expected)

    def new_gelu(self) -> float:
        x = self._normal(1, _TOKENS, 6 * _HIDDEN)
        expected = torch.nn.functional.gelu(x.cpu().double(), approximate="tanh")
        return relative_error(self._ops.new_gelu(x), expected)

    def xielu(self) -> float:
        x = self._normal(1, _TOKENS, 6 * _HIDDEN)
        given = torch.tensor([0.2, -1.05, 0.5, -1e-6]).to(self._device, self._dtype)
        parameters = [given[:1], given[1:2], given[2], given[3]]
        output = self._ops.xielu(x, *parameters)
        wide, (above, below, beta, limit) = x.cpu().double(), given.cpu().double()
        expected = beta * wide + torch.where(
            wide > 0,
            torch.nn.functional.softplus(above) * wide * wide,
            (torch.expm1(torch.minimum(wide, limit)) - wide)
            * (beta + torch.nn.functional.softplus(below)),
        )
        return relative_error(output, expected)

    def clamped_gate(self) -> float:
        rows, bias = self._normal(_TOKENS, 2 * _HIDDEN), self._normal(4, 2 * _HIDDEN, seed=1)
        experts = torch.arange(_TOKENS, device=self._device)
        output = self._ops.clamped_gate(rows, bias, experts, 1.0, 1.702)
        added = (rows + bias[:_TOKENS]).cpu().double()
        gate, up = added[:, ::2].clamp(max=1.0), added[:, 1::2].clamp(-1.0, 1.0)
        return relative_error(output, (up + 1) * (gate * torch.sigmoid(1.702 * gate)))

    def rotate(self) -> float:
        return self._rotate(NormForm(_EPSILON, True, False))

    def rotate_before_norm(self) -> float:
        return self._rotate(NormForm(_EPSILON, True, False, behind=True))

    def rotate_by_own_weights(self) -> float:
        return self._rotate(NormForm(_EPSILON, False, False, center=True), has_own=True)

    def _rotate(self, norm: NormForm, *, has_own: bool = False) -> float:
        """has_own: each head has a weight."""
        query, key = (
            self._normal(1, _TOKENS, heads, _HEAD_DIM, seed=heads).transpose(1, 2)
            for heads in (_HEADS, 1)
        )
        weights = [
            self._normal(*([each.shape[1]] if has_own else []), _HEAD_DIM, seed=at)
            for at, each in ((4, query), (5, key))
        ]
        angles = torch.arange(_TOKENS * _HEAD_DIM // 2).view(1, _TOKENS, -1).repeat(1, 1, 2)
        cosines, sines = (
            each.to(self._device, self._dtype) for each in (angles.cos(), angles.sin())
        )
        form = RopeForm(_HEAD_DIM, False, False, False)
        value, slots = self._normal(_TOKENS, 1, _HEAD_DIM, seed=6), self._slots(_HEAD_DIM)
        turned = self._ops.rotate_and_store(
            query, key, value, cosines, sines, weights[0], weights[1], form, norm, slots
        )
        keys, values = slots.keys[slots.kv_slots], slots.values[slots.kv_slots]
        errors = [relative_error(values, value.cpu().double())]
        outputs = (each.transpose(0, 1)[None] for each in (turned, keys))
        for x, output, weight in zip((query, key), outputs, weights, strict=True):
            turning = x.cpu().double()
            if norm.center:
                turning = turning - turning.mean(-1, keepdim=True)
            if not norm.behind:
                turning = _normed(turning, weight[:, None] if has_own else weight)
            first, second = turning.chunk(2, -1)
            crossed = torch.cat((-second, first), -1)
            expected = turning * cosines.cpu().double() + crossed * sines.cpu().double()
            if norm.behind:
                expected = _normed(expected, weight)
            errors.append(relative_error(output, expected))
        return max(errors)

    def latent_rows(self) -> float:
        query = self._normal(1, _TOKENS, _HEADS, _HEAD_DIM, seed=1).transpose(1, 2)
        row = self._normal(1, _TOKENS, _HIDDEN + _HEAD_DIM)
        latent, key = row[..., :_HIDDEN], row[..., _HIDDEN:]
        weight, form = self._normal(_HIDDEN, seed=2), RopeForm(_HEAD_DIM, True, True, False, True)
        angles = torch.arange(_TOKENS * _HEAD_DIM // 2).view(1, _TOKENS, -1)
        cosines, sines = (
            each.to(self._device, self._dtype) for each in (angles.cos(), angles.sin())
        )
        norm, keys = NormForm(_EPSILON, True, False), key[:, None]
        slots = self._slots(_HIDDEN + _HEAD_DIM)
        turning = query, keys, latent, cosines, sines, weight, form, norm
        queries = self._ops.latent_rows(*turning, slots)
        rows = slots.keys[slots.kv_slots]
        errors = [relative_error(rows[:, 0, :_HIDDEN], _normed(latent[0].cpu().double(), weight))]
        for x, output in ((query, queries), (keys, rows)):
            first, second = (x[0, :, :, at::2].cpu().double() for at in (0, 1))
            cos, sin = cosines.cpu().double(), sines.cpu().double()
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
            errors.append(relative_error(output[..., _HIDDEN:], turned.transpose(0, 1)))
        return max(errors)

    def _slots(self, dim: int) -> CacheSlots:
        """Slots of an empty cache with one head, last token first."""
        keys, values = (self._normal(2 * _TOKENS, 1, dim) * math.nan for _ in range(2))
        return CacheSlots(keys, values, torch.arange(_TOKENS, device=self._device).flip(0))

    def route(self) -> float:
        # numbers that differ in bfloat16 too: between equal ones torch's choice is its own
        order = self._normal(_TOKENS, _EXPERTS).cpu().float().argsort(-1)
        logits = ((order - _EXPERTS // 2) / 16).to(self._device, self._dtype)
        form = RouteForm(_CHOSEN, "softmax", "sum", 1.0)
        weights, ids = self._ops.route(logits, None, form, self._dtype)
        expected, expected_ids = logits.cpu().double().softmax(-1).topk(_CHOSEN, -1)
        if not torch.equal(ids.cpu(), expected_ids):
            return math.inf
        return relative_error(weights, expected / expected.sum(-1, keepdim=True))

    def route_by_margin(self) -> float:
        order = self._normal(_TOKENS, _EXPERTS).cpu().float().argsort(-1)
        logits = (order + 100).to(self._device, self._dtype)
        weights, ids = self._ops.route_by_margin(logits, _MARGIN)
        if not torch.equal(ids.cpu(), order.topk(2, -1).indices):
            return math.inf
        left = logits.cpu().double()
        expected = []
        for _ in range(2):
            top = left.amax(-1, keepdim=True)
            far = (top - left) / torch.maximum(left.abs(), top) > _MARGIN
            expected.append(left.masked_fill(far, -math.inf).softmax(-1).amax(-1))
            left = left.masked_fill(left == top, -math.inf)
        return relative_error(weights, torch.stack(expected, -1))

    def order_experts(self) -> float:
        ids = self._choices()
        flat = ids.cpu().view(-1)
        ordered, places = flat.sort(stable=True)
        inverse = torch.empty_like(places)
        inverse[places] = torch.arange(len(flat))
        ends = flat.bincount(minlength=_EXPERTS).cumsum(0).int()
        expected = (ordered, places, places // _CHOSEN, inverse, ends)
        found = self._ops.order_experts(ids, _EXPERTS)
        are_equal = [torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True)]
        return 0.0 if all(are_equal) else math.inf

    def combine_experts(self) -> float:
        ids, rows = self._choices(), self._normal(_TOKENS * _CHOSEN, _HIDDEN)
        weights = self._normal(_TOKENS, _CHOSEN, seed=1)
        inverse = ids.view(-1).argsort(stable=True).argsort()
        more = self._normal(1, _TOKENS, _HIDDEN, seed=2)
        output = self._ops.combine_experts(rows, weights, inverse, ids, None, more)
        by_choice = rows[inverse].cpu().double().view(_TOKENS, _CHOSEN, _HIDDEN)
        expected = (by_choice * weights.cpu().double()[..., None]).sum(1)
        return relative_error(output, expected + more[0].cpu().double())

    def experts(self, num: int) -> float:
        num_experts, chosen, inner = 36, 3, 256
        x, weights = self._normal(num, _HIDDEN), self._normal(num, chosen, seed=1)
        up = self._normal(num_experts, 2 * inner, _HIDDEN, seed=2)
        down = self._normal(num_experts, _HIDDEN, inner, seed=3)
        ids = self._normal(num, num_experts, seed=4).float().argsort(-1)[:, :chosen].contiguous()
        output = self._ops.experts(x, weights, ids, up, down, "silu", None)
        expected = torch.zeros(num, _HIDDEN, dtype=torch.float64)
        for (token, at), expert in np.ndenumerate(ids.cpu().numpy()):
            # rounded where torch's operators would
            gate, value = _product(x[token], up[expert]).to(self._dtype).double().chunk(2, dim=-1)
            hidden = torch.nn.functional.silu(gate).to(self._dtype).double() * value
            made = _product(hidden.to(self._dtype), down[expert]).to(self._dtype).double()
            expected[token] += (made * weights[token, at].cpu().double()).to(self._dtype).double()
        return relative_error(output, expected)

    def _normal(self, *shape: int, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator).to(self._device, self._dtype)

    def _choices(self) -> torch.Tensor:
        return self._normal(_TOKENS, _EXPERTS).float().argsort(-1)[:, :_CHOSEN].contiguous()


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """In float64."""
    return torch.nn.functional.linear(x.cpu().double(), weight.cpu().double())


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON)
    return x * scale * weight.cpu().double()
