"""Rotary embeddings of a recorded forward: the forms in which models write them, as one kernel.

A rotation turns pairs of a head's dimensions by a token's angle. Models differ in which dimensions
make a pair (the two halves, or neighbours), in whether cosines are given for each dimension or for
each pair, in how many dimensions turn, and in whether they round between the operators.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import Graph, GraphModule

from slipstream_core.forward.fuse import (
    SLICES_TO_END,
    AnyNode,
    attend_stored,
    before_cast,
    dtype_of,
    is_call,
    only_user,
    shape_of,
    slots_of_context,
)

_aten = torch.ops.aten
_CONTIGUOUS = {"memory_format": torch.contiguous_format}
_PARTS = "real and imaginary parts"


class RopeForm(NamedTuple):
    """The form in which a model writes its rotation."""

    width: int  # dimensions of a head that turn, from the first on
    interleaved: bool  # pairs are neighbours, not the two halves
    by_pair: bool  # cosines and sines are given for each pair, not for each dimension
    wide: bool  # float32 until the end, instead of rounding after each operator
    parts: bool = False  # neighbours are written as the two halves


class NormForm(NamedTuple):
    """The form in which a model writes the norm of a head."""

    epsilon: float
    rounds: bool  # to the tensors' type before the weight is applied
    offset: bool  # the factor is 1 + weight
    behind: bool = False  # it is of what has turned, not of what turns
    center: bool = False  # the mean is taken away; not behind


class RopeOps(Protocol):
    """The operators that replace rotations and norms of heads (see forward_ops.py)."""

    @property
    def rms_norm(self) -> Any: ...

    @property
    def layer_norm(self) -> Any: ...

    @property
    def two_rms_norms(self) -> Any: ...

    @property
    def rotate(self) -> Any: ...

    @property
    def rotate_and_store(self) -> Any: ...


class _Rotation(NamedTuple):
    x: AnyNode  # [1, heads, T, dim]
    cosines: AnyNode  # [1, T, width], or half as many by pair
    sines: AnyNode
    form: RopeForm
    result: AnyNode


class _Rotated(NamedTuple):
    call: AnyNode  # of `rotate`
    norm: AnyNode  # the call of `rms_norm` behind it, or None


def as_rotation(graph: GraphModule, node: AnyNode, ops: RopeOps) -> None:
    """Replace a rotation that ends in `node` by `rotate`.

    That is an addition, a concatenation, or complex numbers that become real.
    """
    found = _ENDS[node.target](node)
    if found is None:
        return
    found = _with_the_rest(found)
    kinds = {dtype_of(each) for each in (found.x, found.result)}
    if not found.form.wide:
        kinds |= {dtype_of(found.cosines), dtype_of(found.sines)}
    if len(kinds) > 1:
        return
    arguments = (found.x, found.cosines, found.sines, found.form)
    with graph.graph.inserting_before(found.result):
        new = graph.graph.call_function(ops.rotate, arguments)
    new.meta = dict(found.result.meta)
    found.result.replace_all_uses_with(new)


def join_rotations(graph: GraphModule, attend: AnyNode, ops: RopeOps) -> None:
    """Rotate query and key of an attention in one call, with the norms of their heads.

    The same call stores key and value. Norms of whole queries and keys become one call.
    """
    of_query, of_key = (_rotated(attend.args[at], ops) for at in (1, 2))
    if of_query is None or of_key is None or of_query.call.args[1:] != of_key.call.args[1:]:
        return
    xs = [each.call.args[0] for each in (of_query, of_key)]
    if shape_of(xs[0])[3] != shape_of(xs[1])[3]:
        return
    weights, form = [None, None], None
    behind = [of_query.norm, of_key.norm]
    norms = [_head_norm(x, ops) for x in xs]
    if behind != [None, None]:
        if None in behind or behind[0].args[2:] != behind[1].args[2:]:
            return
        weights = [norm.args[1] for norm in behind]
        form = NormForm(*behind[0].args[2:])._replace(behind=True)
    elif None not in norms and _norm_form(norms[0], ops) == _norm_form(norms[1], ops):
        weights, form = [norm.args[1] for norm in norms], _norm_form(norms[0], ops)[0]
        with graph.graph.inserting_before(attend):
            xs = [
                norm.args[0] if norm is x else _turned(graph.graph, norm.args[0])
                for x, norm in zip(xs, norms, strict=True)
            ]
    else:
        xs = _normed_whole(graph.graph, attend, xs, ops)
    _, cosines, sines, rope = of_query.call.args
    arguments = (*xs, attend.args[3], cosines, sines, *weights, rope, form)
    store_before(graph, attend, ops.rotate_and_store, arguments)


def store_before(
    graph: GraphModule, attend: AnyNode, op: Any, arguments: tuple[Any, ...]
) -> AnyNode:
    """Let `op` make an attention's query, which is returned, and store its key and value."""
    nodes, (context, query, _, _, layer, *others) = graph.graph, attend.args
    with nodes.inserting_before(attend):
        slots = nodes.call_function(slots_of_context, (context, layer))
        made = nodes.call_function(op, (*arguments, slots))
    made.meta = dict(query.meta)
    attend.target, attend.args = attend_stored, (context, made, layer, *others)
    return made


