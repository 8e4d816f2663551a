"""Norms of a recorded forward: the forms in which models write them, with the sums around them.

Norms keep their roundings: before the weight (Llama) or after it (Gemma, GPT-OSS).
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule

from slipstream_core.forward.fuse import (
    AnyNode,
    again,
    before_cast,
    dtype_of,
    is_call,
    is_weight,
    only_user,
    replace,
    shape_of,
)

_aten = torch.ops.aten


class NormOps(Protocol):
    """The operators that replace norm patterns (see forward_ops.py)."""

    @property
    def rms_norm(self) -> Any: ...

    @property
    def add_rms_norm(self) -> Any: ...

    @property
    def rms_norm_add(self) -> Any: ...

    @property
    def layer_norm(self) -> Any: ...

    @property
    def add_layer_norm(self) -> Any: ...


class _Norm(NamedTuple):
    """A norm's parts: weight * x / sqrt(mean(x ** 2) + epsilon), which is `result`."""

    x: AnyNode  # with `centered`, its mean is taken away first
    weight: AnyNode
    epsilon: float
    rounds: bool
    offset: bool
    centered: bool
    result: AnyNode


def as_norm(graph: GraphModule, rsqrt: AnyNode, ops: NormOps) -> None:
    """Replace a norm that is written out by one call, with the sum before it."""
    norm = _norm(rsqrt)
    if norm is None:
        return
    if not _is_vector(graph, norm.weight, shape_of(norm.x)[-1]):
        if norm.centered and _is_of_heads(graph, norm) and not (norm.rounds or norm.offset):
            replace(
                graph.graph,
                norm.result,
                ops.layer_norm,
                (norm.x, norm.weight, None, norm.epsilon),
            )
        return
    if not norm.centered:
        settings = norm.epsilon, norm.rounds, norm.offset
        calls = ops.rms_norm, ops.add_rms_norm
        _replace(graph, norm.x, norm.result, calls, (norm.weight, *settings))
    elif not (norm.rounds or norm.offset):
        calls = ops.layer_norm, ops.add_layer_norm
        _replace(graph, norm.x, norm.result, calls, (norm.weight, None, norm.epsilon))


def as_layer_norm(graph: GraphModule, call: AnyNode, ops: NormOps) -> None:
    """Replace a norm with mean and bias that follows a sum, or is of a float32 copy."""
    given, dims, weight, bias, epsilon = call.args
    result, x = only_user(call), before_cast(given)
    if dims != [shape_of(x)[-1]] or not is_call(result, operator.getitem) or result.args[1] != 0:
        return
    if any(it is not None and not _is_vector(graph, it, dims[0]) for it in (weight, bias)):
        return
    if x is not given:
        result = only_user(result)
        if not is_call(result, _aten._to_copy.default) or dtype_of(result) != dtype_of(x):
            return
    elif _sum_of(x) is None:
        return  # which torch has
    calls = ops.layer_norm, ops.add_layer_norm
    _replace(graph, x, result, calls, (weight, bias, epsilon))


def with_norm_before(graph: GraphModule, total: AnyNode, ops: NormOps) -> None:
    """Join a sum, or one and its norm, with a norm before it."""
    if total.target == _aten.add.Tensor and not _is_sum(total):
        return
    is_normed = total.target != _aten.add.Tensor
    if is_normed and (len(total.args) > 6 or len(shape_of(total.args[0])) != 3):
        return
    for x, more in (total.args[:2], total.args[1::-1]):
        if not is_call(x, ops.rms_norm) or only_user(x) is not total or len(shape_of(x)) != 3:
            continue
        source, weight, *settings = x.args
        if not is_normed:
            replace(graph.graph, total, ops.rms_norm_add, (source, more, weight, *settings))
            return
        if settings == list(total.args[3:6]):
            total.args = (source, more, *total.args[2:6], 1.0, weight)
            return


def _replace(
    graph: GraphModule, x: AnyNode, result: AnyNode, ops: tuple[Any, Any], parts: tuple[Any, ...]
) -> None:
    """Let one call give a norm, or one the sum that x is and its norm.

    ops: without a sum and with it. parts: arguments behind what is normed.
    """
    nodes, total = graph.graph, _sum_of(x)
    if total is None:
        if len(shape_of(x)) in (3, 4) and shape_of(x)[0] == 1:
            replace(nodes, result, ops[0], (x, *parts))
        return
    shape = shape_of(total)
    if len(shape) != 2 and (len(shape) not in (3, 4) or shape[0] != 1):
        return
    with nodes.inserting_before(total):  # where what uses the sum is behind it
        own = [again(each) if is_weight(each) else each for each in parts]
        both = nodes.call_function(ops[1], tuple(_addends(total, own)))
        summed, normed = (nodes.call_function(operator.getitem, (both, at)) for at in (0, 1))
    summed.meta, normed.meta = dict(total.meta), {"val": result.meta["val"].new_empty(shape)}
    if x is not total:
        with nodes.inserting_before(result):
            normed = nodes.call_function(_aten.view.default, (normed, x.args[1]))
        normed.meta = dict(result.meta)
    result.replace_all_uses_with(normed)
    total.replace_all_uses_with(summed)


