"""Mixtures of experts of a recorded forward: routing, the order of tokens, and the weighted sum;
then all behind the routing in one call, so that it can run otherwise where a step has few tokens.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch.fx import GraphModule

from slipstream_core.forward.activation_patterns import ActivationOps, gates_of
from slipstream_core.forward.fuse import (
    AnyNode,
    again,
    dtype_of,
    is_call,
    is_weight,
    only_user,
    shape_of,
)
from slipstream_core.forward.product_patterns import Launches

_aten = torch.ops.aten
_DIVISIONS = (_aten.div.Tensor, _aten.div_.Tensor)
_FILLS = (_aten.masked_fill.Scalar, _aten.masked_fill_.Scalar)


class RouteForm(NamedTuple):
    """The way from a token's logits to its experts and their weights."""

    num_chosen: int
    scores: str  # "logits", "softmax" or "sigmoid": what the experts are chosen by
    weighs: str  # "scores", "sum" (they are divided by it) or "softmax" of those chosen
    scale: float  # of the weights, at the end
    epsilon: float = 0.0  # added to the sum that they are divided by
    num_groups: int = 1  # of equal size; experts are chosen from the best groups alone
    chosen_groups: int = 1
    best_of_group: int = 1  # of a group's scores, which are summed to choose it by


class ExpertOps(ActivationOps, Protocol):
    """The operators that expert patterns consist of and are replaced by (see forward_ops.py)."""

    @property
    def route(self) -> Any: ...

    @property
    def route_by_margin(self) -> Any: ...

    @property
    def order_experts(self) -> Any: ...

    @property
    def combine_experts(self) -> Any: ...

    @property
    def experts(self) -> Any: ...


def as_route(graph: GraphModule, topk: AnyNode, ops: ExpertOps) -> None:
    """Replace scores, topk and the weights behind it by `route`."""
    if len(topk.args) < 2 or topk.args[2:4] not in ((), (-1,), (-1, True), (1, True)):
        return
    values, ids = _part(topk, 0), _part(topk, 1)
    groups = _grouped(topk.args[0])
    chosen_by = topk.args[0] if groups is None else groups.scores
    found = _scored(chosen_by)
    if ids is None or found is None:
        return
    logits, scores, plain, bias = found
    if len(shape_of(logits)) != 2:
        return
    may_be_negative = bias is not None or scores == "logits"
    if groups is not None and groups.fill != -torch.inf and may_be_negative:
        return  # what is filled in may be better than a score
    if groups is not None and topk.args[1] > groups.num_choices:
        return  # some are of other groups
    if values is None or bias is not None:  # the weights are the scores without what was added
        gathered = [user for user in ids.users if is_call(user, _aten.gather.default)]
        if values is not None or len(gathered) != 1 or gathered[0].args != (plain, 1, ids):
            return
        values = gathered[0]
    in_place = [each for each in values.users if is_call(each, _aten.div_.Tensor)]
    values, weighs, scale, epsilon = _weighed(values)
    result = values
    behind = only_user(result)
    if is_call(behind, _aten._to_copy.default):
        result = behind
    is_half = dtype_of(values) != torch.float32
    if is_half and (scores, weighs) not in (("logits", "scores"), ("logits", "softmax")):
        return  # it rounds in between
    form = RouteForm(topk.args[1], scores, weighs, scale, epsilon)
    if groups is not None:
        form = form._replace(
            num_groups=groups.num_groups,
            chosen_groups=groups.num_chosen,
            best_of_group=groups.num_best,
        )
    with graph.graph.inserting_before(topk):
        both = graph.graph.call_function(ops.route, (logits, bias, form, dtype_of(result)))
        parts = [graph.graph.call_function(operator.getitem, (both, at)) for at in (0, 1)]
    for part, old in zip(parts, (result, ids), strict=True):
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)
    graph.graph.eliminate_dead_code()
    for each in (*in_place, *([] if groups is None else [groups.mask])):
        _drop(graph, each)