def _rotated(given: AnyNode, ops: RopeOps) -> _Rotated | None:
    """The rotation, and norm, behind an attention's input [T, heads, dim]; None if there is none or
    if something else uses it.
    """
    if not is_call(given, _aten.transpose.int) or given.args[1:] != (0, 1):
        return None
    heads_first = given.args[0]
    if not is_call(heads_first, _aten.select.int) or heads_first.args[1:] != (0, 0):
        return None
    norm, call = None, heads_first.args[0]
    if is_call(call, ops.rms_norm):
        norm, call = call, call.args[0]
    if not is_call(call, ops.rotate):
        return None
    chain = [call, heads_first, given, *([] if norm is None else [norm])]
    return _Rotated(call, norm) if all(only_user(each) is not None for each in chain) else None


def _norm_form(norm: AnyNode, ops: RopeOps) -> tuple[NormForm, int]:
    """The form of a call that norms heads, and the number of dimensions of its weight."""
    _, weight, *settings = norm.args
    if is_call(norm, ops.rms_norm):
        form = NormForm(*settings)
    else:
        form = NormForm(settings[1], rounds=False, offset=False, center=True)
    return form, len(shape_of(weight))


def _head_norm(x: AnyNode, ops: RopeOps) -> AnyNode:
    """The norm of heads without bias that x [1, heads, T, dim] is, or its transpose."""
    norm = x
    if is_call(x, _aten.transpose.int) and x.args[1:] == (1, 2) and only_user(x) is not None:
        norm = x.args[0]
    is_norm = is_call(norm, ops.rms_norm)
    if is_call(norm, ops.layer_norm):
        is_norm = norm.args[1] is not None and norm.args[2] is None
    alone = is_norm and only_user(norm) is not None
    return norm if alone and len(shape_of(norm)) == 4 else None


def _normed_whole(nodes: Graph, attend: AnyNode, xs: list[AnyNode], ops: RopeOps) -> list[AnyNode]:
    """xs [1, heads, T, dim], from one call where they are of two norms over [1, T, N]."""
    norms = [_whole_norm(x, ops) for x in xs]
    if None in norms or norms[0].args[2:] != norms[1].args[2:]:
        return xs
    (x, weight, *settings), (other, other_weight, *_) = (norm.args for norm in norms)
    parts = []
    with nodes.inserting_before(attend):
        call = nodes.call_function(ops.two_rms_norms, (x, other, weight, other_weight, *settings))
        for at, turned in enumerate(xs):
            part = nodes.call_function(operator.getitem, (call, at))
            view = nodes.call_function(_aten.view.default, (part, turned.args[0].args[1]))
            view.meta = dict(turned.args[0].meta)
            parts.append(_turned(nodes, view))
    return parts


def _whole_norm(x: AnyNode, ops: RopeOps) -> AnyNode:
    """The call of `rms_norm` [1, T, N] that x [1, heads, T, dim] is the heads of, or None."""
    view: AnyNode = x.args[0] if is_call(x, _aten.transpose.int) else None
    if not is_call(view, _aten.view.default) or x.args[1:] != (1, 2):
        return None
    norm = view.args[0]
    if not is_call(norm, ops.rms_norm) or len(shape_of(norm)) != 3:
        return None
    return norm if all(only_user(each) is not None for each in (norm, view, x)) else None


def _turned(nodes: Graph, x: AnyNode) -> AnyNode:
    turned = nodes.call_function(_aten.transpose.int, (x, 1, 2))
    turned.meta = {"val": x.meta["val"].transpose(1, 2)}
    return turned


def _of_dimensions(node: AnyNode) -> _Rotation | None:
    """x * cos + (x with its pairs swapped and one of them negated) * sin."""
    if len(node.args) != 2 or node.kwargs:
        return None
    straight, crossed = node.args
    if not (is_call(straight, _aten.mul.Tensor) and is_call(crossed, _aten.mul.Tensor)):
        return None
    (given, cos), (swapped, sin) = straight.args, crossed.args
    x, swapped = before_cast(given), before_cast(swapped)
    if not isinstance(x, torch.fx.Node) or not isinstance(swapped, torch.fx.Node):
        return None
    if len(shape_of(x)) != 4 or shape_of(x)[0] != 1 or shape_of(x)[3] % 2:
        return None
    interleaved = _swaps(swapped, x, given)
    if interleaved is None:
        return None
    cosines, sines = _angles(cos, x), _angles(sin, x)
    if cosines is None or sines is None or cosines[1] != sines[1]:
        return None
    result, wide = _rounded(node, x)
    form = RopeForm(shape_of(x)[3], interleaved, cosines[1], wide)
    return _Rotation(x, cosines[0], sines[0], form, result)


