"""Lowers the decode step of a recorded forward to one list of operations, run by a single call.

Views become parts of buffers, calls of our kernels become operations, and buffers are reused. An
unknown operator stays outside, before or behind the list; a forward with one in between has no
list.

- The list computes, to the bit, what the recording computes with the same packed matrices.
- It serves steps of decode rows only; the recording serves all others.
- Sums over ranks are operations where the ranks share memory, and unknown operators elsewhere.
- It is compared with the recording before it is used.
"""

from __future__ import annotations

import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.fx import Graph, GraphModule, Node

from slipstream_core.attention.batch_order import HostRows
from slipstream_core.attention.cpu_backend import CpuContext
from slipstream_core.attention.kv_cache import LayerCache
from slipstream_core.forward.adapter_patterns import adapt_by_context, adapters_of
from slipstream_core.forward.expert_patterns import RouteForm
from slipstream_core.forward.experts import PackedMixture, mix
from slipstream_core.forward.fuse import attend_by_its_context, projection_of
from slipstream_core.forward.mixer_patterns import convolve_by_context, recur_by_context
from slipstream_core.forward.operations import (
    ACTIVATES,
    ADAPT,
    ADD,
    ATTEND,
    CONVOLVE,
    COPY,
    DECAYS_BY_KEY,
    EXPERTS,
    IS_DELTA,
    MUL,
    NORM,
    NOTHING,
    PRODUCT,
    RECUR,
    RELU,
    ROTATE,
    ROUTE,
    SCALE,
    SIGMOID,
    SILU_MUL,
    SOFTPLUS,
    SUM,
    Operation,
    OperationList,
    Part,
)
from slipstream_core.forward.projection import Packed, project
from slipstream_core.kernels.cpu.kernels import SCORES, WEIGHS, Kernels
from slipstream_core.sharding.collectives import shared_exchange
from slipstream_core.states.flat_step import FlatContext, attention_of

logger = logging.getLogger(__name__)

_aten = torch.ops.aten

AnyNode = Any  # torch.fx.Node, whose annotations would need a cast at every argument


class _Value(NamedTuple):
    """A node's value, [1, T, *shape], or [T, *shape] if `flat`; each row is contiguous.

    step: otherwise, of (heads, dim): numbers from one head to the next.
    """

    part: Part
    shape: tuple[int, ...]
    flat: bool = False
    step: int = 0


class _Unknown(Exception):  # noqa: N818  (an answer)
    """The node has no operation of ours."""


