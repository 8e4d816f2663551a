"""Fuses operator patterns of a recorded float32 forward into calls of our kernels.

A pattern describes what operators compute, not an architecture; whatever does not match exactly is
left alone.

- Every rewriting keeps the values, except for the order of sums.
- Products with the same input are joined into one projection. The parameters become views of its
  matrix, so there is still one copy.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from slipstream_core.attention.interface import (
    AttentionContext,
    AttentionParams,
    CacheSlots,
    FusedContext,
)
from slipstream_core.forward.projection import (
    Coded,
    Dense,
    Lookup,
    Projection,
    Stacked,
    add_projection,
    joined_for_cpu,
    lay_out_by_column,
    look_up,
    num_readers,
    project,
)
from slipstream_core.kernels.codes.coded_parameter import CodedParameter, dequantised
from slipstream_core.kernels.cpu.kernels import Kernels

AnyNode = Any  # torch.fx.Node, whose annotations would need a cast at every argument
LinearParts = tuple[AnyNode, AnyNode, AnyNode]  # x, weight and bias or None
Pattern = Callable[[GraphModule, AnyNode], None]  # rewrites what is around a call, or leaves it

_aten = torch.ops.aten
_SIZES = (_aten.view.default, _aten._unsafe_view.default, _aten.expand.default)

# Names of the same operators that are cheaper to call: half the cost of a name in torch.ops.
_SHORT_NAMES = {
    _aten.add.Tensor: torch.add,
    _aten.cat.default: torch.cat,
    _aten.mul.Tensor: torch.mul,
    _aten.neg.default: torch.neg,
    _aten.select.int: torch.select,
    _aten.split_with_sizes.default: torch.split_with_sizes,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
    _aten.view.default: torch.Tensor.view,
}
SLICES_TO_END = 2**63 - 1


def by_number_of_tokens(graph: GraphModule, *, tokens: int, kept: int) -> None:
    """Replace sizes that equal `tokens` or `kept` by the inputs' actual sizes.

    Raises ValueError if a multiple of these numbers occurs in any other argument.
    """
    ids, _, keep = (node for node in graph.graph.nodes if node.op == "placeholder")
    with graph.graph.inserting_after(keep):
        num_kept = graph.graph.call_function(_aten.sym_size.int, (keep, 0))
        num_tokens = graph.graph.call_function(_aten.sym_size.int, (ids, 1))
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node in (num_tokens, num_kept):
            continue
        if node.target in _SIZES:
            sizes = [{tokens: num_tokens, kept: num_kept}.get(size, size) for size in node.args[1]]
            node.args = (node.args[0], sizes, *node.args[2:])
        for number in _numbers([*node.args, *node.kwargs.values()]):
            if number != SLICES_TO_END and (number % tokens == 0 or number % kept == 0) and number:
                raise ValueError(f"{node.target} uses the number of tokens in its own way")


def _numbers(arguments: Any) -> list[int]:
    found: list[int] = []
    for each in arguments:
        if isinstance(each, list | tuple):
            found += _numbers(each)
        elif isinstance(each, int) and not isinstance(each, bool):
            found.append(each)
    return found


def attend_by_context(graph: GraphModule) -> None:
    """Replace the attention markers by calls of the context, which becomes the fourth input."""
    last = [node for node in graph.graph.nodes if node.op == "placeholder"][-1]
    with graph.graph.inserting_after(last):
        context = graph.graph.placeholder("context")
    for node in graph.graph.find_nodes(
        op="call_function", target=torch.ops.slipstream.attend.default
    ):
        with graph.graph.inserting_before(node):
            call = graph.graph.call_function(attend_by_its_context, (context, *node.args))
        call.meta = node.meta
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)


def attend_by_its_context(
    context: AttentionContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_latent: bool,
) -> torch.Tensor:
    """The attention call of a recorded forward; shapes as in AttentionContext.attend."""
    params = AttentionParams(scale, window, softcap, sinks, is_latent)
    return context.attend(layer, query, key, value, params)


def slots_of_context(context: FusedContext, layer: int) -> CacheSlots:
    """The slots in which a kernel of a recorded forward stores a layer's keys and values."""
    return context.cache_slots(layer)