def _swaps(swapped: AnyNode, *sources: AnyNode) -> bool | None:
    """True if the swapped pairs are neighbours, False if they are halves; None if nothing is
    swapped.
    """
    dim = shape_of(sources[0])[3]
    half = dim // 2
    if is_call(swapped, _aten.cat.default) and swapped.args[1:] in ((-1,), (3,)):
        if len(swapped.args[0]) != 2:
            return None
        second, first = swapped.args[0]
        firsts, seconds = _slices(0, half, dim), _slices(half, dim, dim)
        interleaved = False
    elif is_call(swapped, _aten.view.default) and is_call(swapped.args[0], _aten.stack.default):
        if shape_of(swapped) != shape_of(sources[0]) or swapped.args[0].args[1:] != (-1,):
            return None
        second, first = swapped.args[0].args[0]
        firsts, seconds = [(0, SLICES_TO_END, 2)], [(1, SLICES_TO_END, 2)]
        interleaved = True
    else:
        return None
    if not is_call(second, _aten.neg.default):
        return None
    for part, wanted in ((second.args[0], seconds), (first, firsts)):
        is_part = is_call(part, _aten.slice.Tensor) and part.args[0] in sources
        if not is_part or part.args[1] != 3 or part.args[2:] not in wanted:
            return None
    return interleaved


def _slices(start: int, stop: int, dim: int) -> list[tuple[int, ...]]:
    return [(start, stop), *([(start, SLICES_TO_END)] if stop == dim else [])]