def as_margin_route(graph: GraphModule, weights: AnyNode, ops: ExpertOps) -> None:
    """Replace the choice of two experts, one after the other, by `route_by_margin`.

    Phi-3.5-MoE's (Liu et al. 2024, arXiv 2409.12136): each weighs by the softmax over those that
    are close to it.
    """
    if weights.args[1:] not in ((-1,), (1,)) or len(weights.args[0]) != 2:
        return
    one, two = (_close(each) for each in weights.args[0])
    if one is None or two is None:
        return
    (logits, first, best, margin), (left, second, other, again) = one, two
    if first is not logits or second is not logits or margin != again:
        return
    if not is_call(left, _aten.scatter.value) or left.args[1:] != (-1, best, -torch.inf):
        return
    if left.args[0] is not logits or len(shape_of(logits)) != 2:
        return
    ids = [each for each in best.users if is_call(each, _aten.cat.default)]
    if len(ids) != 1 or ids[0].args != ([best, other], -1):
        return
    with graph.graph.inserting_before(weights):
        both = graph.graph.call_function(ops.route_by_margin, (logits, margin))
        parts = [graph.graph.call_function(operator.getitem, (both, at)) for at in (0, 1)]
    for part, old in zip(parts, (weights, ids[0]), strict=True):
        part.meta = dict(old.meta)
        old.replace_all_uses_with(part)


def _close(weight: AnyNode) -> tuple[AnyNode, AnyNode, AnyNode, float] | None:
    """The candidates whose best weighs this, all logits, which it is, and the largest distance."""
    if not is_call(weight, _aten.gather.default) or weight.args[1] != -1:
        return None
    softmax, _, best = weight.args
    top = _source(best, operator.getitem)
    if not is_call(softmax, _aten._softmax.default) or softmax.args[1:] != (-1, False):
        return None
    if not is_call(top, _aten.max.dim) or best.args[1] != 1 or top.args[1:] != (-1, True):
        return None
    candidates, masked = top.args[0], softmax.args[0]
    if not is_call(masked, _aten.masked_fill.Scalar):
        return None
    if masked.args[::2] != (candidates, -torch.inf):
        return None
    is_far, value = masked.args[1], _part(top, 0)
    ratio = _source(is_far, _aten.gt.Scalar)
    if not is_call(ratio, _aten.div.Tensor):
        return None
    distance, size = ratio.args
    if not is_call(distance, _aten.sub.Tensor) or distance.args[0] is not value:
        return None
    logits = distance.args[1]
    if not is_call(size, _aten.clamp.Tensor) or size.args[1:] != (value,):
        return None
    if _source(size.args[0], _aten.abs.default) is not logits:
        return None
    return candidates, logits, best, is_far.args[1]


def as_order(graph: GraphModule, sort: AnyNode, ops: ExpertOps) -> None:
    """Replace the sort of all tokens' experts, and what follows from it, by `order_experts`."""
    flat = sort.args[0]
    if len(sort.args) != 1 or sort.kwargs or not is_call(flat, _aten.view.default):
        return
    ids, ordered, places = flat.args[0], _part(sort, 0), _part(sort, 1)
    if flat.args[1] != [-1] or len(shape_of(ids)) != 2 or ordered is None or places is None:
        return
    chosen = shape_of(ids)[1]
    found = [_ends(user) for user in ordered.users]
    ends = [each for each in found if each is not None]
    if len(ends) != 1:
        return
    ends, num_experts = ends[0]
    _drop_sentinels(graph, ordered, num_experts)
    olds: list[tuple[AnyNode, int]] = [(ordered, 0), (ends, 4)]
    inverse = None
    for user in places.users:
        if is_call(user, _aten.floor_divide.default) and user.args == (places, chosen):
            olds.append((user, 2))
        elif _inverts(user, places):
            inverse = user
            olds.append((user, 3))
    olds.append((places, 1))
    with graph.graph.inserting_before(sort):
        call = graph.graph.call_function(ops.order_experts, (ids, num_experts))
        for old, at in olds:
            part = graph.graph.call_function(operator.getitem, (call, at))
            part.meta = dict(old.meta)
            old.replace_all_uses_with(part)
    if inverse is not None:
        graph.graph.erase_node(inverse)


def as_combination(graph: GraphModule, total: AnyNode, ops: ExpertOps) -> None:
    """Replace each token's sum over its experts, weighted, by `combine_experts`."""
    if len(total.args) != 2 or total.args[1] != [1] or total.kwargs:
        return
    view = total.args[0]
    if not is_call(view, _aten.view.default) or len(shape_of(view)) != 3:
        return
    back = view.args[0]
    weighted, inverse = _indexed(back)
    if not is_call(weighted, _aten.mul.Tensor) or only_user(weighted) is None:
        return
    rows, factor = weighted.args
    if not is_call(factor, _aten.unsqueeze.default) or factor.args[1] not in (-1, 1):
        return
    flat, places = _indexed(factor.args[0])
    if not is_call(flat, _aten.view.default) or flat.args[1] != [-1]:
        return
    order: Any = places.args[0] if is_call(places, operator.getitem) else None
    if not is_call(order, ops.order_experts) or places.args[1] != 1:
        return
    if not is_call(inverse, operator.getitem) or inverse.args != (order, 3):
        return
    weights, ids = flat.args[0], order.args[0]
    if shape_of(view)[:2] != shape_of(weights) or shape_of(weights) != shape_of(ids):
        return
    added = _with_bias(rows, order)
    products, bias = (rows, None) if added is None else added
    result = total
    behind = only_user(total)
    if is_call(behind, _aten._to_copy.default):
        result = behind
    if dtype_of(result) != dtype_of(rows):
        return
    with graph.graph.inserting_before(total):
        new = graph.graph.call_function(
            ops.combine_experts, (products, weights, inverse, ids, bias, None)
        )
    new.meta = dict(result.meta)
    result.replace_all_uses_with(new)
    if added is not None:
        graph.graph.eliminate_dead_code()
        _drop(graph, rows)


