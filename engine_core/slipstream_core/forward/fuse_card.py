"""Fuses operator patterns of a recorded forward, in any floating type, for a card.

As in `fuse`, a pattern describes what operators compute, and what does not match stays torch's.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule
from torch.fx.node import map_aggregate

from slipstream_core.forward.activation_patterns import (
    as_clamped_gate,
    as_gelu,
    as_new_gelu,
    as_xielu,
)
from slipstream_core.forward.expert_patterns import (
    ExpertOps,
    as_combination,
    as_margin_route,
    as_order,
    as_route,
    join_experts,
    with_shared_expert,
)
from slipstream_core.forward.fuse import (
    AnyNode,
    add_product,
    as_linear,
    attend_by_its_context,
    attend_stored,
    dense_products,
    is_call,
    memory_of,
    only_user,
    rewrite,
    shape_of,
    slots_of_context,
    split_product,
    with_product,
)
from slipstream_core.forward.latent_patterns import LatentOps, join_latents
from slipstream_core.forward.norm_patterns import (
    as_layer_norm,
    as_norm,
    with_norm_before,
)
from slipstream_core.forward.product_patterns import (
    Launches,
    ProductOps,
    join_products,
)
from slipstream_core.forward.projection import Dense, joined, num_readers
from slipstream_core.forward.rope_patterns import as_rotation, join_rotations

_aten = torch.ops.aten

# operators that enqueue nothing
_WITHOUT_LAUNCH = frozenset(
    {
        operator.getitem,
        operator.mul,
        _aten.alias.default,
        _aten.detach.default,
        _aten.empty.memory_format,
        _aten.empty_like.default,
        _aten.expand.default,
        _aten.new_empty.default,
        _aten.permute.default,
        _aten.select.int,
        _aten.slice.Tensor,
        _aten.split.Tensor,
        _aten.split_with_sizes.default,
        _aten.squeeze.dim,
        _aten.sym_size.int,
        _aten.t.default,
        _aten.transpose.int,
        _aten.unsqueeze.default,
        _aten._unsafe_view.default,
        _aten.view.default,
        _aten.view_as_complex.default,
        _aten.view_as_real.default,
        slots_of_context,
    }
)
# attend, and combine where keys are split; the first stores before
_ATTENDS = {attend_by_its_context: 3, attend_stored: 2}


class Ops(LatentOps, ExpertOps, ProductOps, Protocol):
    """The operators that replace a card's patterns (see forward_ops.py)."""


def by_multiples_of_tokens(graph: GraphModule, *, tokens: int, kept: int) -> None:
    """Replace numbers that are multiples of `tokens`, or equal `kept`, by the inputs' own sizes.

    Both are primes that no size of a model is a multiple of.
    """
    nodes = graph.graph
    ids, _, keep = nodes.find_nodes(op="placeholder")
    with nodes.inserting_after(keep):
        num_kept = nodes.call_function(_aten.sym_size.int, (keep, 0))
        num_tokens = nodes.call_function(_aten.sym_size.int, (ids, 1))
    multiples: dict[int, AnyNode] = {1: num_tokens}

    def general(value: Any) -> Any:
        if not isinstance(value, int) or isinstance(value, bool) or not value:
            return value
        if value == kept:
            return num_kept
        times, rest = divmod(value, tokens)
        if rest:
            return value
        if times not in multiples:
            with nodes.inserting_after(num_tokens):
                multiples[times] = nodes.call_function(operator.mul, (num_tokens, times))
        return multiples[times]

    for node in list(nodes.nodes):
        if node.op == "call_function" and node not in (num_tokens, num_kept):
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), general)


