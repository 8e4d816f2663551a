"""Multi-head latent attention of a recorded forward: queries and the cached row of a token.

What remains between the model's products and attention is one kernel and one product, and one
product behind it. How latents are cached: see attention/latent_attention.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule

from slipstream_core.forward.fuse import (
    SLICES_TO_END,
    AnyNode,
    is_call,
    only_user,
    replace,
    shape_of,
)
from slipstream_core.forward.rope_patterns import NormForm, RopeOps, store_before

_aten = torch.ops.aten


class LatentOps(RopeOps, Protocol):
    """The operators that replace latent patterns (see forward_ops.py)."""

    @property
    def latent_rows(self) -> Any: ...

    @property
    def absorb_query(self) -> Any: ...

    @property
    def expand_output(self) -> Any: ...


class _Query(NamedTuple):
    nope: AnyNode  # [1, heads, T, dim that is not rotated]
    rotation: AnyNode  # of [1, heads, T, rotated dim]
    weight: AnyNode  # [heads, dim that is not rotated, rank]


class _Row(NamedTuple):
    norm: AnyNode  # of a latent [1, T, rank]
    rotation: AnyNode  # of [1, 1, T, rotated dim]


def join_latents(graph: GraphModule, attend: AnyNode, ops: LatentOps) -> None:
    """Replace what makes an attention's queries and rows, and what makes values of its output."""
    nodes = graph.graph
    query, row = _query(attend.args[1], ops), _row(attend.args[2], attend.args[3], ops)
    if query is not None and row is not None and query.rotation.args[1:] == row.rotation.args[1:]:
        end, cosines, sines, rope = query.rotation.args
        latent, weight, *norm = row.norm.args
        turning = end, row.rotation.args[0], latent, cosines, sines
        arguments = (*turning, weight, rope, NormForm(*norm))
        begun = store_before(graph, attend, ops.latent_rows, arguments)
        with nodes.inserting_before(attend):
            nope = nodes.call_function(_aten.select.int, (query.nope, 0, 0))
            whole = nodes.call_function(ops.absorb_query, (begun, nope, query.weight))
        whole.meta = dict(begun.meta)
        attend.update_arg(1, whole)
    _expand(graph, attend, ops)


def _expand(graph: GraphModule, attend: AnyNode, ops: LatentOps) -> None:
    """Let the product that makes values write them where the next product reads them."""
    product = only_user(only_user(attend) or attend)
    back: AnyNode = only_user(product) if is_call(product, _aten.bmm.default) else None
    if not is_call(back, _aten.transpose.int) or back.args[1:] != (0, 1):
        return
    turned, weight = product.args
    if not is_call(turned, _aten.transpose.int) or turned.args != (attend, 0, 1):
        return
    new = replace(graph.graph, back, ops.expand_output, (attend, weight))
    unsqueezed = only_user(new)
    copy: AnyNode = only_user(unsqueezed) if is_call(unsqueezed, _aten.unsqueeze.default) else None
    if is_call(copy, _aten.clone.default) and unsqueezed.args[1] == 0:
        copy.replace_all_uses_with(unsqueezed)  # it is contiguous already


def _query(given: AnyNode, ops: LatentOps) -> _Query | None:
    """The parts of a query [T, heads, rank + rotated dim]."""
    if not is_call(given, _aten.transpose.int) or given.args[1:] != (0, 1):
        return None
    parts = _joined(given.args[0])
    if parts is None:
        return None
    product, end = parts
    if not is_call(product, _aten.bmm.default) or not is_call(end, _aten.slice.Tensor):
        return None
    begin, weight = product.args
    whole = end.args[0]
    if not is_call(begin, _aten.slice.Tensor) or begin.args[0] is not whole:
        return None
    nope_dim = shape_of(weight)[1]
    if begin.args[1:] != (2, 0, nope_dim) or end.args[1:] != (2, nope_dim, SLICES_TO_END):
        return None
    parts = _joined(_first(whole))
    if parts is None or shape_of(parts[0])[3] != nope_dim:
        return None
    nope, turned = parts
    rotation = _rotation(turned, ops)
    return None if rotation is None else _Query(nope, rotation, weight)


def _row(key: AnyNode, value: AnyNode, ops: LatentOps) -> _Row | None:
    """The parts of a row [T, 1, rank + rotated dim], and of its beginning [T, 1, rank]."""
    for each in (key, value):
        if not is_call(each, _aten.transpose.int) or each.args[1:] != (0, 1):
            return None
    parts = _joined(_first(key.args[0]))
    if parts is None or _first(value.args[0]) is not parts[0]:
        return None
    latent, turned = parts
    norm: AnyNode = latent.args[0] if is_call(latent, _aten.view.default) else None
    rotation = _rotation(turned, ops)
    if rotation is None or not is_call(norm, ops.rms_norm) or len(shape_of(norm)) != 3:
        return None
    return _Row(norm, rotation)


def _rotation(turned: AnyNode, ops: LatentOps) -> AnyNode:
    """The call of `rotate` that turns a whole head, or None."""
    is_whole = is_call(turned, ops.rotate) and turned.args[3].width == shape_of(turned)[3]
    return turned if is_whole else None


def _joined(node: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """Two tensors that are joined by their last dimension."""
    if not is_call(node, _aten.cat.default) or len(node.args[0]) != 2:
        return None
    if node.args[1:] not in ((-1,), (len(shape_of(node)) - 1,)):
        return None
    first, second = node.args[0]
    return first, second


def _first(node: AnyNode) -> AnyNode:
    """The node whose first element `node` selects, or None."""
    is_first = is_call(node, _aten.select.int) and node.args[1:] == (0, 0)
    return node.args[0] if is_first else None