def attend_stored(
    context: FusedContext,
    query: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    is_latent: bool,
) -> torch.Tensor:
    """Attend as `attend_by_its_context` does, to keys and values that a kernel has stored."""
    params = AttentionParams(scale, window, softcap, sinks, is_latent)
    return context.attend_stored(layer, query, params)


def fuse(graph: GraphModule, kernels: Kernels, others: Mapping[Any, Pattern] | None = None) -> None:
    """Apply the patterns of single products, and `others`; `join` follows."""
    rewrite(
        graph,
        {
            **(others or {}),
            _aten.mm.default: _as_any_linear,
            _aten.addmm.default: _as_any_linear,
            _aten.bmm.default: _as_stacked,
            _aten.embedding.default: _as_lookup,
            _aten.rsqrt.default: partial(_as_norm, kernels=kernels),
            _aten.silu.default: partial(with_product, gate_mul=kernels.silu_mul, dims=(2, 3, 4)),
            attend_by_its_context: partial(_tokens_first, kernels=kernels),
        },
    )
    graph.graph.eliminate_dead_code()
    # last, as the patterns above know them by torch's names
    own = {_aten.sigmoid.default: kernels.sigmoid, _aten.softplus.default: kernels.softplus}
    rewrite(graph, {each: partial(_by, call=call) for each, call in own.items()})
    _dequantise_others(graph)


def join(graph: GraphModule) -> None:
    """Join products with the same input, and give operators names that are cheaper to call."""
    _join_weights(graph)
    graph.graph.eliminate_dead_code()
    for node in graph.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            node.target = _SHORT_NAMES.get(node.target, node.target)


def rewrite(graph: GraphModule, patterns: Mapping[Any, Pattern]) -> None:
    """Try the pattern of each operator on each of its calls; what is then unused goes."""
    for node in list(graph.graph.nodes):
        pattern = patterns.get(node.target) if node.op == "call_function" else None
        if pattern is not None and not node._erased:
            pattern(graph, node)
    graph.graph.eliminate_dead_code()


def is_call(node: Any, target: Any) -> bool:
    """True if `node` calls `target`."""
    return isinstance(node, Node) and node.op == "call_function" and node.target == target


def shape_of(node: AnyNode) -> tuple[int, ...]:
    """The shape of node's result."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: AnyNode) -> torch.dtype:
    """The type of node's result."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def before_cast(node: AnyNode) -> AnyNode:
    """The node that `node` is a float32 copy of, or `node` itself."""
    is_wide = is_call(node, _aten._to_copy.default) and dtype_of(node) == torch.float32
    return node.args[0] if is_wide else node