def fuse(graph: GraphModule, ops: Ops) -> None:
    """Apply every pattern, and join the weights of products with the same input."""
    gate = partial(with_product, dims=(2, 3))
    rewrite(
        graph,
        {
            _aten.mm.default: as_linear,
            _aten.addmm.default: as_linear,
            _aten.rsqrt.default: partial(as_norm, ops=ops),
            _aten.native_layer_norm.default: partial(as_layer_norm, ops=ops),
            _aten.silu.default: partial(gate, gate_mul=ops.silu_mul),
            _aten.gelu.default: partial(as_gelu, ops=ops),
            _aten.tanh.default: partial(as_new_gelu, ops=ops),
            _aten.where.self: partial(as_xielu, ops=ops),
            _aten.sigmoid.default: partial(as_clamped_gate, ops=ops),
            _aten.add.Tensor: partial(as_rotation, ops=ops),
            _aten.cat.default: partial(_as_joined, ops=ops),
            _aten.view_as_real.default: partial(as_rotation, ops=ops),
            _aten.topk.default: partial(as_route, ops=ops),
            _aten.sort.default: partial(as_order, ops=ops),
            _aten.sum.dim_IntList: partial(as_combination, ops=ops),
        },
    )
    # when nothing but these uses the rotations and norms of heads, and sums are parts of norms
    rewrite(
        graph,
        {
            attend_by_its_context: partial(_join_inputs, ops=ops),
            ops.add_rms_norm: partial(with_norm_before, ops=ops),
            _aten.add.Tensor: partial(_as_sum, ops=ops),
        },
    )
    _join_weights(graph)
    graph.graph.eliminate_dead_code()  # what is not the only user any more
    join_experts(graph, ops)
    join_products(graph, ops)


def _as_joined(graph: GraphModule, cat: AnyNode, ops: Ops) -> None:
    of_heads = len(shape_of(cat)) == 4
    (as_rotation if of_heads else as_margin_route)(graph, cat, ops)


def _as_sum(graph: GraphModule, total: AnyNode, ops: Ops) -> None:
    with_shared_expert(graph, total, ops)
    if total.users:
        with_norm_before(graph, total, ops)


def _join_inputs(graph: GraphModule, attend: AnyNode, ops: Ops) -> None:
    is_latent = attend.args[-1]
    (join_latents if is_latent else join_rotations)(graph, attend, ops)


def launches_by_layer(graph: Graph, *, one_row: bool = False) -> list[int]:
    """Kernels from behind one attention to the end of the next, for each layer but the first.

    An operator of torch counts as one. one_row: of a step that has one.
    """
    return _launches(graph, one_row)[1:-1]


def num_launches(graph: Graph, *, one_row: bool = False) -> int:
    """Kernels of the whole forward."""
    return sum(_launches(graph, one_row))


def _launches(graph: Graph, one_row: bool) -> list[int]:
    """Kernels up to the end of each attention, and those behind the last one."""
    counts = [0]
    for node in graph.nodes:
        if node.op != "call_function" or node.target in _WITHOUT_LAUNCH:
            continue
        if node.target in _ATTENDS:
            counts[-1] += _ATTENDS[node.target]
            counts.append(0)
        else:
            launches = node.meta.get("launches", Launches(1, 1))
            counts[-1] += launches.of_one_row if one_row else launches.num
    return counts


def _join_weights(graph: GraphModule) -> None:
    """Join products with the same input into one."""
    nodes, readers = graph.graph, num_readers(graph, memory_of)
    groups: dict[Any, list[tuple[AnyNode, Dense]]] = defaultdict(list)
    for node, dense in dense_products(graph):
        groups[node.args[0], dense.bias is None].append((node, dense))
    for (x, _), group in groups.items():
        members, parts = zip(*group, strict=True)
        held = [each for part in parts for each in (part.weight, part.bias) if each is not None]
        if len(members) == 1 or any(readers[memory_of(each)] > 1 for each in held):
            continue
        with nodes.inserting_before(members[0]):
            product = add_product(graph, x, joined(parts))
            clamps = _equal_clamps(members)
            if clamps:
                product = nodes.call_function(clamps[0].target, (product, *clamps[0].args[1:]))
            split_product(nodes, product, clamps or members)
        for clamp in clamps:
            nodes.erase_node(clamp)


def _equal_clamps(products: Sequence[AnyNode]) -> Sequence[AnyNode]:
    """The clamps of these products, if their bounds are equal and nothing else uses the products;
    else an empty list.
    """
    clamps = [only_user(node) for node in products]
    first = clamps[0]
    if not all(is_call(each, _aten.clamp_.default) for each in clamps):
        return []
    return clamps if all(each.args[1:] == first.args[1:] for each in clamps) else []