def _of_pairs(node: AnyNode) -> _Rotation | None:
    """The concatenation of first * cos - second * sin and second * cos + first * sin."""
    if node.args[1:] not in ((-1,), (3,)) or len(node.args[0]) != 2:
        return None
    low, high = node.args[0]
    if not (is_call(low, _aten.sub.Tensor) and is_call(high, _aten.add.Tensor)):
        return None
    products = [*low.args, *high.args]
    if len(products) != 4 or not all(is_call(each, _aten.mul.Tensor) for each in products):
        return None
    (first, cos), (second, sin) = products[0].args, products[1].args
    if products[2].args != (second, cos) or products[3].args != (first, sin):
        return None
    found = _divided(first, second)
    if found is None:
        return None
    x, interleaved = found
    if len(shape_of(x)) != 4 or shape_of(x)[0] != 1 or shape_of(x)[3] % 2:
        return None
    dim = shape_of(x)[3]
    cosines, sines = (_unsqueezed(each, (1, shape_of(x)[2], dim // 2)) for each in (cos, sin))
    if cosines is None or sines is None:
        return None
    result, wide = _rounded(node, x)
    form = RopeForm(dim, interleaved, True, wide, parts=interleaved)
    return _Rotation(x, cosines, sines, form, result)


def _divided(first: AnyNode, second: AnyNode) -> tuple[AnyNode, bool] | None:
    """The node that these two divide, with True if they are neighbours and False if they are
    halves; None if they divide nothing.
    """
    if is_call(first, _aten.slice.Tensor) and is_call(second, _aten.slice.Tensor):
        x = first.args[0]
        ends = [each.args[1:] for each in (first, second)]
        alternate = [(3, start, SLICES_TO_END, 2) for start in (0, 1)]
        return (x, True) if second.args[0] is x and ends == alternate else None
    if not all(is_call(each, operator.getitem) for each in (first, second)):
        return None
    split = first.args[0]
    if not is_call(split, _aten.split.Tensor) or second.args[0] is not split:
        return None
    x, half = split.args[0], shape_of(first)[-1]
    is_half = split.args[1:] in ((half, -1), (half, 3)) and shape_of(x)[-1] == 2 * half
    return (x, False) if is_half and (first.args[1], second.args[1]) == (0, 1) else None


def _of_complex(node: AnyNode) -> _Rotation | None:
    """Neighbours as complex numbers, times one for each pair."""
    product, back = node.args[0], only_user(node)
    if not is_call(product, _aten.mul.Tensor) or not is_call(back, _aten.view.default):
        return None
    numbers, angles = product.args
    if not is_call(numbers, _aten.view_as_complex.default):
        return None
    pairs = numbers.args[0]
    if not is_call(pairs, _aten.view.default) or shape_of(pairs) != shape_of(node):
        return None
    wide = pairs.args[0]
    x = before_cast(wide)
    if shape_of(wide) != shape_of(back) or len(shape_of(x)) != 4 or shape_of(x)[0] != 1:
        return None
    source = _unsqueezed(angles, (1, *shape_of(numbers)[2:]))
    if source is None or dtype_of(source) != torch.complex64:
        return None
    cosines, sines = _parts(source)
    result, _ = _rounded(back, x)
    form = RopeForm(shape_of(x)[3], interleaved=True, by_pair=True, wide=True)
    return _Rotation(x, cosines, sines, form, result)


def _parts(numbers: AnyNode) -> list[AnyNode]:
    """Real and imaginary parts of complex numbers, each contiguous; made once for all layers."""
    if _PARTS in numbers.meta:
        found: list[AnyNode] = numbers.meta[_PARTS]
        return found
    nodes, found = numbers.graph, []
    with nodes.inserting_after(numbers):
        after = real = nodes.call_function(_aten.view_as_real.default, (numbers,))
    real.meta = {"val": torch.view_as_real(numbers.meta["val"])}
    for at in (0, 1):
        with nodes.inserting_after(after):
            part = nodes.call_function(_aten.select.int, (real, 3, at))
        with nodes.inserting_after(part):
            after = nodes.call_function(_aten.clone.default, (part,), _CONTIGUOUS)
        part.meta = {"val": real.meta["val"].select(3, at)}
        after.meta = {"val": part.meta["val"].contiguous()}
        found.append(after)
    numbers.meta[_PARTS] = found
    return found


_ENDS = {
    _aten.add.Tensor: _of_dimensions,
    _aten.cat.default: _of_pairs,
    _aten.view_as_real.default: _of_complex,
}


def _angles(cos: AnyNode, x: AnyNode) -> tuple[AnyNode, bool] | None:
    """Cosines or sines [1, T, …], and whether they are by pair: each is repeated for x then."""
    _, _, tokens, dim = shape_of(x)
    plain = _unsqueezed(cos, (1, tokens, dim))
    if plain is not None:
        return plain, False
    # cut to the pairs, each repeated: by slice, unsqueeze, expand, clone and view
    if not is_call(cos, _aten.view.default) or shape_of(cos) != (1, 1, tokens, dim):
        return None
    repeated = cos.args[0]
    if is_call(repeated, _aten.clone.default):
        repeated = repeated.args[0]
    if not is_call(repeated, _aten.expand.default):
        return None
    inner = repeated.args[0]
    pairs = (1, 1, tokens, dim // 2)
    if shape_of(repeated) != (*pairs, 2) or not is_call(inner, _aten.unsqueeze.default):
        return None
    cut = inner.args[0]
    if inner.args[1] not in (-1, 4) or shape_of(cut) != pairs:
        return None
    if is_call(cut, _aten.slice.Tensor) and cut.args[1:] == (3, 0, dim // 2):
        whole = cut.args[0]
        source = _unsqueezed(whole, (1, tokens, shape_of(whole)[3]))
    else:
        source = _unsqueezed(cut, pairs[1:])
    return None if source is None else (source, True)


def _unsqueezed(node: AnyNode, shape: tuple[int, ...]) -> AnyNode:
    """The node of this shape to which `node` adds a dimension for the heads; None for another
    shape.
    """
    if not is_call(node, _aten.unsqueeze.default) or node.args[1] != 1:
        return None
    return node.args[0] if shape_of(node.args[0]) == shape else None


def _rounded(node: AnyNode, x: AnyNode) -> tuple[AnyNode, bool]:
    """The result in x's type, and whether it is made of wider numbers."""
    behind = only_user(node)
    if dtype_of(node) == dtype_of(x) or dtype_of(node) != torch.float32:
        return node, False
    if is_call(behind, _aten._to_copy.default) and dtype_of(behind) == dtype_of(x):
        return behind, True
    return node, True


def _with_the_rest(found: _Rotation) -> _Rotation:
    """The rotation with the dimensions that do not turn, if they are joined to the others behind
    them.
    """
    joined, turning, width = only_user(found.result), found.x, found.form.width
    is_all = is_call(turning, _aten.alias.default)
    is_part = is_call(turning, _aten.slice.Tensor) and turning.args[1:] == (3, 0, width)
    if not (is_all or is_part):
        return found
    whole = turning.args[0]
    if not is_call(joined, _aten.cat.default) or joined.args[1:] not in ((-1,), (3,)):
        return found
    dim = shape_of(whole)[3]
    if len(joined.args[0]) != 2 or joined.args[0][0] is not found.result:
        return found
    rest = joined.args[0][1]
    is_rest = is_call(rest, _aten.slice.Tensor) and rest.args[0] is whole
    if not is_rest or rest.args[1] != 3 or rest.args[2:] not in _slices(width, dim, dim):
        return found
    return found._replace(x=whole, result=joined)
