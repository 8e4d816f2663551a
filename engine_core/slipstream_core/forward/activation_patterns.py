"""Activations of a recorded forward, with the product behind them or written out."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from slipstream_core.forward.fuse import (
    AnyNode,
    dtype_of,
    is_call,
    is_weight,
    only_user,
    replace,
    shape_of,
    with_product,
)

_aten = torch.ops.aten


class ActivationOps(Protocol):
    """The operators that replace activation patterns (see forward_ops.py)."""

    @property
    def silu_mul(self) -> Any: ...

    @property
    def gelu_mul(self) -> Any: ...

    @property
    def tanh_gelu_mul(self) -> Any: ...

    @property
    def new_gelu(self) -> Any: ...

    @property
    def xielu(self) -> Any: ...

    @property
    def clamped_gate(self) -> Any: ...


def gates_of(ops: ActivationOps) -> dict[Any, str]:
    """The names of activations whose result is multiplied, as calls that hold both know them."""
    return {ops.silu_mul: "silu", ops.gelu_mul: "gelu", ops.tanh_gelu_mul: "tanh gelu"}


def as_gelu(graph: GraphModule, gelu: AnyNode, ops: ActivationOps) -> None:
    """Replace gelu(gate) * up by one call."""
    approximate = gelu.kwargs.get("approximate", "none")
    gate_mul = {"none": ops.gelu_mul, "tanh": ops.tanh_gelu_mul}[approximate]
    with_product(graph, gelu, gate_mul, dims=(2, 3))


def as_new_gelu(graph: GraphModule, tanh: AnyNode, ops: ActivationOps) -> None:
    """Replace 0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) by `new_gelu`."""
    inner = _times(tanh.args[0], math.sqrt(2.0 / math.pi))
    if not is_call(inner, _aten.add.Tensor) or len(inner.args) != 2 or inner.kwargs:
        return
    x, more = inner.args
    cube = _times(more, 0.044715)
    if not is_call(cube, _aten.pow.Tensor_Scalar) or cube.args != (x, 3.0):
        return
    above = only_user(tanh)
    if not is_call(above, _aten.add.Tensor) or above.args != (tanh, 1.0) or above.kwargs:
        return
    product = only_user(above)
    if not is_call(product, _aten.mul.Tensor) or len(product.args) != 2:
        return
    half: AnyNode = next((each for each in product.args if each is not above), None)
    if half is not None and _times(half, 0.5) is x and _is_rows(x):
        replace(graph.graph, product, ops.new_gelu, (x,))


def as_xielu(graph: GraphModule, where: AnyNode, ops: ActivationOps) -> None:
    """Replace xIELU (Huang and Schlag 2024, arXiv 2411.13010) by one call."""
    positive, above, below = where.args
    x: AnyNode = positive.args[0] if is_call(positive, _aten.gt.Scalar) else None
    if x is None or positive.args[1] != 0 or not _is_rows(x):
        return
    upper, lower = _operands(above, _aten.add.Tensor), _operands(below, _aten.add.Tensor)
    if upper is None or lower is None:
        return
    slopes = [_operands(each[1], _aten.mul.Tensor) for each in (upper, lower)]
    if slopes[0] is None or slopes[0] != slopes[1] or slopes[0][1] is not x:
        return
    beta = slopes[0][0]
    squared, curved = (_operands(each[0], _aten.mul.Tensor) for each in (upper, lower))
    if squared is None or curved is None or squared[1] is not x:
        return
    once, shifted = _operands(squared[0], _aten.mul.Tensor), _operands(curved[1], _aten.add.Tensor)
    if once is None or shifted is None or once[1] is not x or shifted[0] is not beta:
        return
    bent = _operands(curved[0], _aten.sub.Tensor)
    if bent is None or bent[1] is not x or not is_call(bent[0], _aten.expm1.default):
        return
    least = _operands(bent[0].args[0], _aten.minimum.default)
    if least is None or least[0] is not x:
        return
    parameters = [_softened(once[0]), _softened(shifted[1]), beta, least[1]]
    for each in parameters:
        if not is_weight(each) or getattr(graph, each.target).numel() != 1:
            return
        if dtype_of(each) != dtype_of(x):
            return  # it rounds elsewhere
    replace(graph.graph, where, ops.xielu, (x, *parameters))


def as_clamped_gate(graph: GraphModule, sigmoid: AnyNode, ops: ActivationOps) -> None:
    """Replace GPT-OSS's gate, and the bias of each row's expert before it, by one call.

    Of pairs (gate, up), clamped: gate * sigmoid(alpha * gate) * (up + 1).
    """
    scaled, product = _operands(sigmoid.args[0], _aten.mul.Tensor), only_user(sigmoid)
    gated = _operands(product, _aten.mul.Tensor)
    if scaled is None or gated is None or gated != (scaled[0], sigmoid):
        return
    (gate, alpha), result = scaled, only_user(product)
    outer = _operands(result, _aten.mul.Tensor)
    more = None if outer is None else _operands(outer[0], _aten.add.Tensor)
    if more is None or outer is None or outer[1] is not product or more[1] != 1:
        return
    clamps = [each.args for each in (gate, more[0]) if is_call(each, _aten.clamp.default)]
    if len(clamps) != 2 or clamps[0][1] is not None or not isinstance(alpha, float):
        return
    limit = clamps[0][2]
    halves = [each[0] for each in clamps]
    both: AnyNode = halves[0].args[0]
    if clamps[1][1:] != (-limit, limit) or not is_call(both, _aten.add_.Tensor):
        return
    for at, half in enumerate(halves):
        if not is_call(half, _aten.slice.Tensor) or half.args[:3] != (both, 1, at):
            return
        if half.args[3] < shape_of(both)[1] or half.args[4:] != (2,):
            return
    chain = [(halves[0], gate), (halves[1], more[0]), (more[0], outer[0]), (outer[0], result)]
    if any(only_user(each) is not user for each, user in chain) or len(gate.users) != 2:
        return  # what is used elsewhere stays, and the bias is added in place
    rows, added = both.args
    if len(both.args) != 2 or both.kwargs or len(both.users) != 2 or only_user(rows) is not both:
        return
    if not is_call(added, _aten.index.Tensor) or len(added.args[1]) != 1:
        return
    bias, [experts] = added.args
    if not is_weight(bias) or {len(shape_of(each)) for each in (rows, bias)} != {2}:
        return
    replace(graph.graph, result, ops.clamped_gate, (rows, bias, experts, limit, alpha))
    graph.graph.eliminate_dead_code()
    graph.graph.erase_node(both)  # dead code with an effect is kept


def _is_rows(x: AnyNode) -> bool:
    """True if x is [1, T, N] or [T, N]."""
    shape = shape_of(x)
    return len(shape) == 2 or (len(shape) == 3 and shape[0] == 1)


def _times(node: Any, factor: float) -> AnyNode:
    """The operand that `node` multiplies by `factor`, or None."""
    found = _operands(node, _aten.mul.Tensor)
    return found[0] if found is not None and found[1] == factor else None


def _operands(node: Any, target: Any) -> tuple[Any, Any] | None:
    """The two operands of a call of `target` without further arguments."""
    is_plain = is_call(node, target) and len(node.args) == 2 and not node.kwargs
    return node.args if is_plain else None


def _softened(node: AnyNode) -> AnyNode:
    """The operand of which `node` is the softplus, or None."""
    is_plain = is_call(node, _aten.softplus.default) and len(node.args) == 1 and not node.kwargs
    return node.args[0] if is_plain else None