def with_shared_expert(graph: GraphModule, total: AnyNode, ops: ExpertOps) -> None:
    """Let `combine_experts` add what a shared expert gives."""
    if len(total.args) != 2 or total.kwargs:
        return
    for view, shared in (total.args, total.args[::-1]):
        combined: AnyNode = view.args[0] if is_call(view, _aten.view.default) else None
        if not is_call(combined, ops.combine_experts) or combined.args[5] is not None:
            continue
        is_alone = only_user(view) is not None and only_user(combined) is not None
        alike = shape_of(view) == shape_of(total) == (1, *shape_of(combined))
        if not isinstance(shared, torch.fx.Node) or not is_alone or not alike:
            continue
        if shape_of(shared) != shape_of(total) or dtype_of(shared) != dtype_of(combined):
            continue
        nodes = graph.graph
        with nodes.inserting_before(total):
            new = nodes.call_function(ops.combine_experts, (*combined.args[:5], shared))
            back = nodes.call_function(_aten.unsqueeze.default, (new, 0))
        new.meta, back.meta = dict(combined.meta), dict(total.meta)
        total.replace_all_uses_with(back)
        return


def join_experts(graph: GraphModule, ops: ExpertOps) -> None:
    """Replace the order of tokens, both products, the gate and the weighted sum by `experts`."""
    nodes, gates = graph.graph, gates_of(ops)
    for combined in nodes.find_nodes(op="call_function", target=ops.combine_experts):
        written = _written_experts(combined, gates)
        if written is None:
            continue
        x, up, gate, down = written
        _, weights, _, ids, _, more = combined.args
        with nodes.inserting_before(combined):
            arguments = (x, weights, ids, again(up), again(down), gate, more)
            new = nodes.call_function(ops.experts, arguments)
        new.meta = dict(combined.meta) | {"launches": Launches(6, of_one_row=2)}
        combined.replace_all_uses_with(new)
    nodes.eliminate_dead_code()


class _WrittenExperts(NamedTuple):
    """The inputs of experts without biases whose matrices have the layout of `linear`."""

    x: AnyNode
    up: AnyNode  # [experts, 2 * I, K]
    gate: str
    down: AnyNode  # [experts, N, I]


def _written_experts(combined: AnyNode, gates: Mapping[Any, str]) -> _WrittenExperts | None:
    """The experts behind a weighted sum; None if they have another form or another user."""
    rows, _, inverse, _, bias, _ = combined.args
    order = inverse.args[0]
    down = _transposed_product(rows, order)
    if bias is not None or down is None or down.x.target not in gates:
        return None
    both = _halved(down.x)
    up = _transposed_product(both, order)
    if up is None or only_user(down.x) is not rows:
        return None
    x, tokens = _indexed(up.x)
    if not is_call(tokens, operator.getitem) or tokens.args != (order, 2):
        return None
    users = {each for part in order.users for each in part.users}
    if users != {up.x, both, rows, combined}:
        return None
    return _WrittenExperts(x, up.weight, gates[down.x.target], down.weight)


class _GroupedProduct(NamedTuple):
    x: AnyNode
    weight: AnyNode  # [experts, N, K]


def _transposed_product(node: AnyNode, order: AnyNode) -> _GroupedProduct | None:
    """A product with the experts' matrices, which lie as a linear layer's, that has one user."""
    if not is_call(node, _aten._grouped_mm.default) or len(node.args) != 3 or node.kwargs:
        return None
    x, turned, ends = node.args
    if not is_call(ends, operator.getitem) or ends.args != (order, 4) or only_user(node) is None:
        return None
    if not is_call(turned, _aten.transpose.int) or not is_weight(turned.args[0]):
        return None
    if turned.args[1:] not in ((-2, -1), (1, 2), (2, 1), (-1, -2)):
        return None
    return _GroupedProduct(x, turned.args[0])


