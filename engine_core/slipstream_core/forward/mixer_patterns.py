"""Rewrites a recording of a model with mixers so that all of it is by token.

Mixers turn channels in front of tokens for a convolution, merge tokens and heads for a norm, and
compute with weights alone (-exp(A_log)) in every forward. Afterwards tokens are the second
dimension everywhere, and what needs no input is a tensor of the graph.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from slipstream_core.forward.fuse import AnyNode, is_call, is_weight, shape_of
from slipstream_core.states.flat_step import FlatContext

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_SPLITS = (_aten.split.Tensor, _aten.split_with_sizes.default)
_BY_ELEMENT = (
    _aten.add.Tensor,
    _aten.mul.Tensor,
    _aten.pow.Tensor_Scalar,
    _aten.rsqrt.default,
    _aten.sigmoid.default,
    _aten.silu.default,
)
_FOLDED = (
    _aten.add.Tensor,
    _aten.clone.default,
    _aten.exp.default,
    _aten.mul.Tensor,
    _aten.neg.default,
    _aten.squeeze.dim,
)
_MOST_FOLDED = 1 << 20  # numbers


class _Form(NamedTuple):
    """A tensor's form in the model: [1, channels, T], or [T * merged, ...] of [1, T, merged, ...].

    node: the same numbers with tokens as the second dimension.
    """

    node: AnyNode
    merged: int = 0


def fold(graph: GraphModule) -> None:
    """Compute what depends on weights alone and is small."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function" or node.target not in _FOLDED:
            continue
        given = node.all_input_nodes
        if not given or not all(is_weight(each) for each in given):
            continue
        if math.prod(shape_of(node)) > _MOST_FOLDED:
            continue
        with torch.no_grad():
            result = node.target(*(_held(graph, each) for each in node.args), **node.kwargs)
        _replace_by(graph, node, result)
    graph.graph.eliminate_dead_code()


def _held(graph: GraphModule, value: Any) -> Any:
    """The tensor that a node stands for, or another argument as it is."""
    return getattr(graph, str(value.target)) if isinstance(value, Node) else value


def _replace_by(graph: GraphModule, node: AnyNode, tensor: torch.Tensor) -> None:
    name = f"folded_{node.name}"
    graph.register_buffer(name, tensor)
    with graph.graph.inserting_before(node):
        new = graph.graph.get_attr(name)
    new.meta = dict(node.meta)
    node.replace_all_uses_with(new)


def tokens_second(graph: GraphModule, tokens: int) -> None:
    """Let tokens be the second dimension. Raises ValueError where they cannot be."""
    forms: dict[AnyNode, _Form] = {}
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        if is_call(node, _aten.slice.Tensor) and shape_of(node) == shape_of(node.args[0]):
            if node.args[0] in forms:
                forms[node] = forms[node.args[0]]
            else:
                node.replace_all_uses_with(node.args[0])
            continue
        if any(each in forms for each in node.all_input_nodes):
            with graph.graph.inserting_before(node):
                _in_form(graph, node, forms, tokens)
            continue
        shape = _shape(node)
        if node.target in _VIEWS and len(shape) == 2 and _times(shape[0], tokens):
            merged = shape[0] // tokens
            with graph.graph.inserting_before(node):
                own = _view(graph, node.args[0], [1, tokens, merged, shape[1]])
            forms[node] = _Form(own, merged)
        elif _turns(node) and shape_of(node.args[0])[:2] == (1, tokens):
            forms[node] = _Form(node.args[0])
    if forms.keys() & set(graph.graph.output_node().all_input_nodes):
        raise ValueError("the result is not by token")
    graph.graph.eliminate_dead_code()


def _in_form(graph: GraphModule, node: AnyNode, forms: dict[AnyNode, _Form], tokens: int) -> None:
    """Compute a node from inputs in a form, with tokens as the second dimension."""
    given = [forms.get(each) for each in node.all_input_nodes]
    known = [each for each in given if each is not None]
    merged = known[0].merged
    unknown = ValueError(f"{node.target} of tokens that are not the second dimension")
    if any(each.merged != merged for each in known):
        raise unknown
    x = known[0].node
    shape = _shape(node)
    if not merged and _turns(node):
        node.replace_all_uses_with(x)
        return
    if merged and node.target in _VIEWS and shape[:2] == (1, tokens):
        node.replace_all_uses_with(_view(graph, x, list(shape)))
        return
    is_same = node.target in (*_VIEWS, _aten.expand.default) and shape == _shape(node.args[0])
    if node.target is _aten.clone.default or (not merged and is_same):
        forms[node] = known[0]
        return
    if is_call(node, _aten.bmm.default) and node.args[1] in forms and not merged:
        forms[node] = _Form(_product(graph, x, _weight_of(node.args[0], unknown)))
        return
    arguments = torch.fx.node.map_arg(
        node.args, lambda each: forms[each].node if each in forms else each
    )
    others = [each for each in node.all_input_nodes if each not in forms]
    if node.target is operator.getitem:
        pass
    elif not merged and node.target in _SPLITS and node.args[2] in (1, -2) and not node.kwargs:
        arguments = (*arguments[:2], -1)
    elif node.target in _BY_ELEMENT:
        # a weight of a head's width is one of the last dimension in either form
        if others and not (merged and all(is_weight(each) for each in others)):
            raise unknown
    elif not (merged and is_call(node, _aten.mean.dim) and node.args[1:] == ([-1], True)):
        raise unknown
    new = graph.graph.call_function(node.target, arguments, dict(node.kwargs))
    if "val" in node.meta:
        own = (1, tokens, merged, *shape[1:]) if merged else (1, tokens, shape[1])
        new.meta = {"val": node.meta["val"].new_empty(own)}
    forms[node] = _Form(new, merged)