def only_user(node: AnyNode) -> AnyNode:
    """The one node that uses this, or None."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def replace(nodes: Graph, old: AnyNode, target: Any, arguments: tuple[Any, ...]) -> AnyNode:
    """Let a call of `target` take the place of `old`; returns it."""
    with nodes.inserting_before(old):
        new = nodes.call_function(target, arguments)
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    return new


def as_linear(graph: GraphModule, node: AnyNode) -> None:
    """Replace view, t, mm, view back by one projection."""
    parts, back = linear_parts(node), only_user(node)
    if parts is None or not is_call(parts[0], _aten.view.default):
        return
    if back is None or not (
        is_call(back, _aten._unsafe_view.default) or is_call(back, _aten.view.default)
    ):
        return
    flat, weight, bias = parts
    x = flat.args[0]
    if (
        shape_of(back) == (*shape_of(x)[:-1], shape_of(node)[-1])
        and shape_of(x)[-1] == shape_of(flat)[-1]
    ):
        as_projection(graph, back, (x, weight, bias))


def _as_any_linear(graph: GraphModule, node: AnyNode) -> None:
    """Replace a product by one projection, also of rows that stay [T, K]."""
    as_linear(graph, node)
    if not node.users:
        return
    parts = linear_parts(node)
    if parts is not None:
        flat, weight, bias = parts
        projection = _projection(graph, weight, bias)
    elif all(map(is_weight, node.args[-1:] + node.args[:-2])) and not node.kwargs:  # as GPT-2's
        flat, matrix = node.args[-2:]
        bias = node.args[0] if len(node.args) == 3 else None
        _dequantise(graph, matrix)
        projection = Dense(getattr(graph, matrix.target).t(), bias and getattr(graph, bias.target))
    else:
        return
    nodes = graph.graph
    with nodes.inserting_before(node):
        if is_call(flat, _aten.view.default) and shape_of(flat.args[0]) == (1, *shape_of(flat)):
            x = flat.args[0]
        else:
            x = nodes.call_function(_aten.unsqueeze.default, (flat, 0))
            x.meta["val"] = flat.meta["val"].unsqueeze(0)
        product = add_product(graph, x, projection)
        product.meta["val"] = node.meta["val"].unsqueeze(0)
        rows = nodes.call_function(_aten.select.int, (product, 0, 0))
    rows.meta = dict(node.meta)
    node.replace_all_uses_with(rows)


def _by(graph: GraphModule, node: AnyNode, call: Any) -> None:
    """Compute a function of each number by our kernel, which decode rows have it from."""
    if len(node.args) == 1 and not node.kwargs and dtype_of(node) == torch.float32:
        replace(graph.graph, node, call, node.args)


def _as_stacked(graph: GraphModule, node: AnyNode) -> None:
    """Replace products of several matrices that the graph holds by one projection."""
    x, weight = node.args
    if is_weight(weight):
        with graph.graph.inserting_before(node):
            new = add_product(graph, x, Stacked(getattr(graph, weight.target)))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)


def as_projection(graph: GraphModule, old: AnyNode, parts: LinearParts) -> None:
    """Let a projection take the place of `old`."""
    x, weight, bias = parts
    with graph.graph.inserting_before(old):
        new = add_product(graph, x, _projection(graph, weight, bias))
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)


def _projection(graph: GraphModule, weight: AnyNode, bias: AnyNode | None) -> Projection:
    matrix, added = getattr(graph, weight.target), bias and getattr(graph, bias.target)
    is_coded = isinstance(matrix, CodedParameter)
    return Coded([matrix], added) if is_coded else Dense(matrix, added)


def _as_lookup(graph: GraphModule, node: AnyNode) -> None:
    """Take rows of a coded matrix by themselves."""
    weight, ids = node.args[:2]
    matrix = getattr(graph, weight.target) if is_weight(weight) else None
    if isinstance(matrix, CodedParameter):
        with graph.graph.inserting_before(node):
            lookup = add_projection(graph, Lookup(matrix))
        replace(graph.graph, node, look_up, (ids, lookup))


def _dequantise_others(graph: GraphModule) -> None:
    """Make coded matrices float32 that some other operator reads."""
    for node in graph.graph.find_nodes(op="get_attr"):
        _dequantise(graph, node)


def _dequantise(graph: GraphModule, weight: AnyNode) -> None:
    """Make a matrix float32 if it is coded."""
    matrix = getattr(graph, weight.target)
    if isinstance(matrix, CodedParameter):
        setattr(graph, weight.target, nn.Parameter(dequantised(matrix), requires_grad=False))


def projection_of(graph: GraphModule, product: AnyNode) -> Projection:
    """The projection that a call of `project` is given."""
    projection: Projection = getattr(graph, product.args[1].target)
    return projection


def linear_parts(node: AnyNode) -> LinearParts | None:
    """The parts of an mm or addmm that computes a linear layer, with x [T, K]."""
    bias, (x, turned) = None, node.args[-2:]
    if node.target is _aten.addmm.default:
        bias = node.args[0]
        if len(node.args) != 3 or node.kwargs or not is_weight(bias):
            return None
    if not is_call(turned, _aten.t.default) or not is_weight(turned.args[0]):
        return None
    return x, turned.args[0], bias


def again(weight: AnyNode) -> AnyNode:
    """The same tensor or projection of the graph once more, where nodes are inserted."""
    new = weight.graph.get_attr(weight.target)
    new.meta = dict(weight.meta)
    return new


def is_weight(node: Any) -> bool:
    """True if `node` is a tensor held by the graph."""
    return isinstance(node, Node) and node.op == "get_attr"


def _as_norm(graph: GraphModule, rsqrt: AnyNode, kernels: Kernels) -> None:
    """Replace weight * (x * rsqrt(mean(x ** 2) + epsilon)) by `rms_norm`."""
    added = rsqrt.args[0]
    if not is_call(added, _aten.add.Tensor) or not isinstance(added.args[1], float):
        return
    mean, epsilon = added.args
    if not is_call(mean, _aten.mean.dim) or mean.args[1:] != ([-1], True):
        return
    power = mean.args[0]
    if not is_call(power, _aten.pow.Tensor_Scalar) or power.args[1] != 2:
        return
    x, scaled = power.args[0], only_user(rsqrt)
    if not is_call(scaled, _aten.mul.Tensor) or set(scaled.args) != {x, rsqrt}:
        return
    product = only_user(scaled)
    if is_call(product, _aten.view.default) and shape_of(x)[2:] == (1, *shape_of(product)[2:]):
        scaled, product = product, only_user(product)  # groups of channels, of which there is one
        if not is_call(x, _aten.view.default) or shape_of(x.args[0]) != shape_of(scaled):
            return
        x = x.args[0]
    if not is_call(product, _aten.mul.Tensor):
        replace(graph.graph, scaled, kernels.rms_norm, (x, _ones(graph, x, rsqrt), epsilon))
        return
    weight: AnyNode = next((each for each in product.args if each is not scaled), None)
    if not is_weight(weight):
        return
    tensor = getattr(graph, weight.target)
    if tensor.dim() == 1 and len(tensor) == shape_of(x)[-1] and tensor.is_contiguous():
        replace(graph.graph, product, kernels.rms_norm, (x, weight, epsilon))


def _ones(graph: GraphModule, x: AnyNode, before: AnyNode) -> AnyNode:
    """The weight of a norm of x that has none, once for each width."""
    width = shape_of(x)[-1]
    name = f"ones_{width}"
    if not hasattr(graph, name):
        graph.register_buffer(name, torch.ones(width))
    with graph.graph.inserting_before(before):
        new = graph.graph.get_attr(name)
    new.meta = {"val": x.meta["val"].new_empty(width)}
    return new


def with_product(
    graph: GraphModule, activated: AnyNode, gate_mul: Any, dims: tuple[int, ...] = (3,)
) -> None:
    """Replace activation(gate) * up by `gate_mul`.

    dims: of gate and up, which are [1, T, dim], [1, T, heads, dim] or [T, dim].
    """
    product = only_user(activated)
    if not is_call(product, _aten.mul.Tensor):
        return
    gate = activated.args[0]
    up = next((each for each in product.args if each is not activated), None)
    if not isinstance(up, Node) or not isinstance(gate, Node):
        return
    shape = shape_of(up)
    if shape == shape_of(gate) and len(shape) in dims and (len(shape) == 2 or shape[0] == 1):
        replace(graph.graph, product, gate_mul, (gate, up))


def _tokens_first(graph: GraphModule, call: AnyNode, kernels: Kernels) -> None:
    """Skip the two transposes of attention's inputs [1, T, heads, dim], rotated and scaled by a
    number in between, or neither.
    """
    for index in (1, 2, 3):
        _input_tokens_first(graph.graph, call, index, kernels)


def _input_tokens_first(nodes: Graph, call: AnyNode, index: int, kernels: Kernels) -> None:
    turned = call.args[index]
    if not is_call(turned, _aten.transpose.int) or turned.args[1:] != (0, 1):
        return
    selected = turned.args[0]
    if not is_call(selected, _aten.select.int) or selected.args[1:] != (0, 0):
        return
    source = selected.args[0]
    rotated = rotation(source)
    if rotated is not None:
        source = rotated[0]
    scale = None
    if is_call(source, _aten.mul.Tensor) and isinstance(source.args[1], int | float):
        source, scale = source.args
    if not is_call(source, _aten.transpose.int) or source.args[1:] != (1, 2):
        return
    with nodes.inserting_before(call):
        plain = source.args[0]
        if scale is not None:
            plain = nodes.call_function(_aten.mul.Tensor, (plain, scale))
        plain = nodes.call_function(_aten.select.int, (plain, 0, 0))
        if rotated is not None:
            plain = nodes.call_function(kernels.rotate, (plain, *rotated[1:]))
    call.update_arg(index, plain)


def rotation(node: Any) -> tuple[AnyNode, AnyNode, AnyNode] | None:
    """x, cos, sin if node is x * cos + cat(-x's second half, x's first half) * sin, or that of the
    first dimensions of x with the others behind it.
    """
    if is_call(node, _aten.cat.default) and node.args[1:] in ((-1,), (3,)):
        return _rotation_by_halves(node) or _partial_rotation(node)
    if not is_call(node, _aten.add.Tensor) or len(node.args) != 2 or node.kwargs:
        return None
    straight, crossed = node.args
    if not (is_call(straight, _aten.mul.Tensor) and is_call(crossed, _aten.mul.Tensor)):
        return None
    (x, cos), (halves, sin) = straight.args, crossed.args
    if not (is_call(cos, _aten.unsqueeze.default) and is_call(sin, _aten.unsqueeze.default)):
        return None
    if not is_call(halves, _aten.cat.default) or halves.args[1:] not in ((-1,), (3,)):
        return None
    second, first = halves.args[0]
    dim = shape_of(x)[-1]
    half = dim // 2
    matches = (
        is_call(second, _aten.neg.default)
        and is_call(second.args[0], _aten.slice.Tensor)
        and second.args[0].args in ((x, 3, half, SLICES_TO_END), (x, 3, half, dim))
        and is_call(first, _aten.slice.Tensor)
        and first.args == (x, 3, 0, half)
        and cos.args[1] == sin.args[1] == 1
        and shape_of(cos.args[0]) == shape_of(sin.args[0]) == (1, shape_of(x)[2], dim)
        and dim == 2 * half
    )
    return (x, cos.args[0], sin.args[0]) if matches else None


def _rotation_by_halves(node: AnyNode) -> tuple[AnyNode, AnyNode, AnyNode] | None:
    """The same written as cat(a * cos - b * sin, b * cos + a * sin) of the halves a and b of x,
    with cos and sin for one half, which then become those for both.
    """
    if len(node.args[0]) != 2:
        return None
    first, second = node.args[0]
    if not is_call(first, _aten.sub.Tensor) or not is_call(second, _aten.add.Tensor):
        return None
    products = (*first.args, *second.args)
    if len(products) != 4 or not all(is_call(each, _aten.mul.Tensor) for each in products):
        return None
    (a, cos), (b, sin), (again_b, again_cos), (again_a, again_sin) = (
        each.args for each in products
    )
    if (a, b, cos, sin) != (again_a, again_b, again_cos, again_sin):
        return None
    if not (is_call(a, operator.getitem) and is_call(b, operator.getitem)):
        return None
    halves = a.args[0]
    if b.args[0] is not halves or (a.args[1], b.args[1]) != (0, 1):
        return None
    if not is_call(halves, _aten.split.Tensor) or halves.args[2:] not in ((-1,), (3,)):
        return None
    x, width = halves.args[:2]
    if shape_of(x)[-1] != 2 * width or shape_of(node) != shape_of(x):
        return None
    of_half = [each.args for each in (cos, sin) if is_call(each, _aten.unsqueeze.default)]
    if len(of_half) != 2 or any(dim != 1 for _, dim in of_half):
        return None
    one, other = (each for each, _ in of_half)
    if not shape_of(one) == shape_of(other) == (1, shape_of(x)[2], width):
        return None
    return x, _twice(one), _twice(other)


def _twice(half: AnyNode) -> AnyNode:
    """A tensor beside itself; one node for all who ask."""
    for user in half.users:
        if is_call(user, _aten.cat.default) and user.args == ([half, half], -1):
            return user
    with half.graph.inserting_after(half):
        both = half.graph.call_function(_aten.cat.default, ([half, half], -1))
    val = half.meta["val"]
    both.meta["val"] = val.new_empty(*val.shape[:-1], 2 * val.shape[-1])
    return both


def _partial_rotation(node: AnyNode) -> tuple[AnyNode, AnyNode, AnyNode] | None:
    if len(node.args[0]) != 2:
        return None
    turned, rest = node.args[0]
    found = None if is_call(turned, _aten.cat.default) else rotation(turned)
    if found is None or not is_call(rest, _aten.slice.Tensor):
        return None
    x, width, dim = rest.args[0], shape_of(turned)[-1], shape_of(node)[-1]
    first = found[0]
    matches = (
        is_call(first, _aten.slice.Tensor)
        and first.args == (x, 3, 0, width)
        and rest.args in ((x, 3, width, SLICES_TO_END), (x, 3, width, dim))
        and shape_of(x)[-1] == dim
    )
    return (x, *found[1:]) if matches else None


def _join_weights(graph: GraphModule) -> None:
    """Join products with the same input; store the others' wide matrices by column."""
    nodes, readers = graph.graph, num_readers(graph, memory_of)
    groups: dict[Any, list[tuple[AnyNode, Dense]]] = defaultdict(list)
    for node, dense in dense_products(graph):
        groups[node.args[0]].append((node, dense))
    for x, group in groups.items():
        members, parts = zip(*group, strict=True)
        if any(readers[memory_of(part.weight)] > 1 for part in parts):
            continue
        if len(parts) > 1 and all(part.bias is None for part in parts):
            with nodes.inserting_before(members[0]):
                product = add_product(graph, x, joined_for_cpu(parts))
                split_product(nodes, product, members)
        else:
            for part in parts:
                lay_out_by_column(part)
    _join_codes(graph, readers)