def _halved(gate: AnyNode) -> AnyNode:
    """The node whose halves a gated activation takes, activated half first; None for other
    inputs.
    """
    first, second = gate.args
    split = _source(first, operator.getitem)
    if not is_call(split, _aten.split.Tensor) or len(split.users) != 2:
        return None
    if (first.args, second.args) != ((split, 0), (split, 1)):
        return None
    both, width, dim = split.args
    is_half = 2 * width == shape_of(both)[1] and dim in (-1, 1)
    return both if is_half and only_user(both) is split else None


def _part(node: AnyNode, index: int) -> AnyNode:
    found = [each for each in node.users if each.args == (node, index)]
    return found[0] if len(found) == 1 else None


def _scored(chosen_by: AnyNode) -> tuple[AnyNode, str, AnyNode, AnyNode] | None:
    """Logits, how they are scored, the scores, and what is added to them to choose by."""
    scores, bias = chosen_by, None
    if is_call(chosen_by, _aten.add.Tensor) and len(chosen_by.args) == 2:
        scores, bias = chosen_by.args
        if not is_weight(bias) or len(shape_of(bias)) != 1:
            return None
    if is_call(scores, _aten.sigmoid.default):
        name, wide = "sigmoid", scores.args[0]
    elif is_call(scores, _aten._softmax.default) and scores.args[1:] in ((-1, False), (1, False)):
        name, wide = "softmax", scores.args[0]
    else:
        name, wide = "logits", scores
    is_copy = is_call(wide, _aten._to_copy.default) and dtype_of(wide) == torch.float32
    if not isinstance(wide, torch.fx.Node) or (bias is not None and name == "logits"):
        return None
    return (wide.args[0] if is_copy else wide), name, scores, bias