def _addends(total: AnyNode, parts: list[Any]) -> list[Any]:
    """Arguments of a sum and its norm: x, what is added to it, `parts`, and what scales x."""
    for scaled, more in (total.args, total.args[::-1]):
        if not is_call(scaled, _aten.mul.Tensor) or only_user(scaled) is not total:
            continue
        x, scale = scaled.args
        if isinstance(scale, float) and dtype_of(x) == dtype_of(total):
            return [x, more, *parts, scale]
    return [*total.args, *parts]


def _norm(rsqrt: AnyNode) -> _Norm | None:
    added = rsqrt.args[0]
    if not is_call(added, _aten.add.Tensor) or not isinstance(added.args[1], float):
        return None
    mean, epsilon = added.args
    if not is_call(mean, _aten.mean.dim) or mean.args[1:] != ([-1], True):
        return None
    power = mean.args[0]
    if not is_call(power, _aten.pow.Tensor_Scalar) or power.args[1] != 2:
        return None
    given, scaled = power.args[0], only_user(rsqrt)
    if not is_call(scaled, _aten.mul.Tensor) or rsqrt not in scaled.args:
        return None
    again: AnyNode = next((each for each in scaled.args if each is not rsqrt), None)
    source = _centered(given)
    if again is not given and (source is None or _centered(again) is not source):
        return None
    wide = given if source is None else source
    x = before_cast(wide)
    dtype = dtype_of(x)
    behind = only_user(scaled)
    rounds = is_call(behind, _aten._to_copy.default) and dtype_of(behind) == dtype
    if rounds:
        scaled, behind = behind, only_user(behind)
    if not is_call(behind, _aten.mul.Tensor) or dtype_of(wide) != torch.float32:
        return None
    factor: AnyNode = next((each for each in behind.args if each is not scaled), None)
    offset = is_call(factor, _aten.add.Tensor) and factor.args[1:] == (1.0,)
    weight = before_cast(factor.args[0] if offset else factor)
    if not is_weight(weight) or (rounds and (dtype_of(weight) != dtype or weight is not factor)):
        return None
    result = behind
    if dtype_of(result) != dtype:
        result = only_user(behind)
        if not is_call(result, _aten._to_copy.default) or dtype_of(result) != dtype:
            return None
    return _Norm(x, weight, epsilon, rounds, offset, source is not None, result)


def _centered(node: AnyNode) -> AnyNode:
    """The node from which `node` subtracts the mean, or None."""
    if not is_call(node, _aten.sub.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    x, mean = node.args
    is_mean = is_call(mean, _aten.mean.dim) and mean.args == (x, [-1], True)
    return x if is_mean and not mean.kwargs else None


def _is_vector(graph: GraphModule, weight: AnyNode, num: int) -> bool:
    if not is_weight(weight):
        return False
    tensor = getattr(graph, weight.target)
    return bool(tensor.dim() == 1 and len(tensor) == num and tensor.is_contiguous())


def _is_of_heads(graph: GraphModule, norm: _Norm) -> bool:
    """True if x is [1, T, heads, N] and each head has weights of its own."""
    shape = shape_of(norm.x)
    weight = getattr(graph, norm.weight.target)
    is_matrix = len(shape) == 4 and tuple(weight.shape) == tuple(shape[2:])
    return shape[0] == 1 and is_matrix and bool(weight.is_contiguous())


def _sum_of(x: AnyNode) -> AnyNode:
    """The sum that x is, or is a view of, or None."""
    is_view = is_call(x, _aten.view.default) and shape_of(x)[-1] == shape_of(x.args[0])[-1]
    total = x.args[0] if is_view else x
    return total if _is_sum(total) else None


def _is_sum(x: AnyNode) -> bool:
    if not is_call(x, _aten.add.Tensor) or len(x.args) != 2 or x.kwargs:
        return False
    return all(
        isinstance(each, torch.fx.Node)
        and shape_of(each) == shape_of(x)
        and dtype_of(each) == dtype_of(x)
        for each in x.args
    )
