"""Launches the Triton kernels of `forward_kernels`, as functions of tensors.

Importing this module does not import Triton; the first launch does. Under Triton's interpreter
(TRITON_INTERPRET=1) the same code runs on a CPU. What a kernel is compiled for follows from a
layer's sizes (`*_form`): it is put together once for equal layers, not at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

import torch

from slipstream_core.attention.interface import CacheSlots
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.projection import Dense, Projection
from slipstream_core.forward.rope_patterns import NormForm, RopeForm
from slipstream_core.forward.row_products import (
    RowNorm,
    RowSum,
    expert_rows,
    has_expert_kernels,
    has_row_kernel,
    power_of_two,
    row_product,
)

_grouped_mm = torch.ops.aten._grouped_mm.default

_BLOCK = 1024  # elements that one program of an activation or a weighted sum computes
_HEADS_AT_ONCE = 8  # that one program of `rotate` turns
_CHOICES_AT_ONCE = 2048  # that one program of `order_experts` reads
_ACTIVATIONS = ("silu", "gelu", "tanh gelu", "new gelu", "xielu")  # as the kernels number them
_SCORES = ("logits", "softmax", "sigmoid")
_WEIGHS = ("scores", "sum", "softmax")


class ForwardOps:
    """The operators that a fused forward has in place of torch's.

    On the meta device they give shapes, and need no Triton.
    """

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, epsilon: float, rounds: bool, offset: bool
    ) -> torch.Tensor:
        """The norm of x [1, T, N] or [1, T, heads, N] over its last dimension, contiguous.

        rounds: to x's type before the weight is applied. offset: the factor is 1 + weight.
        """
        return _norm(x, None, (weight, None), epsilon, rounds=rounds, offset=offset)[1]

    def add_rms_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
        scale: float = 1.0,
        before: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x * scale + more, rounded to their type, and its norm; shapes as in `rms_norm`.

        before: the weight [N] of another such norm, of x before it is added to.
        """
        return _norm(
            x,
            more,
            (weight, None),
            epsilon,
            rounds=rounds,
            offset=offset,
            scale=scale,
            before=before,
        )

    def linear_norm_linear(
        self,
        x: torch.Tensor,
        projection: Projection,
        more: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
        behind: Projection | None,
        gate: str | None,
        keeps: bool,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The product of x [1, T, K] plus more [1, T, N], rounded, and its norm.

        behind: with it, the norm's product in its place; with `gate` ("silu", "gelu", "tanh gelu")
        the activation of its first half times its second. keeps: the norm comes third. One row is
        two kernels.
        """
        if x.shape[1] != 1 or not _has_row_kernel(projection):
            product = self.linear(x, projection)
            total, normed = self.add_rms_norm(product, more, norm_weight, epsilon, rounds, offset)
        else:
            total = row_product(_dense(x), projection.weight, projection.bias, more=_dense(more))
            if _has_row_kernel(behind, gate):
                kept = torch.empty_like(total) if keeps else None
                norm = RowNorm(norm_weight, epsilon, rounds, offset, kept)
                result = row_product(total, behind.weight, behind.bias, norm=norm, gate=gate)
                return total, result, kept
            normed = self.rms_norm(total, norm_weight, epsilon, rounds, offset)
        if behind is None:
            return total, normed, None
        return total, self._gated(normed, behind, gate), normed

    def add_norm_linear(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        norm_weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
        behind: Projection,
        gate: str | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x plus more [1, T, N], rounded, and the product of its norm, as `linear_norm_linear`.

        One row is one kernel.
        """
        if x.shape[1] != 1 or not _has_row_kernel(behind, gate):
            total, normed = self.add_rms_norm(x, more, norm_weight, epsilon, rounds, offset)
            return total, self._gated(normed, behind, gate)
        total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        norm = RowNorm(norm_weight, epsilon, rounds, offset)
        before = RowSum(_dense(more), total)
        weight, bias = behind.weight, behind.bias
        result = row_product(_dense(x), weight, bias, before=before, norm=norm, gate=gate)
        return total, result

    def _gated(self, x: torch.Tensor, projection: Projection, gate: str | None) -> torch.Tensor:
        product = self.linear(x, projection)
        return product if gate is None else _halves_gated(gate, product)

    def linear(self, x: torch.Tensor, projection: Projection) -> torch.Tensor:
        """The product of x [1, T, K] or [T, K]; one row by a kernel of its own."""
        if x.shape[-2] == 1 and _has_row_kernel(projection):
            product = row_product(_dense(x), projection.weight, projection.bias)
            return product.view(*x.shape[:-1], projection.num_outputs)
        return projection.forward(x)

    def rms_norm_add(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
    ) -> torch.Tensor:
        """The norm of x, rounded, plus more; shapes as in `rms_norm`."""
        return _norm(x, more, None, epsilon, rounds=rounds, offset=offset, before=weight)[1]

    def two_rms_norms(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        weight: torch.Tensor,
        other_weight: torch.Tensor,
        epsilon: float,
        rounds: bool,
        offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norms of x [1, T, N] and other [1, T, M], as `rms_norm`'s."""
        outputs = [torch.empty(it.shape, dtype=it.dtype, device=it.device) for it in (x, other)]
        both, weights = [_dense(x), _dense(other)], [weight, other_weight]
        arguments = two_norms_arguments(outputs, both, weights, epsilon, rounds, offset)
        _launch("norm_two", x.shape[1], (x.shape[1], 2), arguments)
        return outputs[0], outputs[1]

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
    ) -> torch.Tensor:
        """The norm of x with its mean taken away; shapes as in `rms_norm`, or [T, N].

        weight [heads, N] is one for each head.
        """
        return _norm(x, None, (weight, bias), epsilon, center=True)[1]

    def add_layer_norm(
        self,
        x: torch.Tensor,
        more: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        epsilon: float,
        scale: float = 1.0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x * scale + more, rounded to their type, and its `layer_norm`."""
        return _norm(x, more, (weight, bias), epsilon, center=True, scale=scale)

    def silu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up of [1, T, N] or [T, N], contiguous."""
        return _activate("silu", gate, up)

    def gelu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) * up, as `silu_mul`."""
        return _activate("gelu", gate, up)

    def tanh_gelu_mul(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """gelu(gate) by its approximation with tanh, times up, as `silu_mul`."""
        return _activate("tanh gelu", gate, up)

    def new_gelu(self, x: torch.Tensor) -> torch.Tensor:
        """0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) of [1, T, N] or [T, N].

        It rounds after each operator: transformers' "gelu_new".
        """
        return _activate("new gelu", x, None)

    def xielu(
        self,
        x: torch.Tensor,
        positive: torch.Tensor,
        negative: torch.Tensor,
        beta: torch.Tensor,
        limit: torch.Tensor,
    ) -> torch.Tensor:
        """xIELU (Huang and Schlag 2024, arXiv 2411.13010) of [1, T, N] or [T, N].

        softplus(positive) * x ** 2 + beta * x for positive x, else (expm1(min(x, limit)) - x) *
        (beta + softplus(negative)) + beta * x, rounded after each operator. The parameters are one
        number each.
        """
        return _activate("xielu", x, None, (positive, negative, beta, limit))

    def clamped_gate(
        self,
        rows: torch.Tensor,
        bias: torch.Tensor,
        experts: torch.Tensor,
        limit: float,
        alpha: float,
    ) -> torch.Tensor:
        """GPT-OSS's gate of rows [R, 2 * N], to which bias [num, 2 * N] of their experts, int64
        [R], is added: gate * sigmoid(alpha * gate) * (up + 1) of pairs (gate, up).

        gate is at most `limit`, up within it. It rounds after each operator.
        """
        num, n = len(rows), rows.shape[1] // 2
        output = torch.empty((num, n), dtype=rows.dtype, device=rows.device)
        arguments = clamped_gate_arguments(output, _dense(rows), bias, experts, limit, alpha)
        _launch("clamped_gate", num, (num, -(-n // _BLOCK)), arguments)
        return output

    def rotate(
        self, x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, form: RopeForm
    ) -> torch.Tensor:
        """Rotary embeddings of x [1, heads, T, D]. The result has its tokens first in memory.

        cosines, sines: [1, T, width], or half as many by pair.
        """
        x = _dense(x)
        turned = _tokens_first(x)
        angles = _dense(cosines), _dense(sines)
        arguments = rotation_arguments([turned, None], [x, None], [None, None], angles, form, None)
        _launch("rotate", x.shape[2], (rotation_blocks(arguments),), arguments)
        return turned.transpose(0, 1)[None]

    def rotate_and_store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        query_weight: torch.Tensor | None,
        key_weight: torch.Tensor | None,
        form: RopeForm,
        norm: NormForm | None,
        slots: CacheSlots,
    ) -> torch.Tensor:
        """Queries [T, heads, D], turned as by `rotate`, and normed before or behind it.

        Keys, turned and normed likewise, and values [T, num_kv_heads, dim] go to their slots.
        norm: with weights [D] each, or [heads, D].
        """
        both = [_dense(query), _dense(key)]
        turned = _tokens_first(both[0])
        arguments = rotation_arguments(
            [turned, slots.keys],
            both,
            [query_weight, key_weight],
            [_dense(cosines), _dense(sines)],
            form,
            norm,
            Cached(_dense(value), slots),
        )
        _launch("rotate", query.shape[2], (rotation_blocks(arguments),), arguments)
        return turned

    def latent_rows(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        latent: torch.Tensor,
        cosines: torch.Tensor,
        sines: torch.Tensor,
        weight: torch.Tensor,
        form: RopeForm,
        norm: NormForm,
        slots: CacheSlots,
    ) -> torch.Tensor:
        """Queries [T, heads, rank + D] with their rotated end; rows [T, 1, rank + D] go to slots.

        query [1, heads, T, D] and key [1, 1, T, D] turn as in `rotate`. A row begins with the norm
        of its latent [1, T, rank]; the beginning of queries is for `absorb_query` to write.
        """
        query, key, latent = (_dense(each) for each in (query, key, latent))
        rank, (_, heads, tokens, dim) = latent.shape[2], query.shape
        shape = (tokens, heads, rank + dim)
        queries = torch.empty(shape, dtype=query.dtype, device=query.device)
        angles = _dense(cosines), _dense(sines)
        arguments = latent_arguments(queries, query, key, latent, weight, angles, form, norm, slots)
        _launch("latent_rows", tokens, (tokens * (heads + 1),), arguments)
        return queries

    def absorb_query(
        self, queries: torch.Tensor, plain: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Writes plain [heads, T, dim] times weight [heads, dim, rank] to the beginning of queries.

        queries: [T, heads, rank or more]; returned.
        """
        begin = queries[..., : weight.shape[2]].transpose(0, 1)
        torch.bmm(plain, weight, out=begin)
        return queries

    def expand_output(self, gathered: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Values [T, heads, dim], contiguous, of latents [T, heads, rank] by [heads, rank, dim]."""
        shape = (*gathered.shape[:2], weight.shape[2])
        values = torch.empty(shape, dtype=gathered.dtype, device=gathered.device)
        torch.bmm(gathered.transpose(0, 1), weight, out=values.transpose(0, 1))
        return values

    def route(
        self,
        logits: torch.Tensor,
        bias: torch.Tensor | None,
        form: RouteForm,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, chosen] of this type and int64 ids of each token's experts, best first.

        logits [T, experts]. bias [experts] is added to the scores that they are chosen by.
        """
        shape = (len(logits), form.num_chosen)
        weights = torch.empty(shape, dtype=dtype, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        arguments = route_arguments(weights, ids, _dense(logits), bias, form)
        _launch("route", len(logits), (len(logits),), arguments)
        return weights, ids

    def route_by_margin(
        self, logits: torch.Tensor, margin: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, 2] in the type of logits [T, experts], and int64 ids, of the two best.

        Each weighs by the softmax over those left whose distance, relative to the larger of its
        logit and their own size, is at most `margin`.
        """
        shape = (len(logits), 2)
        weights = torch.empty(shape, dtype=logits.dtype, device=logits.device)
        ids = torch.empty(shape, dtype=torch.int64, device=logits.device)
        arguments = margin_arguments(weights, ids, _dense(logits), margin)
        _launch("route_by_margin", len(logits), (len(logits),), arguments)
        return weights, ids

    def experts(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        ids: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        gate: str,
        more: torch.Tensor | None,
    ) -> torch.Tensor:
        """The weighted sums [T, N] of what each token's experts make of x [T, K].

        weights, ids: [T, chosen] as `route` gives them. up [experts, 2 * I, K]: its first half is
        activated (`gate`, as in `linear_norm_linear`) and multiplied by its second; down [experts,
        N, I]. more [1, T, N] is added to the sums. Few tokens are two kernels.
        """
        if has_expert_kernels(len(x), ids, up, down):
            more = None if more is None else more.contiguous()
            x, weights, ids = (each.contiguous() for each in (x, weights, ids))
            return expert_rows(x, weights, ids, up, down, gate, more)
        _, _, tokens, inverse, ends = self.order_experts(ids, len(up))
        rows = _grouped_mm(x[tokens], up.transpose(1, 2), ends)
        rows = _halves_gated(gate, rows)  # by one name: what is used up is freed
        rows = _grouped_mm(rows, down.transpose(1, 2), ends)
        return self.combine_experts(rows, weights, inverse, ids, None, more)

    def order_experts(self, ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
        """A stable sort of the choices ids int64 [T, chosen], N of them, by expert.

        Returns int64 [N] each: the sorted ids, the choice at each place, its token, the place of
        each choice; and int32 [experts]: the place behind each expert's last.
        """
        columns = [torch.empty_like(ids).view(-1) for _ in range(4)]
        ends = torch.empty(num_experts, dtype=torch.int32, device=ids.device)
        arguments = order_arguments(columns, ends, ids.contiguous())
        _launch("order_experts", len(ids), (num_experts,), arguments)
        return (*columns, ends)

    def combine_experts(
        self,
        rows: torch.Tensor,
        weights: torch.Tensor,
        inverse: torch.Tensor,
        ids: torch.Tensor,
        bias: torch.Tensor | None,
        more: torch.Tensor | None,
    ) -> torch.Tensor:
        """The sums [T, N] of each token's rows, times their weights [T, chosen], in their type.

        rows [T * chosen, N] lie in the experts' order, in which choice c is row inverse[c]. bias
        [experts, N] is added to each before, by its expert in ids [T, chosen]; more [1, T, N] to
        the sums.
        """
        num_tokens, dim = len(weights), rows.shape[1]
        output = torch.empty((num_tokens, dim), dtype=rows.dtype, device=rows.device)
        arguments = combination_arguments(
            output,
            _dense(rows),
            weights.contiguous(),
            inverse,
            ids.contiguous(),
            bias,
            None if more is None else _dense(more),
        )
        _launch("combine_experts", num_tokens, (num_tokens, -(-dim // _BLOCK)), arguments)
        return output


def _launch(kernel: str, num_tokens: int, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    output: torch.Tensor = next(iter(arguments.values()))
    if output.is_meta or 0 in grid:
        return
    kernels, early = _triton()
    getattr(kernels, kernel)[grid](**arguments, **early(output.device, num_tokens))


@cache
def _triton() -> tuple[ModuleType, Callable[[torch.device, int], dict[str, Any]]]:
    from slipstream_core.kernels.card import forward_kernels
    from slipstream_core.kernels.card.dependent_launch import early

    return forward_kernels, early


def _norm(
    x: torch.Tensor,
    more: torch.Tensor | None,
    weights: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    epsilon: float,
    *,
    center: bool = False,
    rounds: bool = False,
    offset: bool = False,
    scale: float = 1.0,
    before: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum and its norm; the same twice where there is no sum, or no norm behind it."""
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = output if more is None or weights is None else torch.empty_like(output)
    x, more = _dense(x), None if more is None else _dense(more)
    flags = (center, rounds, offset)
    arguments = norm_arguments(output, total, x, more, weights, epsilon, *flags, scale, before)
    num_tokens = x.shape[1] if x.dim() == 4 else x.shape[-2]
    _launch("norm", num_tokens, (x.numel() // x.shape[-1],), arguments)
    return total, output


def _activate(
    kind: str,
    x: torch.Tensor,
    up: torch.Tensor | None,
    parameters: Sequence[torch.Tensor | None] = (None,) * 4,
) -> torch.Tensor:
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x, up = _dense(x), None if up is None else _dense(up)
    grid = (x.shape[-2], -(-x.shape[-1] // _BLOCK))
    _launch("activate", grid[0], grid, activation_arguments(kind, output, x, up, parameters))
    return output


def _halves_gated(gate: str, x: torch.Tensor) -> torch.Tensor:
    """The activation of the first half of x, times the second."""
    first, second = x.chunk(2, dim=-1)
    return _activate(gate, first, second)


def _tokens_first(x: torch.Tensor) -> torch.Tensor:
    _, heads, tokens, dim = x.shape
    return torch.empty((tokens, heads, dim), dtype=x.dtype, device=x.device)


def norm_arguments(
    output: torch.Tensor,
    total: torch.Tensor,
    x: torch.Tensor,
    more: torch.Tensor | None,
    weights: tuple[torch.Tensor | None, torch.Tensor | None] | None,
    epsilon: float,
    center: bool,
    rounds: bool,
    offset: bool,
    scale: float,
    before: torch.Tensor | None,
) -> dict[str, Any]:
    """The kernel's arguments; without `weights`, a norm's weight and bias, there is only a sum."""
    has_heads = x.dim() == 4
    weight, bias = weights or (None, None)
    given = tuple(each is not None for each in (before, more, weights, weight, bias))
    return {
        "output": output,
        "total": total,
        "x": x,
        "more": more,
        "before": before,
        "weight": weight,
        "bias": bias,
        "x_token": x.stride(1) if has_heads else x.stride(-2),
        "x_head": x.stride(2) if has_heads else 0,
        "more_token": 0 if more is None else more.stride(1 if has_heads else -2),
        "more_head": more.stride(2) if more is not None and has_heads else 0,
        "heads": x.shape[2] if has_heads else 1,
        "scale": scale,
        "epsilon": epsilon,
        **_norm_form(x.shape[-1], has_heads, given, scale != 1.0, center, rounds, offset),
        "OWN": weight is not None and weight.dim() == 2,
    }


@cache
def _norm_form(
    n: int,
    by_head: bool,
    given: tuple[bool, ...],
    scales: bool,
    center: bool,
    rounds: bool,
    offset: bool,
) -> dict[str, Any]:
    padded = power_of_two(n)
    before, adds, norms, weight, bias = given
    return {
        "N": n,
        "PAD": padded,
        "BY_HEAD": by_head,
        "BEFORE": before,
        "SCALE": scales,
        "ADD": adds,
        "NORM": norms,
        "CENTER": center,
        "WEIGHT": weight,
        "BIAS": bias,
        "ROUNDS": rounds,
        "OFFSET": offset,
        "num_warps": _norm_warps(padded),
    }


def _norm_warps(padded: int) -> int:
    return min(max(padded // 512, 1), 16)


def two_norms_arguments(
    outputs: Sequence[torch.Tensor],
    both: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    epsilon: float,
    rounds: bool,
    offset: bool,
) -> dict[str, Any]:
    """The kernel's arguments."""
    return {
        "output": outputs[0],
        "other_output": outputs[1],
        "x": both[0],
        "other": both[1],
        "weight": weights[0],
        "other_weight": weights[1],
        "x_token": both[0].stride(1),
        "other_token": both[1].stride(1),
        "epsilon": epsilon,
        **_two_norms_form(both[0].shape[-1], both[1].shape[-1], rounds, offset),
    }


@cache
def _two_norms_form(n: int, other_n: int, rounds: bool, offset: bool) -> dict[str, Any]:
    padded, other_padded = power_of_two(n), power_of_two(other_n)
    return {
        "N": n,
        "PAD": padded,
        "OTHER_N": other_n,
        "OTHER_PAD": other_padded,
        "ROUNDS": rounds,
        "OFFSET": offset,
        "num_warps": _norm_warps(max(padded, other_padded)),
    }


def activation_arguments(
    kind: str,
    output: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor | None,
    parameters: Sequence[torch.Tensor | None],
) -> dict[str, Any]:
    """The kernel's arguments; parameters are `ForwardOps.xielu`'s."""
    positive, negative, beta, limit = parameters
    return {
        "output": output,
        "x": x,
        "up": up,
        "positive": positive,
        "negative": negative,
        "beta": beta,
        "limit": limit,
        "x_token": x.stride(-2),
        "up_token": 0 if up is None else up.stride(-2),
        "N": x.shape[-1],
        "KIND": _ACTIVATIONS.index(kind),
        "MUL": up is not None,
        "BLOCK": _BLOCK,
    }


def clamped_gate_arguments(
    output: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor,
    experts: torch.Tensor,
    limit: float,
    alpha: float,
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.clamped_gate`."""
    return {
        "output": output,
        "rows": rows,
        "bias": bias,
        "experts": experts,
        "limit": limit,
        "alpha": alpha,
        "row_stride": rows.stride(0),
        "bias_stride": bias.stride(0),
        "N": output.shape[1],
        "BLOCK": _BLOCK,
    }


def rotation_arguments(
    outputs: Sequence[torch.Tensor | None],
    both: Sequence[torch.Tensor | None],
    weights: Sequence[torch.Tensor | None],
    angles: Sequence[torch.Tensor],
    form: RopeForm,
    norm: NormForm | None,
    cached: Cached | None = None,
) -> dict[str, Any]:
    """The kernel's arguments, of queries and keys; shapes as in `ForwardOps.rotate_and_store`.

    Without keys there is one output.
    """
    query, key = both
    assert query is not None
    _, query_heads, _, dim = query.shape
    heads = query_heads + (0 if key is None else key.shape[1])
    return {
        "query_output": outputs[0],
        "key_output": outputs[1],
        "query": query,
        "key": key,
        "query_weight": weights[0],
        "key_weight": weights[1],
        "cosines": angles[0],
        "sines": angles[1],
        "query_token": query.stride(2),
        "query_head": query.stride(1),
        "key_token": 0 if key is None else key.stride(2),
        "key_head": 0 if key is None else key.stride(1),
        "cosine_token": angles[0].stride(1),
        "sine_token": angles[1].stride(1),
        "num_tokens": query.shape[2],
        **(_NOT_CACHED if cached is None else cached.arguments()),
        **_rotation_form(heads, query_heads, dim, form, norm),
        "OWN": weights[0] is not None and weights[0].dim() == 2,
    }


class Cached(NamedTuple):
    """Values that go to the cache with keys, and where."""

    value: torch.Tensor  # [T, num_kv_heads, dim], with stride 1 in the last dimension
    slots: CacheSlots

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `rotate` that describe these values."""
        dim = self.value.shape[2]
        return {
            "value": self.value,
            "values": self.slots.values,
            "kv_slots": self.slots.kv_slots,
            "value_token": self.value.stride(0),
            "value_head": self.value.stride(1),
            "VALUE_DIM": dim,
            "VALUE_PAD": power_of_two(dim),
        }


_NOT_CACHED = {
    "value": None,
    "values": None,
    "kv_slots": None,
    "value_token": 0,
    "value_head": 0,
    "VALUE_DIM": 0,
    "VALUE_PAD": 1,
}


@cache
def _rotation_form(
    heads: int,
    query_heads: int,
    dim: int,
    form: RopeForm,
    norm: NormForm | None,
) -> dict[str, Any]:
    epsilon, rounds, offset, behind, center = norm or NormForm(0.0, False, False)
    return {
        "epsilon": epsilon,
        "HEADS": heads,
        "QUERY_HEADS": query_heads,
        "DIM": dim,
        "REST_PAD": power_of_two(max(dim - form.width, 1)),
        **_pairs_form(form),
        "NORM": norm is not None and not behind,
        "BEHIND": behind,
        "ROUNDS": rounds,
        "OFFSET": offset,
        "CENTER": center,
        "ROWS": _HEADS_AT_ONCE,
        "num_warps": 4,
    }


def rotation_blocks(arguments: dict[str, Any]) -> int:
    """The programs of the kernel with these arguments: blocks of queries, of keys, of values."""
    tokens, queries, rows = (int(arguments[it]) for it in ("num_tokens", "QUERY_HEADS", "ROWS"))
    keys = -(-tokens * (int(arguments["HEADS"]) - queries) // rows)  # and as many of values
    return -(-tokens * queries // rows) + 2 * keys


def _pairs_form(form: RopeForm) -> dict[str, Any]:
    half = form.width // 2
    return {
        "HALF": half,
        "PAD": power_of_two(half),
        "INTERLEAVED": form.interleaved,
        "BY_PAIR": form.by_pair,
        "WIDE": form.wide,
        "PARTS": form.parts,
    }


def latent_arguments(
    queries: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    latent: torch.Tensor,
    weight: torch.Tensor,
    angles: Sequence[torch.Tensor],
    form: RopeForm,
    norm: NormForm,
    slots: CacheSlots,
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.latent_rows`."""
    return {
        "queries": queries,
        "rows": slots.keys,
        "query": query,
        "key": key,
        "latent": latent,
        "weight": weight,
        "cosines": angles[0],
        "sines": angles[1],
        "kv_slots": slots.kv_slots,
        "query_token": query.stride(2),
        "query_head": query.stride(1),
        "key_token": key.stride(2),
        "latent_token": latent.stride(1),
        "cosine_token": angles[0].stride(1),
        "sine_token": angles[1].stride(1),
        **_latent_form(query.shape[1], latent.shape[2], form, norm),
    }


@cache
def _latent_form(heads: int, rank: int, form: RopeForm, norm: NormForm) -> dict[str, Any]:
    padded = power_of_two(rank)
    return {
        "epsilon": norm.epsilon,
        "HEADS": heads,
        "RANK": rank,
        "RANK_PAD": padded,
        **_pairs_form(form),
        "ROUNDS": norm.rounds,
        "OFFSET": norm.offset,
        "num_warps": _norm_warps(padded),
    }


def route_arguments(
    weights: torch.Tensor,
    ids: torch.Tensor,
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    form: RouteForm,
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.route`."""
    return {
        "weights": weights,
        "ids": ids,
        "logits": logits,
        "bias": bias,
        "logits_token": logits.stride(0),
        **_route_form(logits.shape[1], bias is not None, form),
    }


@cache
def _route_form(experts: int, has_bias: bool, form: RouteForm) -> dict[str, Any]:
    is_grouped = form.chosen_groups < form.num_groups
    return {
        "scale": float(form.scale),
        "epsilon": float(form.epsilon),
        "EXPERTS": experts,
        "PAD": power_of_two(experts),
        "CHOSEN": form.num_chosen,
        "CHOSEN_PAD": power_of_two(form.num_chosen),
        "SCORES": _SCORES.index(form.scores),
        "WEIGHS": _WEIGHS.index(form.weighs),
        "BIAS": has_bias,
        "GROUPS": form.num_groups if is_grouped else 1,
        "GROUPS_PAD": power_of_two(form.num_groups if is_grouped else 1),
        "CHOSEN_GROUPS": form.chosen_groups if is_grouped else 1,
        "BEST": form.best_of_group,
        "num_warps": 1 if experts <= 128 else 4,
    }


def margin_arguments(
    weights: torch.Tensor, ids: torch.Tensor, logits: torch.Tensor, margin: float
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.route_by_margin`."""
    experts = logits.shape[1]
    return {
        "weights": weights,
        "ids": ids,
        "logits": logits,
        "logits_token": logits.stride(0),
        "margin": margin,
        "EXPERTS": experts,
        "PAD": power_of_two(experts),
        "num_warps": 1,
    }


def order_arguments(
    columns: Sequence[torch.Tensor], ends: torch.Tensor, ids: torch.Tensor
) -> dict[str, Any]:
    """The kernel's arguments; columns are those that `ForwardOps.order_experts` returns."""
    ordered, places, tokens, inverse = columns
    return {
        "ordered": ordered,
        "places": places,
        "tokens": tokens,
        "inverse": inverse,
        "ends": ends,
        "ids": ids,
        "num_choices": ids.numel(),
        "CHOSEN": ids.shape[1],
        "BLOCK": _CHOICES_AT_ONCE,
        "num_warps": 8,
    }


def combination_arguments(
    output: torch.Tensor,
    rows: torch.Tensor,
    weights: torch.Tensor,
    inverse: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor | None,
    more: torch.Tensor | None,
) -> dict[str, Any]:
    """The kernel's arguments; shapes as in `ForwardOps.combine_experts`."""
    return {
        "output": output,
        "rows": rows,
        "weights": weights,
        "inverse": inverse,
        "ids": None if bias is None else ids,
        "bias": bias,
        "more": more,
        "row_stride": rows.stride(0),
        "bias_stride": 0 if bias is None else bias.stride(0),
        "more_stride": 0 if more is None else more.stride(1),
        "N": rows.shape[1],
        "CHOSEN": weights.shape[1],
        "BIAS": bias is not None,
        "ADD": more is not None,
        "WIDE": weights.dtype != rows.dtype,
        "BLOCK": _BLOCK,
    }


def _has_row_kernel(projection: Projection | None, gate: str | None = None) -> TypeGuard[Dense]:
    """True if a kernel multiplies one row with this projection's matrix."""
    return isinstance(projection, Dense) and has_row_kernel(projection.weight, gate)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