def _weight_of(node: AnyNode, unknown: Exception) -> AnyNode:
    """The weight [N, K] that a node is as [1, N, K]. Raises `unknown` for anything else."""
    shape = _shape(node)[-2:]
    while node.target in (*_VIEWS, _aten.expand.default, _aten.unsqueeze.default):
        node = node.args[0]
    if not is_weight(node) or _shape(node) != shape:
        raise unknown
    return node


def _product(graph: GraphModule, x: AnyNode, weight: AnyNode) -> AnyNode:
    """A linear layer of x [1, T, K], as recordings of these have it."""
    num_tokens, num_inputs = _shape(x)[1:]
    flat = _view(graph, x, [num_tokens, num_inputs])
    turned = graph.graph.call_function(_aten.t.default, (weight,))
    turned.meta = {"val": weight.meta["val"].t()}
    product = graph.graph.call_function(_aten.mm.default, (flat, turned))
    product.meta = {"val": x.meta["val"].new_empty(num_tokens, _shape(weight)[0])}
    return _view(graph, product, [1, num_tokens, _shape(weight)[0]])


def _view(graph: GraphModule, x: AnyNode, shape: list[int]) -> AnyNode:
    if list(shape_of(x)) == shape:
        return x
    new = graph.graph.call_function(_aten.view.default, (x, shape))
    new.meta = {"val": x.meta["val"].new_empty(shape)}
    return new


def _turns(node: AnyNode) -> bool:
    """True if node exchanges the last two of three dimensions."""
    if not is_call(node, _aten.transpose.int) or len(_shape(node)) != 3:
        return False
    return {each % 3 for each in node.args[1:]} == {1, 2}


def _shape(node: AnyNode) -> tuple[int, ...]:
    return shape_of(node) if isinstance(node.meta.get("val"), torch.Tensor) else ()


def _times(number: int, tokens: int) -> bool:
    return number > tokens and number % tokens == 0


def mix_by_context(graph: GraphModule) -> None:
    """Replace the markers of mixers by calls of the context's rows."""
    context = next(node for node in graph.graph.nodes if node.name == "context")
    for target, call in (
        (torch.ops.slipstream.convolve.default, convolve_by_context),
        (torch.ops.slipstream.recur.default, recur_by_context),
    ):
        for node in graph.graph.find_nodes(op="call_function", target=target):
            if call is convolve_by_context:
                _turn_weight(graph, node)
            with graph.graph.inserting_before(node):
                new = graph.graph.call_function(call, (context, *node.args))
            new.meta = node.meta
            node.replace_all_uses_with(new)
            graph.graph.erase_node(node)


def _turn_weight(graph: GraphModule, node: AnyNode) -> None:
    """Give a convolution its weight as [taps, channels], as kernels read it."""
    weight = node.args[1]
    if not is_weight(weight):
        raise ValueError("the weight of a convolution is computed")
    name = f"turned_{weight.target}"
    graph.register_buffer(name, getattr(graph, weight.target).detach().t().contiguous())
    with graph.graph.inserting_before(node):
        node.update_arg(1, graph.graph.get_attr(name))


def convolve_by_context(
    context: FlatContext,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: int,
    activates: bool,
) -> torch.Tensor:
    """The convolution of a recorded mixer; shapes as in FlatStep.convolve."""
    return context.step.convolve(x, weight, bias, state, activates)


def recur_by_context(
    context: FlatContext,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor | None,
    strength: torch.Tensor | None,
    skip: torch.Tensor | None,
    state: int,
    scale: float,
    epsilon: float,
    is_delta: bool,
    rates: torch.Tensor | None,
    least: float,
    most: float,
) -> torch.Tensor:
    """The recurrence of a recorded mixer; shapes as in FlatStep.recur."""
    rule = scale, epsilon, is_delta
    return context.step.recur(
        query, key, value, decay, strength, skip, state, *rule, rates, least, most
    )
