"""Products of a recorded forward with the sum and norm behind them, up to the next product's gate.

One call takes the place of the chain, so that it can run as two kernels where a step has one row.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Graph, GraphModule

from slipstream_core.forward.activation_patterns import ActivationOps, gates_of
from slipstream_core.forward.fuse import (
    AnyNode,
    again,
    as_projection,
    is_call,
    linear_parts,
    only_user,
    shape_of,
)
from slipstream_core.forward.norm_patterns import NormOps
from slipstream_core.forward.projection import project

_aten = torch.ops.aten
_NORM_ARGUMENTS = 6  # of `add_rms_norm`, without a scale and a norm before it


class ProductOps(NormOps, ActivationOps, Protocol):
    """The operators that product patterns consist of and are replaced by (see forward_ops.py)."""

    @property
    def linear(self) -> Any: ...

    @property
    def linear_norm_linear(self) -> Any: ...

    @property
    def add_norm_linear(self) -> Any: ...


class Launches(NamedTuple):
    """The kernels of a call."""

    num: int
    of_one_row: int  # in a step that has no more


class _Next(NamedTuple):
    """The product behind a norm, and its gate; `result` is the last of them."""

    projection: AnyNode
    gate: str | None
    num: int  # kernels, where a step has many rows
    result: AnyNode
    is_flat: bool  # of [T, N] instead of [1, T, N]
    keeps: bool  # others use the norm, too


def join_products(graph: GraphModule, ops: ProductOps) -> None:
    """Replace products that a sum and its norm follow, with the product behind the norm; sums of
    other things, with their norm and the product behind it; and all others by `linear`, each for
    itself.
    """
    nodes = graph.graph
    for target in (_aten.mm.default, _aten.addmm.default):
        for node in nodes.find_nodes(op="call_function", target=target):
            flat = linear_parts(node)
            if flat is not None:
                as_projection(graph, node, flat)
    for node in nodes.find_nodes(op="call_function", target=ops.add_rms_norm):
        if len(node.args) > _NORM_ARGUMENTS or not _is_step(node.args[0]):
            continue
        parts = {each.args[1]: each for each in node.users if is_call(each, operator.getitem)}
        if len(parts) == len(node.users) and 1 in parts:
            _join_product(nodes, node, parts, ops)
    nodes.eliminate_dead_code()
    for node in nodes.find_nodes(op="call_function", target=project):
        if _is_step(node.args[0]) or len(shape_of(node.args[0])) == 2:
            node.target = ops.linear


def _join_product(nodes: Graph, node: AnyNode, parts: dict[int, AnyNode], ops: ProductOps) -> None:
    """Join the norm of a sum, of which `parts` are used, with what is before and behind it."""
    chosen, behind = _product_of(node), _next(parts[1], ops)
    norm = node.args[2:]
    if chosen is None and (behind is None or behind.keeps):
        return
    behind = behind or _Next(None, None, 0, parts[1], False, False)
    with nodes.inserting_before(node):
        next_of = behind.projection and again(behind.projection), behind.gate
        if chosen is None:
            both = nodes.call_function(ops.add_norm_linear, (*node.args, *next_of))
            both.meta["launches"] = Launches(1 + behind.num, of_one_row=1)
        else:
            product, residual = chosen
            arguments = (*product.args, residual, *norm, *next_of, behind.keeps)
            both = nodes.call_function(ops.linear_norm_linear, arguments)
            both.meta["launches"] = Launches(2 + behind.num, of_one_row=2)
        total, result, *kept = (
            nodes.call_function(operator.getitem, (both, at)) for at in range(2 + behind.keeps)
        )
        if behind.is_flat:
            result = nodes.call_function(_aten.squeeze.dim, (result, 0))
    for old, new in (
        (behind.result, result),
        (parts.get(0), total),
        *((parts[1], it) for it in kept),
    ):
        if old is not None:
            new.meta = dict(old.meta)
            old.replace_all_uses_with(new)


def _product_of(node: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """The product that is a sum's addend and nothing else's, and the other addend."""
    for product, residual in (node.args[:2], node.args[1::-1]):
        if is_call(product, project) and only_user(product) is node and product is not residual:
            return product, residual
    return None


def _next(normed: AnyNode, ops: ProductOps) -> _Next | None:
    product = only_user(normed)
    keeps = not is_call(product, project)
    if keeps:
        product = _first_product(normed)
    if product is None:
        return None
    x, projection = product.args
    forms = not _is_step(x), keeps
    gates = gates_of(ops)
    halves = only_user(product)
    if is_call(halves, _aten.split_with_sizes.default) and len(halves.users) == 2:
        sizes, dim = halves.args[1:]
        users = {each for half in halves.users for each in half.users}
        gate: AnyNode = users.pop() if len(users) == 1 else None
        is_gate = gate is not None and gate.target in gates
        if is_gate and dim == -1 and len(sizes) == 2 and sizes[0] == sizes[1]:
            parts = [each.args for each in gate.args]
            if parts == [(halves, 0), (halves, 1)]:
                return _Next(projection, gates[gate.target], 2, gate, *forms)
    return _Next(projection, None, 1, product, *forms)


def _first_product(x: AnyNode) -> AnyNode:
    """The first of the products of x, or of x as [T, K]; None without one."""
    for user in x.users:
        if is_call(user, project) and user.args[0] is x:
            return user
        if is_call(user, _aten.view.default) and shape_of(user)[1:] == shape_of(x)[-1:]:
            found = _first_product(user)
            if found is not None:
                return found
    return None


def _is_step(x: AnyNode) -> bool:
    """True if x is [1, T, N]."""
    shape = shape_of(x)
    return len(shape) == 3 and shape[0] == 1
