"""Products of a recorded forward with the sum and norm behind them, up to the next product's gate.

One call takes the place of the chain, so that it can run as two kernels where a step has one row.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule

from slipstream_core.runner.compilation.activation_patterns import ActivationOps
from slipstream_core.runner.compilation.fuse import AnyNode, again, is_call, only_user, shape_of
from slipstream_core.runner.compilation.norm_patterns import NormOps

_aten = torch.ops.aten
_linear = torch.nn.functional.linear
_NORM_ARGUMENTS = 6  # of `add_rms_norm`, without a scale and a norm before it


class ProductOps(NormOps, ActivationOps, Protocol):
    """What they are made of, and what replaces them: see cuda/forward_ops.py."""

    @property
    def linear(self) -> Any: ...

    @property
    def linear_norm_linear(self) -> Any: ...


class Launches(NamedTuple):
    """The kernels of a call."""

    num: int
    of_one_row: int  # in a step that has no more


class _Next(NamedTuple):
    """The product behind a norm, and its gate; `result` is the last of them."""

    weight: AnyNode
    bias: AnyNode
    gate: str | None
    num: int  # kernels, where a step has many rows
    result: AnyNode


def join_products(graph: GraphModule, ops: ProductOps) -> None:
    """Replace products that a sum and its norm follow, with the product behind the norm; and all
    others by `linear`, each for itself.
    """
    nodes = graph.graph
    for node in nodes.find_nodes(op="call_function", target=ops.add_rms_norm):
        chosen = _product_of(node)
        if chosen is None:
            continue
        product, residual = chosen
        parts = {each.args[1]: each for each in node.users if is_call(each, operator.getitem)}
        if len(parts) != len(node.users) or 1 not in parts:
            continue
        behind = _next(parts[1], ops) or _Next(None, None, None, 0, parts[1])
        norm_weight, epsilon, rounds, offset = node.args[2:]
        with nodes.inserting_before(node):
            weights = [each and again(each) for each in (behind.weight, behind.bias)]
            arguments = (*product.args, residual, norm_weight, epsilon, rounds, offset, *weights)
            both = nodes.call_function(ops.linear_norm_linear, (*arguments, behind.gate))
            total, result = (nodes.call_function(operator.getitem, (both, at)) for at in (0, 1))
        both.meta["launches"] = Launches(2 + behind.num, of_one_row=2)
        result.meta = dict(behind.result.meta)
        if 0 in parts:
            total.meta = dict(parts[0].meta)
            parts[0].replace_all_uses_with(total)
        behind.result.replace_all_uses_with(result)
    nodes.eliminate_dead_code()
    for node in nodes.find_nodes(op="call_function", target=_linear):
        if _is_step(node.args[0]):
            node.target = ops.linear


def _product_of(node: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """The product that is a sum's addend and nothing else's, and the other addend."""
    if len(node.args) > _NORM_ARGUMENTS or not _is_step(node.args[0]):
        return None
    for product, residual in (node.args[:2], node.args[1::-1]):
        if is_call(product, _linear) and only_user(product) is node and product is not residual:
            return product, residual
    return None


def _next(normed: AnyNode, ops: ProductOps) -> _Next | None:
    product = only_user(normed)
    if not is_call(product, _linear) or product.args[0] is not normed:
        return None
    weight, bias = product.args[1:]
    gates = {ops.silu_mul: "silu", ops.gelu_mul: "gelu", ops.tanh_gelu_mul: "tanh gelu"}
    halves = only_user(product)
    if is_call(halves, _aten.split_with_sizes.default) and len(halves.users) == 2:
        sizes, dim = halves.args[1:]
        users = {each for half in halves.users for each in half.users}
        gate: AnyNode = users.pop() if len(users) == 1 else None
        is_gate = gate is not None and gate.target in gates
        if is_gate and dim == -1 and len(sizes) == 2 and sizes[0] == sizes[1]:
            parts = [each.args for each in gate.args]
            if parts == [(halves, 0), (halves, 1)]:
                return _Next(weight, bias, gates[gate.target], 2, gate)
    return _Next(weight, bias, None, 1, product)


def _is_step(x: AnyNode) -> bool:
    """Whether x is [1, T, N]."""
    shape = shape_of(x)
    return len(shape) == 3 and shape[0] == 1