class _Groups(NamedTuple):
    """Expert selection that is limited to the best groups."""

    scores: AnyNode  # [T, experts], of all groups
    num_groups: int
    num_chosen: int
    num_best: int  # of a group's scores, which are summed to choose it by
    fill: float  # in place of the scores of other groups
    mask: AnyNode  # [T, groups], written in place

    @property
    def num_choices(self) -> int:
        """The experts of the groups that are chosen."""
        return self.num_chosen * (shape_of(self.scores)[1] // self.num_groups)


def _grouped(masked: AnyNode) -> _Groups | None:
    """The groups by which scores are masked; None if they are not."""
    if not is_call(masked, _aten.masked_fill.Scalar):
        return None
    scores, others, fill = masked.args
    of_experts = _source(others, _aten.bitwise_not.default, _aten._to_copy.default)
    if is_call(of_experts, _aten._unsafe_view.default):
        of_experts = _source(of_experts.args[0], _aten.clone.default)  # where groups have several
    else:
        of_experts = _source(of_experts, _aten.view.default)
    written = _source(of_experts, _aten.expand.default, _aten.unsqueeze.default)
    if not is_call(written, _aten.scatter_.value) or fill not in (-torch.inf, 0.0):
        return None
    zeros, dim, ids, one = written.args
    topk = _source(ids, operator.getitem)
    if (dim, one) != (1, 1) or not is_call(topk, _aten.topk.default):
        return None
    if not is_call(_source(zeros, _aten.detach.default), _aten.zeros_like.default):
        return None
    found = _group_scores(topk.args[0], scores)
    if found is None or topk.args[2:4] not in ((), (-1,), (-1, True)) or ids.args[1] != 1:
        return None
    num_groups, num_best = found
    if shape_of(written)[1:] != (num_groups,) or shape_of(others) != shape_of(scores):
        return None
    if shape_of(scores)[1] % num_groups:
        return None
    return _Groups(scores, num_groups, topk.args[1], num_best, fill, written)


def _group_scores(sums: AnyNode, scores: AnyNode) -> tuple[int, int] | None:
    """The groups whose best scores are summed, and how many of each."""
    num_best = 1
    if is_call(sums, _aten.sum.dim_IntList) and sums.args[1:] == ([-1],):
        sums = sums.args[0]
        best = _source(sums, operator.getitem)
        if not is_call(best, _aten.topk.default) or best.args[2:] not in ((), (-1,)):
            return None
        num_best = best.args[1]
    else:
        best = _source(sums, operator.getitem)
        if not is_call(best, _aten.max.dim) or best.args[1:] != (-1,):
            return None
    groups = best.args[0]
    if sums.args[1] != 0 or not is_call(groups, _aten.view.default) or groups.args[0] is not scores:
        return None
    return (shape_of(groups)[1], num_best) if len(shape_of(groups)) == 3 else None


def _source(node: AnyNode, *targets: Any) -> AnyNode:
    """The node behind a chain of calls of `targets`, outermost first; None if the chain differs."""
    for target in targets:
        if not is_call(node, target):
            return None
        node = node.args[0]
    return node


def _weighed(values: AnyNode) -> tuple[AnyNode, str, float, float]:
    """The weights of those chosen, how they come from their scores, their scale, and epsilon."""
    weighs, scale, epsilon = "scores", 1.0, 0.0
    behind = only_user(values)
    if is_call(behind, _aten._softmax.default) and behind.args[1:] in ((-1, False), (1, False)):
        values, weighs = behind, "softmax"
    elif len(values.users) == 2:
        sums = [each for each in values.users if is_call(each, _aten.sum.dim_IntList)]
        if len(sums) == 1 and sums[0].args == (values, [-1], True):
            by = sums[0]
            added = only_user(by)
            if is_call(added, _aten.add.Tensor) and isinstance(added.args[1], float):
                by, epsilon = added, added.args[1]
            divided = only_user(by)
            if divided not in values.users or divided.target not in _DIVISIONS:
                return values, weighs, scale, 0.0
            values, weighs = divided, "sum"
    behind = only_user(values)
    if is_call(behind, _aten.mul.Tensor) and isinstance(behind.args[1], float):
        values, scale = behind, behind.args[1]
    return values, weighs, scale, epsilon


def _ends(ordered: AnyNode) -> tuple[AnyNode, int] | None:
    """The end offsets of the experts' tokens, from a copy of the sorted expert numbers, and the
    number of experts; None for another pattern.
    """
    counts = only_user(ordered)
    if not is_call(ordered, _aten._to_copy.default) or not is_call(counts, _aten.histc.default):
        return None
    num = counts.args[1]
    ends = only_user(counts)
    if counts.args[1:] != (num, 0, num - 1) or not is_call(ends, _aten.cumsum.default):
        return None
    return (ends, num) if ends.args[1:] == (0,) and dtype_of(ends) == torch.int32 else None


def _drop_sentinels(graph: GraphModule, ordered: AnyNode, num_experts: int) -> None:
    """Let go of what serves rows whose expert is `num_experts` or more, of which there are none.

    A model gives such numbers to experts of other devices. Some versions of transformers mask their
    rows on one device as well: before, between and behind both products.
    """
    dead: list[AnyNode] = []
    for user in list(ordered.users):
        if is_call(user, _aten.clamp_.default) and user.args == (ordered, None, num_experts - 1):
            user.replace_all_uses_with(ordered)
            dead.append(user)
        elif is_call(user, _aten.ge.Scalar) and user.args == (ordered, num_experts):
            mask = only_user(user)
            if not is_call(mask, _aten.unsqueeze.default):
                continue
            for filled in list(mask.users):
                if filled.target not in _FILLS or filled.args[1] is not mask:
                    continue
                filled.replace_all_uses_with(filled.args[0])
                dead.append(filled)
    for node in dead:
        graph.graph.erase_node(node)


def _inverts(node: AnyNode, places: AnyNode) -> bool:
    """True if `node` is an empty tensor into which 0, 1, … are written at `places`."""
    if not is_call(node, _aten.index_put_.default) or len(node.args) != 3:
        return False
    target, where, numbers = node.args
    target, numbers = (
        each.args[0] if is_call(each, _aten.detach.default) else each for each in (target, numbers)
    )
    return (
        where == [places]
        and is_call(target, _aten.empty_like.default)
        and is_call(numbers, _aten.arange.default)
        and len(numbers.args) == 1
        and shape_of(numbers) == shape_of(places)
    )


def _indexed(node: AnyNode) -> tuple[AnyNode, AnyNode]:
    """The indexed tensor and its index tensor; None for both if `node` is anything else."""
    if not is_call(node, _aten.index.Tensor) or len(node.args[1]) != 1:
        return None, None
    return node.args[0], node.args[1][0]


def _with_bias(rows: AnyNode, order: AnyNode) -> tuple[AnyNode, AnyNode] | None:
    """Rows before each gets its expert's bias, and the biases [experts, dim]."""
    if not is_call(rows, _aten.add_.Tensor) or len(rows.args) != 2 or only_user(rows) is None:
        return None
    products, added = rows.args
    bias, which = _indexed(added)
    if not is_weight(bias) or not is_call(which, operator.getitem) or which.args != (order, 0):
        return None
    return products, bias


def _drop(graph: GraphModule, node: AnyNode) -> None:
    """Erase a call in place that nothing uses any more: dead code with an effect is kept."""
    if not node.users and not node._erased:
        graph.graph.erase_node(node)