def _join_codes(graph: GraphModule, readers: Mapping[int, int]) -> None:
    """Join products of codes with the same input, where formats are equal."""
    groups: dict[Any, list[tuple[AnyNode, Coded]]] = defaultdict(list)
    for node, coded in _products(graph):
        if not isinstance(coded, Coded) or coded.bias is not None:
            continue
        if readers[memory_of(coded.weights[0])] == 1:
            groups[node.args[0], coded.matrix.format].append((node, coded))
    for (x, _), group in groups.items():
        members, parts = zip(*group, strict=True)
        if len(parts) > 1:
            with graph.graph.inserting_before(members[0]):
                whole = Coded([each.weights[0] for each in parts])
                split_product(graph.graph, add_product(graph, x, whole), members)


def dense_products(graph: GraphModule) -> list[tuple[AnyNode, Dense]]:
    """Calls of `project` with a Dense."""
    return [(node, each) for node, each in _products(graph) if isinstance(each, Dense)]


def _products(graph: GraphModule) -> Iterator[tuple[AnyNode, Projection]]:
    for node in graph.graph.find_nodes(op="call_function", target=project):
        yield node, projection_of(graph, node)


def memory_of(tensor: torch.Tensor) -> int:
    """A number that tensors share which begin at the same place."""
    return tensor.data_ptr() or id(tensor)  # 0 on the meta device


def add_product(graph: GraphModule, x: AnyNode, projection: Projection) -> AnyNode:
    """A call of `project`, where nodes are inserted."""
    return graph.graph.call_function(project, (x, add_projection(graph, projection)))


def split_product(nodes: Graph, product: AnyNode, members: Sequence[AnyNode]) -> None:
    """Put parts of a joined product in the place of `members`, in their order."""
    sizes = [shape_of(node)[-1] for node in members]
    parts = nodes.call_function(_aten.split_with_sizes.default, (product, sizes, -1))
    for index, node in enumerate(members):
        part = nodes.call_function(operator.getitem, (parts, index))
        part.meta = dict(node.meta)
        node.replace_all_uses_with(part)