class _Lowering:
    """Lowers nodes to operations, with a buffer for each value."""

    def __init__(self, graph: GraphModule, kernels: Kernels) -> None:
        self._graph = graph
        self.exchange = shared_exchange()
        self._lowerings: dict[Any, Callable[..., _Value | list[_Value]]] = {
            kernels.rms_norm: self._norm,
            project: self._project,
            kernels.rotate: self._rotate,
            kernels.silu_mul: self._silu_mul,
            kernels.route: self._route,
            mix: self._mix,
            attend_by_its_context: self._attend,
            torch.ops.slipstream.sum_over_ranks.default: self._sum,
            torch.add: self._add,
            torch.split_with_sizes: self._split,
            operator.getitem: self._getitem,
            torch.Tensor.view: self._view,
            torch.select: self._select,
            torch.unsqueeze: self._unsqueeze,
            torch.cat: self._cat,
            torch.mul: self._mul,
            convolve_by_context: self._convolve,
            recur_by_context: self._recur,
            adapt_by_context: self._adapt,
            _aten.clone.default: self._copy,
            kernels.sigmoid: partial(self._of_each, SIGMOID),
            kernels.softplus: partial(self._of_each, SOFTPLUS),
            _aten.relu.default: partial(self._of_each, RELU),
            _aten.pow.Tensor_Scalar: self._square,
            _aten.split.Tensor: self._split_evenly,
            _aten._unsafe_view.default: self._view,
        }
        self.values: dict[AnyNode, Any] = {}
        self.inputs: dict[AnyNode, int] = {}  # buffer indices
        self.operations: list[Operation] = []
        self.widths: list[int] = []

    def lower_node(self, node: AnyNode) -> None:
        """Lower one node. Raises _Unknown."""
        lower = self._lowerings.get(node.target) if node.op == "call_function" else None
        if lower is None or (node.kwargs and node.target is not _aten.clone.default):
            raise _Unknown
        before = len(self.widths), dict(self.inputs)
        try:
            self.values[node] = lower(node, *node.args)
        except (_Unknown, TypeError, ValueError) as error:  # or unexpected arguments
            self.widths, self.inputs = self.widths[: before[0]], before[1]
            raise _Unknown from error

    def _new(self, width: int) -> Part:
        self.widths.append(width)
        return Part(len(self.widths) - 1)

    def _of(self, node: AnyNode, *, flat: bool = False, stepped: bool = False) -> _Value:
        value = self.values.get(node)
        if isinstance(value, _Value) and value.flat == flat and (stepped or not value.step):
            return value
        raise _Unknown

    def _or_input(self, node: AnyNode) -> _Value:
        """Return the value of a node as `_of` does, or an input [1, T, width] for a node that
        operators before the list compute.
        """
        if node in self.values:
            return self._of(node)
        shape = tuple(node.meta["val"].shape) if "val" in node.meta else ()
        if (
            len(shape) != 3 or shape[0] != 1 or shape[1] == 1
        ):  # recorded with many rows, so 1 is a broadcast
            raise _Unknown
        if node.meta["val"].dtype != torch.float32:
            raise _Unknown
        if node not in self.inputs:
            self.inputs[node] = self._new(int(shape[2])).buffer
        return _Value(Part(self.inputs[node]), (int(shape[2]),))

    def _tensor(self, node: AnyNode) -> torch.Tensor:
        if getattr(node, "op", None) != "get_attr":
            raise _Unknown
        tensor = getattr(self._graph, node.target)
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            raise _Unknown
        return tensor.contiguous()

    def _norm(self, _: AnyNode, x: AnyNode, weight: AnyNode, epsilon: float) -> _Value:
        is_ours = x in self.values
        source = self._of(x, stepped=True) if is_ours else self._or_input(x)
        *heads, n = source.shape
        out = self._new(math.prod(source.shape))
        self.operations.append(
            Operation(
                NORM,
                out,
                source.part,
                weight=self._tensor(weight),
                n=n,
                heads=math.prod(heads),
                step=source.step or n,
                number=epsilon,
            )
        )
        return _Value(out, source.shape)

    def _project(self, node: AnyNode, x: AnyNode, _: AnyNode) -> _Value:
        source, projection = self._or_input(x), projection_of(self._graph, node)
        if len(source.shape) != 1 or not isinstance(projection, Packed):
            raise _Unknown
        panels, bias, n = projection.panels, projection.bias, projection.num_outputs
        out = self._new(n)
        self.operations.append(
            Operation(
                PRODUCT,
                out,
                source.part,
                weight=panels,
                bias=bias,
                n=n,
                k=source.shape[0],
                format=projection.number,
            )
        )
        return _Value(out, (n,))

    def _rotate(self, _: AnyNode, x: AnyNode, cosines: AnyNode, sines: AnyNode) -> _Value:
        source = self._of(x, flat=True)
        cosine, sine = self._or_input(cosines), self._or_input(sines)
        heads, n = source.shape
        if cosine.shape != sine.shape or len(cosine.shape) != 1 or cosine.shape[0] > n:
            raise _Unknown
        (k,) = cosine.shape
        out = self._new(heads * n)
        self.operations.append(
            Operation(ROTATE, out, source.part, cosine.part, sine.part, n=n, k=k, heads=heads)
        )
        return _Value(out, source.shape, flat=True)

    def _route(
        self, _: AnyNode, logits: AnyNode, bias: AnyNode | None, form: RouteForm, _dtype: Any
    ) -> list[_Value]:
        source = self._of(logits, flat=True)
        (experts,) = source.shape
        out = self._new(2 * form.num_chosen)
        self.operations.append(
            Operation(
                ROUTE,
                out,
                source.part,
                bias=None if bias is None else self._tensor(bias),
                n=experts,
                k=form.num_chosen,
                heads=form.num_groups,
                kv_heads=form.chosen_groups,
                key_dim=form.best_of_group,
                step=SCORES.index(form.scores),
                flags=WEIGHS.index(form.weighs),
                number=form.scale,
                softcap=form.epsilon,
            )
        )
        return [
            _Value(Part(out.buffer, at), (form.num_chosen,), flat=True)
            for at in (0, form.num_chosen)
        ]

    def _mix(self, _: AnyNode, x: AnyNode, ids: AnyNode, weights: AnyNode, held: AnyNode) -> _Value:
        mixture = getattr(self._graph, held.target)
        source, which, by = (self._of(each, flat=True) for each in (x, ids, weights))
        if not isinstance(mixture, PackedMixture) or source.shape != (mixture.num_inputs,):
            raise _Unknown
        call, width = mixture.of_choices(which.shape[0])
        scratch, out = self._new(width), self._new(mixture.num_outputs)
        self.operations.append(
            Operation(EXPERTS, out, source.part, by.part, which.part, scratch, weight=call)
        )
        return _Value(out, (mixture.num_outputs,), flat=True)

    def _silu_mul(self, _: AnyNode, gate: AnyNode, up: AnyNode) -> _Value:
        one, other = self._alike(gate, up)
        if one.shape != other.shape:
            raise _Unknown
        n = math.prod(one.shape)
        out = self._new(n)
        self.operations.append(Operation(SILU_MUL, out, one.part, other.part, n=n))
        return one._replace(part=out)

    def _alike(self, *nodes: AnyNode) -> list[_Value]:
        """The values of nodes that are all flat, or all not."""
        first = self.values.get(nodes[0])
        flat = isinstance(first, _Value) and first.flat
        return [self._of(each, flat=flat) for each in nodes]

    def _mul(self, _: AnyNode, x: AnyNode, y: AnyNode | float) -> _Value:
        if getattr(x, "op", None) == "get_attr":
            x, y = y, x
        (one,) = self._alike(x)
        n = math.prod(one.shape)
        if not isinstance(y, Node) and y == 1:
            return one
        if not isinstance(y, Node):
            factor = torch.full((n,), y, dtype=torch.float32)
            operation = Operation(MUL, self._new(n), one.part, weight=factor, n=n)
        elif y.op == "get_attr":
            factor = self._tensor(y)
            # dimensions of tokens are 1, if it has them
            if factor.shape[-1:] != one.shape[-1:] or factor.numel() != n:
                raise _Unknown
            operation = Operation(MUL, self._new(n), one.part, weight=factor, n=n)
        else:
            one, other = self._alike(x, y)
            if one.shape == (1,):
                one, other = other, one
            *heads, dim = one.shape
            n = math.prod(one.shape)
            if one.shape == other.shape:
                operation = Operation(MUL, self._new(n), one.part, other.part, n=n)
            elif other.shape == (*heads, 1) and len(heads) < 2:
                operation = Operation(
                    SCALE, self._new(n), one.part, other.part, n=dim, heads=math.prod(heads)
                )
            else:
                raise _Unknown
        self.operations.append(operation)
        return one._replace(part=operation.out)

    def _of_each(self, kind: int, _: AnyNode, x: AnyNode) -> _Value:
        (source,) = self._alike(x)
        n = math.prod(source.shape)
        out = self._new(n)
        self.operations.append(Operation(kind, out, source.part, n=n))
        return source._replace(part=out)

    def _square(self, node: AnyNode, x: AnyNode, exponent: float) -> _Value:
        if exponent != 2:
            raise _Unknown
        value: _Value = self._mul(node, x, x)
        return value

    def _cat(self, _: AnyNode, parts: list[AnyNode], dim: int) -> _Value:
        """Parts that lie side by side, as those of joined products do."""
        first, *others = (self._of(each) for each in parts)
        (width,) = first.shape
        if dim not in (-1, 2):
            raise _Unknown
        for each in others:
            if each.part != Part(first.part.buffer, first.part.at + width):
                raise _Unknown
            width += each.shape[0]
        return _Value(first.part, (width,))

    def _copy(self, _: AnyNode, x: AnyNode) -> _Value:
        source = self._of(x, stepped=True)
        if not source.step:
            return source
        heads, n = source.shape
        out = self._new(heads * n)
        self.operations.append(
            Operation(COPY, out, source.part, n=n, heads=heads, step=source.step)
        )
        return _Value(out, source.shape)

    def _convolve(
        self,
        _: AnyNode,
        context: AnyNode,
        x: AnyNode,
        weight: AnyNode,
        bias: AnyNode | None,
        state: int,
        activates: bool,
    ) -> _Value:
        source, taps = self._of(x), self._tensor(weight)
        (n,) = source.shape
        if context.op != "placeholder" or taps.shape[1] != n:
            raise _Unknown
        out = self._new(n)
        self.operations.append(
            Operation(
                CONVOLVE,
                out,
                source.part,
                weight=taps,
                bias=None if bias is None else self._tensor(bias),
                n=n,
                k=len(taps),
                layer=state,
                flags=ACTIVATES * activates,
            )
        )
        return _Value(out, (n,))

    def _recur(
        self,
        _: AnyNode,
        context: AnyNode,
        query: AnyNode,
        key: AnyNode,
        value: AnyNode,
        decay: AnyNode | None,
        strength: AnyNode | None,
        skip: AnyNode | None,
        state: int,
        scale: float,
        epsilon: float,
        is_delta: bool,
        rates: AnyNode | None,
        least: float,
        most: float,
    ) -> _Value:
        a, b, c = (self._of(each, flat=True) for each in (query, key, value))
        d = None if decay is None else self._of(decay, flat=True)
        (key_heads, key_dim), (heads, value_dim) = b.shape, c.shape
        if context.op != "placeholder" or a.shape != b.shape:
            raise _Unknown
        if d is not None and d.shape not in ((heads,), (heads, key_dim)):
            raise _Unknown
        out = self._new(heads * value_dim)
        self.operations.append(
            Operation(
                RECUR,
                out,
                a.part,
                b.part,
                c.part,
                NOTHING if d is None else d.part,
                NOTHING if strength is None else self._of(strength, flat=True).part,
                weight=None if skip is None else self._tensor(skip),
                bias=None if rates is None else self._tensor(rates),
                heads=heads,
                kv_heads=key_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                layer=state,
                flags=IS_DELTA * is_delta + DECAYS_BY_KEY * (d is not None and len(d.shape) == 2),
                number=scale,
                softcap=epsilon,
                least=least,
                most=most,
            )
        )
        return _Value(out, (heads, value_dim), flat=True)

    def _attend(
        self,
        _: AnyNode,
        context: AnyNode,
        query: AnyNode,
        key: AnyNode,
        value: AnyNode,
        layer: int,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: AnyNode | None,
        is_latent: bool,
    ) -> _Value:
        if context.op != "placeholder" or is_latent:
            raise _Unknown
        a, b, c = (self._of(each, flat=True) for each in (query, key, value))
        (heads, key_dim), (kv_heads, value_dim) = a.shape, c.shape
        out = self._new(heads * value_dim)
        self.operations.append(
            Operation(
                ATTEND,
                out,
                a.part,
                b.part,
                c.part,
                heads=heads,
                kv_heads=kv_heads,
                key_dim=key_dim,
                value_dim=value_dim,
                layer=layer,
                bias=None if sinks is None else self._tensor(sinks),
                window=window or 0,
                number=scale,
                softcap=softcap or 0.0,
            )
        )
        return _Value(out, (heads, value_dim), flat=True)

    def _adapt(
        self, _: AnyNode, context: AnyNode, y: AnyNode, x: AnyNode, site: int, is_of_kept: bool
    ) -> _Value:
        """In place: nothing else reads what is adapted."""
        target, source = self._of(y), self._or_input(x)
        if is_of_kept or len(target.shape) != 1 or len(source.shape) != 1:
            raise _Unknown
        if context.op != "placeholder":
            raise _Unknown
        (n,), (k,) = target.shape, source.shape
        out = target.part
        self.operations.append(Operation(ADAPT, out, source.part, out, n=n, k=k, layer=site))
        return target

    def _sum(self, _: AnyNode, x: AnyNode) -> _Value:
        if self.exchange is None:  # then torch's process group makes it
            raise _Unknown
        (source,) = self._alike(x)
        n = math.prod(source.shape)
        if source.part.at or self.widths[source.part.buffer] != n:  # rows side by side
            raise _Unknown
        out = self._new(n)
        self.operations.append(Operation(SUM, out, source.part, n=n))
        return source._replace(part=out)

    def _add(self, _: AnyNode, x: AnyNode, y: AnyNode) -> _Value:
        if not (isinstance(x, Node) and isinstance(y, Node)):
            raise _Unknown
        if y.op == "get_attr":
            return self._add_bias(x, y)
        if x in self.values and y in self.values:
            one, other = self._alike(x, y)
        else:
            one, other = self._or_input(x), self._or_input(y)
        if one.shape != other.shape or len(one.shape) != 1:
            raise _Unknown
        out = self._new(one.shape[0])
        last = self.operations[-1] if self.operations else None
        if last is not None and last.kind == PRODUCT and last.c == NOTHING:
            for node, value, more in ((x, one, other), (y, other, one)):
                if value.part == last.out and self._is_product_alone(node, last, more):
                    self.operations[-1] = replace(last, out=out, c=more.part)
                    return one._replace(part=out)
        self.operations.append(Operation(ADD, out, one.part, other.part, n=one.shape[0]))
        return one._replace(part=out)

    def _add_bias(self, x: AnyNode, bias: AnyNode) -> _Value:
        source, added = self._of(x), self._tensor(bias)
        if source.shape != added.shape:
            raise _Unknown
        (n,) = source.shape
        out = self._new(n)
        self.operations.append(Operation(ADD, out, source.part, weight=added, n=n))
        return _Value(out, source.shape)

    def _is_product_alone(self, node: AnyNode, product: Operation, more: _Value) -> bool:
        """True if a product can add `more` itself: its whole output is used by this sum only."""
        return (
            node.target is project
            and len(node.users) == 1
            and self.widths[product.out.buffer] == product.n == more.shape[0]
            and more.part.buffer != product.out.buffer
        )

    def _split(self, _: AnyNode, x: AnyNode, sizes: list[int], dim: int) -> list[_Value]:
        source = self._of(x)
        if dim != -1 or len(source.shape) != 1 or not all(isinstance(n, int) for n in sizes):
            raise _Unknown
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        buffer, at = source.part
        return [
            _Value(Part(buffer, at + start), (size,))
            for start, size in zip(starts, sizes, strict=True)
        ]

    def _getitem(self, _: AnyNode, x: AnyNode, index: int) -> _Value:
        values = self.values.get(x)
        if not isinstance(values, list):
            raise _Unknown
        value: _Value = values[index]
        return value

    def _view(self, _: AnyNode, x: AnyNode, sizes: list[Any]) -> _Value:
        source = self.values.get(x)
        if not isinstance(source, _Value):
            raise _Unknown
        whole = math.prod(source.shape)
        is_flat = not _is_tokens(sizes[1]) and not (sizes[0] == 1 and sizes[1] == -1)
        tokens, *shape = sizes if is_flat else sizes[1:]
        if not is_flat and sizes[0] != 1:
            raise _Unknown
        if tokens == -1 and math.prod(shape) != whole:  # of something else than tokens
            raise _Unknown
        if not (_is_tokens(tokens) or tokens == -1) or not all(isinstance(n, int) for n in shape):
            raise _Unknown
        known = math.prod(n for n in shape if n != -1)
        shape = [whole // known if n == -1 else n for n in shape]
        if math.prod(shape) != whole or (source.step and tuple(shape) != source.shape):
            raise _Unknown
        return source._replace(shape=tuple(shape), flat=is_flat)

    def _split_evenly(self, _: AnyNode, x: AnyNode, size: int, dim: int) -> list[_Value]:
        """Parts of the last dimension, of each head's if there are several."""
        source = self._of(x)
        *heads, width = source.shape
        if dim not in (-1, len(source.shape) + 1) or width % size or len(heads) > 1:
            raise _Unknown
        buffer, at = source.part
        return [
            _Value(Part(buffer, at + start), (*heads, size), step=width if heads else 0)
            for start in range(0, width, size)
        ]

    def _select(self, _: AnyNode, x: AnyNode, dim: int, index: int) -> _Value:
        if dim != 0 or index != 0:
            raise _Unknown
        return self._of(x)._replace(flat=True)

    def _unsqueeze(self, _: AnyNode, x: AnyNode, dim: int) -> _Value:
        if dim == 0:
            return self._of(x, flat=True)._replace(flat=False)
        source = self._of(x)
        if dim not in (-1, 2 + len(source.shape)):
            raise _Unknown
        return source._replace(shape=(*source.shape, 1))


def _is_tokens(size: Any) -> bool:
    """True of the number of tokens among the sizes of a recorded view."""
    return getattr(size, "target", None) is torch.ops.aten.sym_size.int


class DecodeGraph(NamedTuple):
    """A forward for decode rows, and its list."""

    module: GraphModule
    program: OperationList

    @property
    def operations(self) -> Sequence[Operation]:
        """The operations of the list."""
        return self.program.operations

    @property
    def attends(self) -> list[Operation]:
        """The attention operations."""
        return [each for each in self.operations if each.kind == ATTEND]


def decode_graph(graph: GraphModule, kernels: Kernels) -> DecodeGraph | None:
    """The forward with all known operations in one call; None if they do not form one list.

    It shares `graph`'s weights and takes a CpuContext of decode rows only.
    """
    lowering = _Lowering(graph, kernels)
    behind: set[AnyNode] = set()  # nodes that depend on the list and are not in it
    for node in graph.graph.nodes:
        if behind.intersection(node.all_input_nodes):
            behind.add(node)
            continue
        try:
            lowering.lower_node(node)
        except _Unknown:
            if any(each in lowering.values for each in node.all_input_nodes):
                behind.add(node)
    by_context = attend_by_its_context, convolve_by_context, recur_by_context
    if any(node.target in by_context for node in behind):
        between = next(node for node in graph.graph.nodes if node in behind)
        logger.debug("decode steps run as recorded: %s is between layers", between.target)
        return None
    wanted = {each for node in behind for each in node.all_input_nodes if each in lowering.values}
    by_rows = ATTEND, CONVOLVE, RECUR
    if len(wanted) != 1 or not any(each.kind in by_rows for each in lowering.operations):
        return None
    (result,) = wanted
    value = lowering.values[result]
    if not isinstance(value, _Value) or value.flat or value.part.at or len(value.shape) != 1:
        return None
    if value.part.buffer in lowering.inputs.values():
        return None
    program = _program(lowering, kernels, value.part.buffer)
    if program is None:
        return None
    logger.debug("decode steps run as %d operations in one call", len(program.operations))
    module = _with_call(graph, program, list(lowering.inputs), result)
    return DecodeGraph(module, program)


def _program(lowering: _Lowering, kernels: Kernels, output: int) -> OperationList | None:
    """The operations over reused buffers: a buffer is free after its last read."""
    operations = lowering.operations
    if not any(each.out.buffer == output for each in operations):
        return None
    indices: dict[int, int] = {
        buffer: index for index, buffer in enumerate(lowering.inputs.values())
    }
    num_inputs = len(indices)
    widths = [lowering.widths[buffer] for buffer in indices]
    last_use = {buffer: index for index, each in enumerate(operations) for buffer in each.read}
    last_use[output] = len(operations)
    free: dict[int, list[int]] = {}
    placed = []
    for index, each in enumerate(operations):
        for own in (part.buffer for part in each.written):
            width = lowering.widths[own]
            spare = free.get(width)
            if own in indices:  # in place
                pass
            elif own != output and spare:
                indices[own] = spare.pop()
            else:
                indices[own] = len(widths)
                widths.append(width)
        a, b, c, d, e, out = (
            part if part == NOTHING else Part(indices[part.buffer], part.at)
            for part in (each.a, each.b, each.c, each.d, each.e, each.out)
        )
        placed.append(replace(each, a=a, b=b, c=c, d=d, e=e, out=out))
        for buffer in {*each.read, each.out.buffer}:
            is_ours = indices[buffer] >= num_inputs
            if is_ours and last_use.get(buffer, index) == index:
                free.setdefault(lowering.widths[buffer], []).append(indices[buffer])
    return OperationList(kernels, placed, widths, num_inputs, indices[output], lowering.exchange)


def _with_call(
    graph: GraphModule, program: OperationList, inputs: list[AnyNode], result: AnyNode
) -> GraphModule:
    def call(context: CpuContext | FlatContext, *tensors: torch.Tensor) -> torch.Tensor:
        attention = attention_of(context)
        assert isinstance(attention, CpuContext)
        mixing = context.step.arguments if isinstance(context, FlatContext) else None
        adapters = adapters_of(context)
        of_rows = None if adapters is None else adapters.arguments
        return program(tensors, attention.layers, attention.address, mixing, of_rows)

    new = Graph()
    copies: dict[AnyNode, AnyNode] = {}
    output = new.graph_copy(graph.graph, copies)
    new.output(output)
    context = next(node for node in new.nodes if node.name == "context")
    with new.inserting_before(copies[result]):
        called = new.call_function(call, (context, *(copies[each] for each in inputs)))
    called.meta = dict(copies[result].meta)
    copies[result].replace_all_uses_with(called)
    new.eliminate_dead_code()
    return GraphModule(graph, new)


def trial_context(decode: DecodeGraph, kernels: Kernels, rows: int) -> CpuContext:
    """A context of decode rows that see only themselves, with its own cache."""
    layers = [LayerCache(*(torch.empty(0),) * 4)] * (
        1 + max((each.layer for each in decode.attends), default=-1)
    )
    for each in decode.attends:
        keys, values = (
            torch.zeros(rows + 1, each.kv_heads, dim) for dim in (each.key_dim, each.value_dim)
        )
        layers[each.layer] = LayerCache(keys, values, keys.flatten(1), values.flatten(1))
    of_rows = HostRows(
        num_decodes=rows,
        query_lens=np.ones(rows, np.int32),
        kv_lens=np.ones(rows, np.int32),
        slots=np.arange(rows),
        block_tables=np.arange(1, rows + 1, dtype=np.int32)[:, None],
        block_size=1,
    )
    return CpuContext(kernels, layers, of_rows, np.arange(1, rows + 1))
